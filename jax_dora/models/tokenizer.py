"""The tokenizer of a Hugging Face folder, and the tokens that end a text."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jax_dora.models.config import read_object


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
    for given in (config, generation):
        one = given.get("eos_token_id")
        ends += one if isinstance(one, list) else [] if one is None else [one]
    if not ends or not all(type(one) is int and one >= 0 for one in ends):
        raise ValueError(f"config.json has eos_token_id {ends!r}; expected the number of a token")
    return ends
