"""Reads a Hugging Face folder's settings for text: tokenizer, end tokens, chat template, length."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from jax_dora.lm.models.chat import TEMPLATE, ChatTemplate, Messages
from jax_dora.lm.models.config import max_positions
from jax_dora.lm.models.end_tokens import (
    GENERATION,
    ends_of_replies,
    generation_config,
    named_end_tokens,
    token_id,
)
from jax_dora.lm.models.folder import EXTRA_TEMPLATES
from jax_dora.lm.models.special_tokens import ADDED, CONFIG, MAP, SpecialTokens, read_optional

TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How a model, with or without an adapter, reads and writes text.

    Attributes:
      folder: the model's folder.
      tokenizer: the tokenizer, without truncation and padding.
      end_tokens: the tokens that end a text, each once. A completion to learn ends with the first.
      max_tokens: the maximum number of tokens of a text; None if config.json does not give it.
      tokenizer_folder, template_folder: the folders of the tokenizer and of the chat template: the
        adapter's if it has others than the model, and otherwise the model's.
    """

    folder: Path
    tokenizer: Tokenizer
    end_tokens: list[int]
    max_tokens: int | None
    tokenizer_folder: Path
    template_folder: Path

    @classmethod
    def of(
        cls,
        folder: Path,
        config: dict[str, Any],
        *,
        adapter: Path | None = None,
        end_tokens: Sequence[str] = (),
    ) -> Self:
        """Returns the settings of a model's folder with the config.json `config`.

        Args:
          adapter: the PEFT folder of an adapter; see `with_adapter`.
          end_tokens: further tokens that end a text, before those that the folders name. Each is
            given by its text or its id.

        Raises:
          FileNotFoundError, ValueError: a file is missing or invalid, or no token ends a text.
        """
        texts = cls(folder, read_tokenizer(folder), [], max_positions(config), folder, folder)
        texts = texts._with_ends_of(folder, config)
        if adapter is not None:
            texts = texts.with_adapter(adapter)
        given = [token_id(texts.tokenizer, token) for token in end_tokens]
        texts = texts.with_end_tokens([*given, *texts.end_tokens])
        if not texts.end_tokens:
            raise ValueError(
                f"{folder} names no token that ends a text; expected an eos_token_id in its "
                "config.json or generation_config.json, an eos_token in its tokenizer_config.json, "
                "or end_tokens"
            )
        return texts

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, or None."""
        return ChatTemplate.of(self.template_folder, base=self.folder)

    def with_adapter(self, folder: Path) -> Self:
        """Returns the settings of the model with the adapter in a PEFT folder.

        A tokenizer and a chat template in that folder are used instead of the model's, since the
        adapter was trained with them. Tokens of its other files are added to the model's if it has
        no tokenizer.json. End tokens that the folder names come before the model's, since the
        adapter's completions end with the first.

        Raises:
          ValueError: a file of the folder is invalid.
        """
        texts = self
        if any((folder / name).is_file() for name in (TOKENIZER, CONFIG, MAP, ADDED)):
            tokenizer = read_tokenizer(folder, base=self.tokenizer)
            if tokenizer.to_str() != self.tokenizer.to_str():
                texts = dataclasses.replace(texts, tokenizer=tokenizer, tokenizer_folder=folder)
        own = ChatTemplate.of(folder, base=self.folder)
        if own is not None and not own.equals(self.template):
            texts = dataclasses.replace(texts, template_folder=folder)
        return texts._with_ends_of(folder, {})

    def _with_ends_of(self, folder: Path, config: dict[str, Any]) -> Self:
        """Returns the settings with the end tokens that a folder names before the others, and that
        of its template behind them."""
        ends = [*named_end_tokens(folder, config, self.tokenizer), *self.end_tokens]
        with contextlib.suppress(ValueError):  # raised again where the template is needed
            if self.template is not None:
                ends += ends_of_replies(self.template, self.tokenizer)
        return self.with_end_tokens(ends)

    def with_end_tokens(self, tokens: Sequence[int]) -> Self:
        """Returns the settings with other end tokens, each once."""
        return dataclasses.replace(self, end_tokens=list(dict.fromkeys(tokens)))

    @property
    def own(self) -> str:
        """What the adapter has of its own, such as "tokenizer and chat template"; "" if nothing."""
        folders = {"tokenizer": self.tokenizer_folder, "chat template": self.template_folder}
        return " and ".join(name for name, one in folders.items() if one != self.folder)

    def files(self, config: dict[str, Any]) -> dict[str, str | None]:
        """Returns the contents of the files, by name, that a folder of the model with the adapter
        has instead of those of the model's folder; None for files that it does not have.

        Args:
          config: the contents of the model's config.json.
        """
        files: dict[str, str | None] = {}
        files[GENERATION] = generation_config(self.folder, config, self.end_tokens)
        adapters = {self.tokenizer_folder, self.template_folder} - {self.folder}
        for folder in adapters:
            is_whole = (folder / TOKENIZER).is_file() and (folder / CONFIG).is_file()
            for name in (CONFIG, MAP, ADDED):
                stored = {} if is_whole else read_optional(self.folder / name)
                stored |= read_optional(folder / name)
                files[name] = json.dumps(stored, indent=2) if stored else None
        if adapters:
            files[TOKENIZER] = self.tokenizer.to_str(pretty=True)
        if adapters and (template := self.template) is not None:
            # These files replace the templates in tokenizer_config.json.
            files[TEMPLATE] = template.source
            has_more = template.with_tools != template.source
            files[f"{EXTRA_TEMPLATES}/tool_use.jinja"] = template.with_tools if has_more else None
        return files

    def chat_tokens(
        self, messages: Messages, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Returns the tokens of a chat, up to the beginning of the assistant's next message.

        Args:
          variables: variables for the chat template, such as Qwen3's enable_thinking.

        Raises:
          ValueError: there is no template, it does not read a variable, or it has failed.
        """
        if self.template is None:
            raise ValueError(
                f"{self.folder.name} has no chat template; expected a text to complete"
            )
        variables = variables or {}
        if unknown := variables.keys() - self.template.variables:
            raise ValueError(
                f"chat_template_kwargs has {min(unknown)!r}, which the chat template does not "
                f"read; expected some of {', '.join(sorted(self.template.variables)) or 'none'}"
            )
        text = self.template.render(messages, reply=True, **variables)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"messages is {text!r}; expected valid Unicode ({error})") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def check_length(self, tokens: int, subject: str, remedy: str = "") -> None:
        """Raises a ValueError if a text of `tokens` tokens is too long for the model.

        The message begins with `subject` and ends with `remedy`.
        """
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise ValueError(
                f"{subject}; expected at most config.json's max_position_embeddings "
                f"{self.max_tokens}{remedy}"
            )


def text_files(folder: Path) -> list[Path]:
    """Returns the files of an adapter's folder that `TextSettings.with_adapter` reads."""
    names = (TOKENIZER, CONFIG, MAP, ADDED, TEMPLATE, GENERATION)
    found = [folder / name for name in names if (folder / name).is_file()]
    return found + sorted((folder / EXTRA_TEMPLATES).glob("*.jinja"))


def read_tokenizer(folder: Path, *, base: Tokenizer | None = None) -> Tokenizer:
    """Returns the tokenizer of a folder, without truncation and padding.

    It has all tokens that the folder names, as transformers' tokenizer of the folder.

    Args:
      base: the tokenizer to add the folder's tokens to if the folder has no tokenizer.json.

    Raises:
      FileNotFoundError, ValueError: a file is missing or invalid, or two files contradict each
        other.
    """
    file = folder / TOKENIZER
    if base is not None and not file.is_file():
        tokenizer = Tokenizer.from_str(base.to_str())
        SpecialTokens.of(folder).add_to(tokenizer)
        return tokenizer
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
