"""Reads what a Hugging Face folder says of texts: its tokenizer, the tokens that end one, chats,
the longest."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from jax_dora.models.chat import ChatTemplate
from jax_dora.models.config import max_positions, read_object


@dataclasses.dataclass(frozen=True)
class Texts:
    """Makes tokens of a model's texts, and knows how long they may be.

    Attributes:
      folder: the model's.
      tokenizer: neither cuts nor pads.
      ends: the tokens that end a text.
      most: tokens of the longest text; None where config.json does not say.
    """

    folder: Path
    tokenizer: Tokenizer
    ends: list[int]
    most: int | None

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any]) -> Self:
        """Returns what a model's folder says, whose config.json holds `config`.

        Raises:
          FileNotFoundError, ValueError: a file is missing or damaged.
        """
        tokenizer = read_tokenizer(folder)
        return cls(folder, tokenizer, read_ends(folder, config), max_positions(config))

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """The template of chats; None where the folder has none."""
        return ChatTemplate.of(self.folder)

    def check(self, tokens: int, told: str, remedy: str = "") -> None:
        """Raises a ValueError that begins with `told` if a text may not have so many tokens."""
        if self.most is not None and tokens > self.most:
            raise ValueError(
                f"{told}; expected at most config.json's max_position_embeddings {self.most}"
                f"{remedy}"
            )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a model's folder, which neither cuts nor pads."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: expected the tokenizer's fast form there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more special
        raise ValueError(f"{file} is no tokenizer: {error}") from error
    # A file may say how its maker cut and padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_ends(folder: Path, config: dict[str, Any]) -> list[int]:
    """Returns the tokens that end a text: those of config.json first, then those that
    generation_config.json adds.
    """
    file = folder / "generation_config.json"
    generation = read_object(file) if file.is_file() else {}
    ends: list[int] = []
    for name, given in (("config.json", config), (file.name, generation)):
        one = given.get("eos_token_id")
        its = one if isinstance(one, list) else [] if one is None else [one]
        if not all(type(one) is int and one >= 0 for one in its):
            raise ValueError(f"{name} has eos_token_id {its!r}; expected the number of a token")
        ends += its
    if not ends:
        raise ValueError("config.json has no eos_token_id; expected the number of a token")
    return ends
