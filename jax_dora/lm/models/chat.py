"""Chat templates of models, rendered in jinja2's sandbox the way transformers renders them."""

import datetime
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jax_dora.lm.models.folder import EXTRA_TEMPLATES
from jax_dora.lm.models.special_tokens import CONFIG, SpecialTokens, read_optional

TEMPLATE = "chat_template.jinja"

Messages = Sequence[dict[str, Any]]

_LOG = logging.getLogger(__name__)
# The content of a message that shows what a template renders around a content.
_MARK = "content-of-the-reply"

# Describes the content of a message, for error messages.
CONTENT = 'a text, or parts of the form {"type": "text", "text": …}'


def text_of(content: Any) -> str | None:
    """Returns the content of a message as one text, or None if it is not of the form `CONTENT`."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
    texts = [part.get("text") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


class ChatTemplate:
    """Renders conversations in the format that a model was trained on.

    Attributes:
      source, with_tools: the jinja2 templates, of which the second is for conversations with tools.
      special_tokens: variables for the templates: bos_token, eos_token, and others.
      variables: further variables that `source` reads.
      now: the time that a template can write; None for that of rendering.
    """

    now: datetime.datetime | None = None

    def __init__(
        self, source: str, special_tokens: dict[str, str], *, with_tools: str | None = None
    ) -> None:
        """
        Args:
          source: the jinja2 template.
          special_tokens: variables for the template: bos_token, eos_token, and others.
          with_tools: a separate template for conversations with tools, if the model has one.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: (self.now or datetime.datetime.now()).strftime(form),
        }
        try:
            self._template = environment.from_string(source)
            self._with_tools = environment.from_string(with_tools or source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid jinja2: {error}") from error
        self.source, self.with_tools = source, with_tools or source
        self.special_tokens = special_tokens
        read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        given = {"messages", "add_generation_prompt", "tools", "documents", *special_tokens}
        self.variables = frozenset(read - given - environment.globals.keys())
        self._warnings: set[str] = set()

    @classmethod
    def of(cls, folder: Path, *, base: Path | None = None) -> Self | None:
        """Returns the template in a folder, or None if the folder has none.

        Args:
          base: the folder of the model, if `folder` is an adapter's. Its special tokens are used
            if `folder` names none.
        """
        sources = _sources(folder, read_optional(folder / CONFIG))
        if not sources:
            return None
        if "default" not in sources:
            raise ValueError(
                f"{folder} has the chat templates {', '.join(sources)}; expected one named default"
            )
        if odd := [source for source in sources.values() if not isinstance(source, str)]:
            raise ValueError(
                f"{folder} has the chat template {str(odd[0])[:100]}; expected a string, or a list "
                "of objects with a name and a template"
            )
        named = SpecialTokens.of(folder).named
        if base is not None and not named:
            named = SpecialTokens.of(base).named
        tokens = {name: token.content for name, token in named.items()}
        return cls(sources["default"], tokens, with_tools=sources.get("tool_use"))

    def equals(self, other: Self | None) -> bool:
        """Returns whether two templates render every conversation alike."""
        if other is None or (self.source, self.with_tools) != (other.source, other.with_tools):
            return False
        names = self.special_tokens | other.special_tokens
        used = [name for name in names if name in self.source or name in self.with_tools]
        return all(self.special_tokens.get(n) == other.special_tokens.get(n) for n in used)

    def render(self, messages: Messages, *, reply: bool = False, **more: Any) -> str:
        """Returns the text of a conversation.

        Args:
          reply: end with the prefix of the assistant's next message.
          **more: further variables for the template, such as `tools`.
        """
        # Templates test these variables with "is none", so they have to be defined.
        variables = {"tools": None, "documents": None} | more
        variables |= {"messages": list(map(_plain, messages)), "add_generation_prompt": reply}
        template = self._template if variables["tools"] is None else self._with_tools
        try:
            return template.render(**self.special_tokens, **variables)
        except Exception as error:  # a template is a program and can raise any error
            raise ValueError(f"the chat template failed: {error}") from error

    def turns(self, messages: Messages, **more: Any) -> list[list[tuple[str, bool]]]:
        """Returns texts to train on. Each text is a list of pairs (piece, whether it is learned).

        If the template renders a message the same way whatever follows, one text holds all replies
        of the assistant. Some templates do not: Qwen3's omits the reasoning of earlier replies.
        Then there is one text for each reply, which ends with that reply.

        A text always holds the prompt that the template renders for a reply, and the content of the
        reply, even if the template renders a conversation with the reply in another way. A reply
        with the weight 0 is only part of the prompts of later ones.

        Raises:
          ValueError: the template failed, or does not render the content of replies.
        """
        texts: list[list[tuple[str, bool]]] = []
        for end, message in enumerate(messages, 1):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            before = self.render(messages[: end - 1], reply=True, **more)
            reply = (self._reply(before, messages[:end], more), True)
            parts = {"reasoning of replies": _plain(message).get("reasoning_content")}
            if message.get("tool_calls"):
                parts["content of replies that call tools"] = message.get("content")
            for name, part in parts.items():
                if not _contains(reply[0], text_of(part) or ""):
                    self._warn(f"The chat template leaves out the {name}: it is not learned")
            previous = "".join(piece for piece, _ in texts[-1]) if texts else ""
            if texts and before.startswith(previous):
                texts[-1] += [(before[len(previous) :], False), reply]
            else:
                texts.append([(before, False), reply])
        return texts

    def _warn(self, text: str) -> None:
        """Logs a warning, once."""
        if text not in self._warnings:
            self._warnings.add(text)
            _LOG.warning(text)

    def _reply(self, prompt: str, messages: Messages, more: dict[str, Any]) -> str:
        """Returns what a model should write after `prompt`: the last message, and its end.

        That is what the template renders after the prompt, if this has all of the content. Some
        templates render a reply that is part of the conversation in another way than one to come:
        DeepSeek-R1's begins a thought in the prompt and removes thoughts from messages, and
        Mistral's writes the system message only if no reply follows. Then it is the content of the
        message, between what the template renders around it.
        """
        message = messages[-1]
        whole = self.render(messages, **more)
        # Some templates render calls of tools in place of the content.
        has_calls = bool(message.get("tool_calls"))
        content = "" if has_calls else text_of(message.get("content")) or ""
        if whole.startswith(prompt) and _contains(whole[len(prompt) :], content):
            return whole[len(prompt) :]
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        marked = self.render([*messages[:-1], plain | {"content": _MARK}], **more)
        header, found, end = marked.rpartition(_MARK)
        start = header.rstrip()
        if not found or not whole.startswith(start):
            raise ValueError(
                f"the chat template renders message {len(messages)} without the prompt that it "
                "renders for a reply; expected the message to begin with that prompt, since the "
                "rest is learned"
            )
        self._warn(
            "The chat template renders replies in another way than it asks for them, such as "
            "without their thoughts, or without the system message; they are learned after the "
            "prompt that asks for a reply, with their whole content"
        )
        # What is between the header and the content, unless the prompt has it already.
        space, opening = header[len(start) :], ""
        if header.startswith(prompt):
            space = header[len(prompt) :]
        elif prompt.startswith(header):
            space, opening = "", prompt[len(header) :].strip()
        elif prompt[-1:].isspace():
            space = ""
        if whole.startswith(header):
            reply = whole[len(header) :]
        else:  # a message without content, such as a tool call, without the space before one
            reply, space = whole[len(start) :], ""
        if not _contains(reply, content):
            reply = content + end
        if opening and reply.lstrip().startswith(opening):
            reply = reply.lstrip()[len(opening) :].removeprefix(prompt[len(prompt.rstrip()) :])
        return space + reply


class _Generation(Extension):
    """The block `{% generation %}`, which marks replies in some templates and renders nothing."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it this way

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message in the form that templates expect.

    Fields that are None are removed, since some templates would render them as "None". Reasoning is
    stored under each name that templates use for it.
    """
    message = {name: value for name, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            return {"thinking": message[name]} | message | {"reasoning_content": message[name]}
    return message


def _contains(text: str, content: str) -> bool:
    """Returns whether a text has a content. Templates may change the spaces in it."""
    return "".join(content.split()) in "".join(text.split())


def _sources(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the templates of a folder by name. Template files replace tokenizer_config.json's."""
    files = {file.stem: file for file in (folder / EXTRA_TEMPLATES).glob("*.jinja")}
    if (file := folder / TEMPLATE).is_file():
        files["default"] = file
    if files:
        return {name: file.read_text("utf-8") for name, file in sorted(files.items())}
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        return {str(entry.get("name")): entry.get("template") for entry in template}
    return {} if template is None else {"default": template}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
