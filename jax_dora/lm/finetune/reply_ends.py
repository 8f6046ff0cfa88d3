"""Finds the tokens that end learned replies, and which therefore end the answers of the model."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from tokenizers import Tokenizer

from jax_dora.lm.finetune.packing import Example
from jax_dora.lm.models.end_tokens import is_special


def learned_ends(
    examples: Iterable[Example], tokenizer: Tokenizer, known: Collection[int]
) -> tuple[list[int], Counter[int]]:
    """Returns the last tokens of learned replies that are not `known` to end a text.

    Blank tokens at the end of a reply do not count: many chat templates put a line break behind the
    token that ends a reply.

    Returns:
      The special tokens among them, which end a text from now on; and the others, which do not, as
      they may be part of any text, with their numbers of replies.
    """
    ends = Counter(
        token
        for example in examples
        for last in _last_indices(example.learned)
        if (token := _end(example, last, tokenizer, known)) not in known
    )
    special = [token for token, _ in ends.most_common() if is_special(tokenizer, token)]
    return special, Counter({token: ends[token] for token in ends if token not in special})


def _last_indices(learned: list[bool]) -> Iterator[int]:
    """Yields the index of the last token of each learned reply."""
    for index, (now, after) in enumerate(zip(learned, [*learned[1:], False], strict=True)):
        if now and not after:
            yield index


def _end(example: Example, last: int, tokenizer: Tokenizer, known: Collection[int]) -> int:
    """Returns the last token of a reply that is known or not blank; its first if there is none."""
    tokens, learned = example.tokens, example.learned
    while last and learned[last - 1] and tokens[last] not in known:
        if tokenizer.decode([tokens[last]], skip_special_tokens=False).strip():
            break
        last -= 1
    return tokens[last]
