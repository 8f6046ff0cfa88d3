"""The tokens that end an answer: where a model's folder names them, and how they are stored."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jax_dora.lm.models.chat import ChatTemplate
from jax_dora.lm.models.special_tokens import SpecialTokens, read_optional

GENERATION = "generation_config.json"
# The content of a reply that shows what a chat template writes after one.
_CONTENT = "x1x"


def named_end_tokens(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Returns the end tokens that the files of a folder name.

    They are the eos_token_id of config.json and of generation_config.json, and the tokenizer's
    eos_token, in this order.

    Args:
      folder: the folder of a model or of an adapter.
      config: the contents of config.json, which an adapter's folder does not have.
      tokenizer: the tokenizer.

    Raises:
      ValueError: a file is not a JSON object, or names something that is not a token id.
    """
    tokens: list[int] = []
    for name, fields in (("config.json", config), (GENERATION, read_optional(folder / GENERATION))):
        value = fields.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(f"{name} has eos_token_id {ids!r}; expected a token id")
        tokens += ids
    if (named := SpecialTokens.of(folder).named.get("eos_token")) is not None:
        tokens += _ids(tokenizer, named.content)
    return tokens


def ends_of_replies(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Returns the first special token that a template writes after a reply, if it writes one."""
    reply = {"role": "assistant", "content": _CONTENT}
    try:
        text = template.render([{"role": "user", "content": "x"}, reply])
    except ValueError:  # a template may demand other conversations
        return []
    _, found, after = text.rpartition(_CONTENT)
    tokens = tokenizer.encode(after, add_special_tokens=False).ids if found else []
    return [token for token in tokens if is_special(tokenizer, token)][:1]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token that is given as its id or as its text.

    Raises:
      ValueError: the tokenizer has no such token.
    """
    size = tokenizer.get_vocab_size()
    if token.isdecimal():
        if int(token) < size:
            return int(token)
        raise ValueError(f"end_tokens has {token}; expected a token id from 0 to {size - 1}")
    ids = _ids(tokenizer, token) or tokenizer.encode(token, add_special_tokens=False).ids
    if len(ids) != 1:
        raise ValueError(
            f"end_tokens has {token!r}, which the tokenizer splits into {len(ids)} tokens; "
            "expected one token, as its text or its id"
        )
    return ids[0]


def is_special(tokenizer: Tokenizer, token: int) -> bool:
    """Returns whether a token is special: part of no text that a user writes."""
    added = tokenizer.get_added_tokens_decoder().get(token)
    return added is not None and added.special


def generation_config(folder: Path, config: dict[str, Any], end_tokens: Sequence[int]) -> str:
    """Returns the text of a generation_config.json with `end_tokens`.

    Everything else in it is the model's. If the model's folder has no such file, transformers uses
    the tokens that config.json names, so these are in the text.
    """
    stored = read_optional(folder / GENERATION)
    if not stored:
        names = ("bos_token_id", "pad_token_id")
        stored = {name: config[name] for name in names if config.get(name) is not None}
    ends = list(end_tokens) if len(end_tokens) > 1 else end_tokens[0]
    return json.dumps(stored | {"eos_token_id": ends}, indent=2, sort_keys=True) + "\n"


def _ids(tokenizer: Tokenizer, token: str) -> list[int]:
    found = tokenizer.token_to_id(token)
    return [] if found is None else [found]
