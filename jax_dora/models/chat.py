"""A model's own chat template, rendered by jinja2's sandbox as transformers does it."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jax_dora.models.config import read_object
from jax_dora.models.folder import MORE_TEMPLATES

Messages = Sequence[dict[str, Any]]

# What a message's content may be.
CONTENT = 'a text, or parts of the form {"type": "text", "text": …}'


def text_of(content: Any) -> str | None:
    """Returns a message's content in one text; None where it is not as `CONTENT` says."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
    texts = [part.get("text") for part in content]
    return "".join(texts) if all(isinstance(one, str) for one in texts) else None


class ChatTemplate:
    """Renders conversations as the model was trained to read them."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], *, with_tools: str | None = None
    ) -> None:
        """
        Args:
          source: the template.
          special_tokens: what it may name: bos_token, eos_token, and others.
          with_tools: the template of conversations that have tools, if it is another.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }
        try:
            self._template = environment.from_string(source)
            self._with_tools = environment.from_string(with_tools or source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is no jinja2: {error}") from error
        self._special_tokens = special_tokens

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Returns the template of a model's folder, or None where it has none."""
        settings = _read(folder / "tokenizer_config.json")
        sources = _sources(folder, settings)
        if not sources:
            return None
        if "default" not in sources:
            raise ValueError(
                f"{folder} has the chat templates {', '.join(sources)}; expected a default"
            )
        if odd := [source for source in sources.values() if not isinstance(source, str)]:
            raise ValueError(
                f"{folder} has the chat template {str(odd[0])[:100]}; expected a string, or a list "
                "of objects with a name and a template"
            )
        special = _read(folder / "special_tokens_map.json") | settings
        tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in special.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        return cls(sources["default"], tokens, with_tools=sources.get("tool_use"))

    def render(self, messages: Messages, *, reply: bool = False, **more: Any) -> str:
        """Returns the text of a conversation.

        Args:
          reply: end with what goes before the assistant's next message.
          **more: what the template may read besides, such as `tools`.
        """
        # Templates ask whether these are none.
        given = {"tools": None, "documents": None} | more
        given |= {"messages": list(map(_plain, messages)), "add_generation_prompt": reply}
        template = self._template if given["tools"] is None else self._with_tools
        try:
            return template.render(**self._special_tokens, **given)
        except Exception as error:  # a template computes, and may fail as any program does
            raise ValueError(f"the chat template refuses: {error}") from error

    def turns(self, messages: Messages, **more: Any) -> list[list[tuple[str, bool]]]:
        """Returns texts to train on: each a list of pieces, and whether it is to be learned.

        One text has every reply of the assistant, if the template writes a message the same way
        whatever follows it. Some do not (Qwen3's leaves out the thoughts of earlier replies); then
        each reply gets a text that ends with it, as the model will read and write it.
        """
        texts: list[list[tuple[str, bool]]] = []
        for end, message in enumerate(messages, 1):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[: end - 1], reply=True, **more)
            whole = self.render(messages[:end], **more)
            if not whole.startswith(before):
                raise ValueError(
                    f"the chat template begins message {end} otherwise than the prompt that it "
                    "makes for a reply; expected the same text, since what follows it is learned"
                )
            reply = (whole[len(before) :], True)
            said = "".join(piece for piece, _ in texts[-1]) if texts else ""
            if texts and before.startswith(said):
                texts[-1] += [(before[len(said) :], False), reply]
            else:
                texts.append([(before, False), reply])
        return texts


class _Generation(Extension):
    """The block that marks the assistant's words in some templates, which says nothing itself."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without fields of null, which some templates write as "None", and with its
    reasoning under the names by which templates ask for it."""
    message = {name: value for name, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            return {"thinking": message[name]} | message | {"reasoning_content": message[name]}
    return message


def _sources(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the templates of a folder by their names: those of files alone, if there are any."""
    files = {one.stem: one for one in (folder / MORE_TEMPLATES).glob("*.jinja")}
    if (file := folder / "chat_template.jinja").is_file():
        files["default"] = file
    if files:
        return {name: file.read_text("utf-8") for name, file in sorted(files.items())}
    given = settings.get("chat_template")
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        return {str(one.get("name")): one.get("template") for one in given}
    return {} if given is None else {"default": given}


def _read(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
