"""Turns records of the usual forms into tokens, and marks which tokens are learned."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from jax_dora.lm.finetune.packing import Example
from jax_dora.lm.finetune.records import Record
from jax_dora.lm.models.chat import CONTENT, ChatTemplate, text_of
from jax_dora.lm.models.tokenizer import prompt_tokens

FORMS = (
    'a list "messages" or "conversations", strings or lists of messages "prompt" and "completion", '
    'strings "instruction" and "output" (and "input"), or a string "text"'
)
FIELDS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output")
FIELDS += ("text", "system", "tools")
# The roles of chat templates, by the names that ShareGPT and the tools around it use.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
# A character that is a token of its own (a byte token in SentencePiece models) and not in any text.
MARK = "\x01"
# The prompt that Stanford Alpaca was trained with.
ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


@dataclasses.dataclass
class Encoder:
    """Turns records into examples for one model.

    Attributes:
      tokenizer: the model's tokenizer. The special tokens that it puts before a text begin a
        prompt.
      ends: the tokens that end a text. A completion that ends in none of them gets the first. Chat
        templates write their own end token.
      template: the chat template for records with messages; None if the model has none.
      columns: the names of fields in the data, by the names that `FORMS` has for them. If it is not
        empty, other fields are not read.
    """

    tokenizer: Tokenizer
    ends: Sequence[int]
    template: ChatTemplate | None
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := self.columns.keys() - set(FIELDS):
            raise ValueError(
                f"columns={dict(self.columns)}: {min(unknown)!r} is no field of a record; expected "
                f"some of {', '.join(FIELDS)}, each with the name that it has in the data"
            )

    def examples(self, records: Iterable[Record]) -> Iterator[Example]:
        """Yields one example for each record, or several for some conversations.

        Raises:
          ValueError: a record has an unknown form or invalid contents; the message has its
          location. Or no record has one of `columns`.
        """
        unseen, found = set(self.columns.values()), set()
        for where, fields in records:
            unseen -= fields.keys()
            found |= fields.keys()
            if self.columns:
                names = self.columns.items()
                fields = {name: fields[column] for name, column in names if column in fields}
            try:
                yield from self._examples(fields)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{where}: {error}") from error
        if unseen:
            raise ValueError(
                f"columns={dict(self.columns)}: no record has a field {min(unseen)!r}; expected "
                f"some of {', '.join(sorted(found))}"
            )

    def _tokens(self, text: str) -> list[int]:
        text.encode()  # raises a clear error for unpaired surrogates; tokenizers does not
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _examples(self, fields: dict[str, Any]) -> Iterator[Example]:
        match fields:
            case {"messages": list(messages)}:
                yield from self._chat(messages, fields.get("tools"))
            case {"conversations": list(turns)}:
                if system := fields.get("system"):
                    turns = [{"from": "system", "value": system}, *turns]
                yield from self._chat(list(map(_message, turns)), fields.get("tools"))
            case {"prompt": list(prompt), "completion": list(completion)}:
                # Earlier replies are part of the prompt.
                before = [one | {"weight": 0} if isinstance(one, dict) else one for one in prompt]
                yield from self._chat([*before, *completion], fields.get("tools"))
            case {"prompt": str(prompt), "completion": str(completion)}:
                yield self._answer(prompt, completion)
            case {"instruction": str(instruction), "output": str(output)}:
                text = fields.get("input") or ""
                if not isinstance(text, str):
                    raise ValueError(f'"input" is a {type(text).__name__}; expected a string')
                prompt = ALPACA.format(
                    paired=", paired with an input that provides further context" * bool(text),
                    instruction=instruction,
                    input=f"### Input:\n{text}\n\n" * bool(text),
                )
                yield self._answer(prompt, output)
            case {"text": str(text)}:
                yield self._answer("", text)._replace(is_text=True)
            case _:
                found = [f"{name} ({type(value).__name__})" for name, value in fields.items()]
                raise ValueError(f"it has {', '.join(found) or 'no fields'}; expected {FORMS}")

    def _following(self, before: str, text: str) -> list[int]:
        """Returns the tokens of `text` when it follows `before`.

        They can differ from the tokens of `text` alone: at the beginning of a text, some tokenizers
        add a space and others remove one.
        """
        first, both = self._tokens(before), self._tokens(before + text)
        if both[: len(first)] == first:
            return both[len(first) :]
        # A token spans the boundary. Tokenize `text` alone, or after a mark if it gets a space
        # alone.
        mark, after_mark = self._tokens(MARK), self._tokens(MARK + text)
        candidates = [self._tokens(text), after_mark[len(mark) :]]
        decode = self.tokenizer.decode
        matching = (ids for ids in candidates if decode([*first, *ids]) == decode(both))
        return next(matching, candidates[0])

    def _answer(self, prompt: str, completion: str) -> Example:
        after = self._following(prompt, completion)
        before = prompt_tokens(self.tokenizer, prompt)
        if not prompt and after[: len(before)] == before:
            after = after[len(before) :]
        if not after or after[-1] not in self.ends:
            after = [*after, self.ends[0]]
        return Example([*before, *after], [False] * len(before) + [True] * len(after))

    def _chat(self, messages: Sequence[Any], tools: Any) -> Iterator[Example]:
        if self.template is None:
            raise ValueError(
                "it has messages, but the model has no chat template; expected one in its "
                "tokenizer_config.json or chat_template.jinja"
            )
        messages = list(messages)
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(f'message {number} has no "role"; expected a string')
            if message.get("content") is not None:
                if (content := text_of(message["content"])) is None:
                    shown = str(message["content"])[:100]
                    raise ValueError(f"message {number} has content {shown!r}; expected {CONTENT}")
                messages[number - 1] = message | {"content": content}
            if message.get("weight") not in (None, 0, 1):
                raise ValueError(
                    f'message {number} has "weight" {message["weight"]!r}; expected 1 or none for '
                    "a reply that is learned, or 0 for one that is not"
                )
        if tools is not None and not _are_objects(tools):
            raise ValueError(f'"tools" is {str(tools)[:100]!r}; expected a list of objects')
        turns = self.template.turns(messages, tools=tools)
        if not turns:
            raise ValueError(
                'no message has the role "assistant" and a weight other than 0, so none is learned'
            )
        for pieces in turns:
            tokens: list[int] = []
            learned: list[bool] = []
            before = ""
            for text, is_reply in pieces:
                more, before = self._following(before, text), text
                tokens += more
                learned += [is_reply] * len(more)
            yield Example(tokens, learned)


def _message(turn: Any) -> Any:
    """Returns a turn of ShareGPT, {"from": ..., "value": ...}, as a message."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn  # some data sets have messages under this name
    if (role := ROLES.get(turn["from"])) is None:
        raise ValueError(f"a turn is from {turn['from']!r}; expected one of {', '.join(ROLES)}")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return others | {"role": role, "content": turn.get("value")}


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
