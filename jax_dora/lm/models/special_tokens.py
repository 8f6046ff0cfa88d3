"""Reads the tokens that a model's folder names in files beside tokenizer.json."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from tokenizers import AddedToken, Tokenizer

from jax_dora.lm.models.config import read_json_object

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
# The names that every tokenizer of transformers knows. Models may have others that end in _token.
NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SpecialTokens(NamedTuple):
    """The tokens of tokenizer_config.json, special_tokens_map.json and added_tokens.json.

    As in transformers, the last two files do not count if tokenizer_config.json has
    "added_tokens_decoder", the list of all added tokens.
    """

    folder: Path
    listed: dict[int, AddedToken]  # tokens with the ids that the files give
    named: dict[str, AddedToken]  # "bos_token", "eos_token", …
    others: list[AddedToken]  # special tokens without an id and a name
    is_split: bool  # whether special tokens in a text are read as text

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Returns the tokens of a model's folder.

        Raises:
          ValueError: a file is not a JSON object, or a token in it has another form.
        """
        settings = read_optional(folder / CONFIG)
        listed: dict[int, AddedToken] = {}
        if "added_tokens_decoder" in settings:
            listed = dict(_listed(settings["added_tokens_decoder"]))
            origin = dict.fromkeys(settings, CONFIG)
        else:
            mapped = read_optional(folder / MAP)
            origin = dict.fromkeys(settings, CONFIG) | dict.fromkeys(mapped, MAP)
            settings |= mapped
        # Tokens without an id get one in the order of NAMES, and then of the file.
        settings = {name: settings[name] for name in NAMES if name in settings} | settings
        named = {
            name: _token(value, f"{origin[name]} has {name}")
            for name, value in settings.items()
            if (name in NAMES and value is not None)
            # Other fields that end so may be settings, such as "add_bos_token".
            or (
                name.endswith("_token")
                and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
            )
        }
        others: list[AddedToken] = []
        name = "extra_special_tokens"
        if not settings.get(name):
            name = "additional_special_tokens"
        values = settings.get(name) or []
        if isinstance(values, dict):
            named |= {
                key: _token(value, f"{origin[name]} has {key}") for key, value in values.items()
            }
        elif isinstance(values, list):
            others = [_token(value, f"{origin[name]} has {name} with") for value in values]
        else:
            raise ValueError(f"{origin[name]} has {name} {values!r}; expected a list of tokens")
        if "added_tokens_decoder" not in settings:
            special = {token.content for token in (*named.values(), *others)}
            for content, number in read_optional(folder / ADDED).items():
                if type(number) is not int:
                    raise ValueError(f"{ADDED} has {content!r}: {number!r}; expected a token id")
                listed[number] = AddedToken(content, special=content in special)
        return cls(folder, listed, named, others, settings.get("split_special_tokens") is True)

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Adds the tokens that `tokenizer` lacks, in the order in which transformers adds them.

        Raises:
          ValueError: a file gives a token another id than `tokenizer`.
        """
        known = tokenizer.get_added_tokens_decoder()
        shown = {repr(token) for token in known.values()}
        added = [token for _, token in sorted(self.listed.items()) if repr(token) not in shown]
        special = {token.content for token in self.named.values()}
        for token in added:
            token.special = token.special or token.content in special
        contents = {token.content for token in (*known.values(), *added)}
        for token in (*self.named.values(), *self.others):
            if token.content not in contents:
                added.append(token)
                contents.add(token.content)
        tokenizer.add_tokens(added)
        tokenizer.encode_special_tokens = self.is_split
        for number, token in self.listed.items():
            if (found := tokenizer.token_to_id(token.content)) != number:
                raise ValueError(
                    f"{self.folder} gives the token {token.content!r} the id {number}, but its "
                    f"tokenizer.json makes it {found}: save the tokenizer again, so that its files "
                    "agree"
                )


def read_optional(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no file."""
    return read_json_object(file) if file.is_file() else {}


def _listed(tokens: Any) -> Iterator[tuple[int, AddedToken]]:
    where = f"{CONFIG} has added_tokens_decoder"
    if not isinstance(tokens, dict):
        raise ValueError(f"{where} {str(tokens)[:100]}; expected an object of token ids")
    for number, token in tokens.items():
        if not number.isdecimal():
            raise ValueError(f"{where} with {number!r}; expected token ids")
        yield int(number), _token(token, f"{where} with", special=False)


def _token(value: Any, where: str, *, special: bool = True) -> AddedToken:
    """Returns a token that a file gives as a string, or as an object with flags."""
    fields = {"content": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise ValueError(
            f'{where} {str(value)[:100]}; expected a string, or an object with a "content"'
        )
    flags = {name: bool(fields[name]) for name in _FLAGS if name in fields}
    return AddedToken(fields["content"], **({"special": special} | flags))
