"""BERT's uncased WordPiece tokenizer, in plain Python (arXiv 1810.04805; Wu et al. 2016)."""

from __future__ import annotations

import unicodedata
from pathlib import Path

PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
_LONGEST_WORD = 100  # longer ones are unknown, as in the reference


class WordPiece:
    """Sentences to ids, by the greedy longest match in the vocabulary file `vocab.txt`."""

    def __init__(self, vocabulary: Path) -> None:
        words = vocabulary.read_text(encoding="utf-8").splitlines()
        self._ids = {word: index for index, word in enumerate(words)}

    def __call__(self, sentences: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        """Ids and mask (1 for a token, 0 for padding), `[sentences, longest]`."""
        rows = [
            [START, *(piece for word in _words(s) for piece in self._pieces(word)), END]
            for s in sentences
        ]
        longest = max(map(len, rows))
        ids = [[self._ids[t] for t in row + [PAD] * (longest - len(row))] for row in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        return ids, mask

    def _pieces(self, word: str) -> list[str]:
        if len(word) > _LONGEST_WORD:
            return [UNKNOWN]
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                if prefix + word[start:end] in self._ids:
                    pieces.append(prefix + word[start:end])
                    start = end
                    break
            else:
                return [UNKNOWN]
        return pieces


def _words(text: str) -> list[str]:
    """Lower-cased, without accents, split at white space and around punctuation and CJK."""
    words: list[str] = []
    gap = True
    for char in unicodedata.normalize("NFD", text.lower()):
        category = unicodedata.category(char)
        if char.isspace():
            gap = True
        elif category == "Mn" or category.startswith("C") or char == "\N{REPLACEMENT CHARACTER}":
            continue
        elif _stands_alone(char, category):
            words.append(char)
            gap = True
        elif gap:
            words.append(char)
            gap = False
        else:
            words[-1] += char
    return words


def _stands_alone(char: str, category: str) -> bool:
    ascii_symbol = char.isascii() and not char.isalnum()
    cjk = 0x4E00 <= ord(char) <= 0x9FFF or 0x3400 <= ord(char) <= 0x4DBF
    return ascii_symbol or category.startswith("P") or cjk
