"""Reads a Hugging Face folder's settings for text: tokenizer, end tokens, chat template, length."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from jax_dora.models.chat import ChatTemplate
from jax_dora.models.config import max_positions, read_json_object
from jax_dora.models.special_tokens import SpecialTokens


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How a model reads and writes text.

    Attributes:
      folder: the model's folder.
      tokenizer: the tokenizer, without truncation and padding.
      end_tokens: the tokens that end a text.
      max_tokens: the maximum number of tokens of a text; None if config.json does not give it.
    """

    folder: Path
    tokenizer: Tokenizer
    end_tokens: list[int]
    max_tokens: int | None

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any]) -> Self:
        """Returns the settings of a model's folder with the config.json `config`.

        Raises:
          FileNotFoundError, ValueError: a file is missing or invalid.
        """
        tokenizer = read_tokenizer(folder)
        return cls(folder, tokenizer, read_end_tokens(folder, config), max_positions(config))

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if the folder has none."""
        return ChatTemplate.of(self.folder)

    def check_length(self, tokens: int, subject: str, remedy: str = "") -> None:
        """Raises a ValueError if a text of `tokens` tokens is too long for the model.

        The message begins with `subject` and ends with `remedy`.
        """
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise ValueError(
                f"{subject}; expected at most config.json's max_position_embeddings "
                f"{self.max_tokens}{remedy}"
            )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a model's folder, without truncation and padding.

    It has all tokens that the folder names, as transformers' tokenizer of the folder.

    Raises:
      FileNotFoundError, ValueError: a file is missing or invalid, or two files contradict each
        other.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; expected a fast tokenizer there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"{file} is not a valid tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    SpecialTokens.of(folder).add_to(tokenizer)
    return tokenizer


def begin_tokens(tokenizer: Tokenizer) -> list[int]:
    """Returns the special tokens that a tokenizer puts before every text."""
    encoding = tokenizer.encode("a")
    marks = encoding.special_tokens_mask  # 1 for tokens that are not of the text
    return encoding.ids[: marks.index(0) if 0 in marks else len(marks)]


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of a text that a model continues.

    They begin with the tokenizer's special tokens, once, even if the text has them itself. Special
    tokens that the tokenizer puts behind a text are left out, since the text goes on.
    """
    begin, tokens = begin_tokens(tokenizer), tokenizer.encode(text, add_special_tokens=False).ids
    return tokens if tokens[: len(begin)] == begin else [*begin, *tokens]


def read_end_tokens(folder: Path, config: dict[str, Any]) -> list[int]:
    """Returns the tokens that end a text: first config.json's, then generation_config.json's."""
    file = folder / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    tokens: list[int] = []
    for name, fields in (("config.json", config), (file.name, generation)):
        value = fields.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(f"{name} has eos_token_id {ids!r}; expected a token id")
        tokens += ids
    if not tokens:
        raise ValueError("config.json has no eos_token_id; expected a token id")
    return tokens
