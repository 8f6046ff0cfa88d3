"""Records of any of the usual forms as tokens, with what of them is to be learned."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from jax_dora.finetune.data import Example
from jax_dora.finetune.records import Record
from jax_dora.models.chat import CONTENT, ChatTemplate, text_of

FORMS = (
    'a list "messages", strings "prompt" and "completion", strings "instruction" and "output" '
    '(and "input"), or a string "text"'
)
MARK = "\x01"  # a token of its own, which is in no text: in SentencePiece's models a byte
# The words that Stanford Alpaca was trained with.
ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n{given}### Response:\n"
)


@dataclasses.dataclass
class Encoder:
    """Makes examples of records, as one model reads them."""

    tokenizer: Tokenizer  # whose special tokens, such as that of a beginning, go before a prompt
    end: int  # the token that ends a completion; a chat template writes its own
    template: ChatTemplate | None  # of "messages"

    def examples(self, records: Iterable[Record]) -> Iterator[Example]:
        """Yields one example for each record, or several for a conversation."""
        for where, fields in records:
            try:
                yield from self._examples(fields)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{where}: {error}") from error

    def _tokens(self, text: str, *, special: bool = False) -> list[int]:
        text.encode()  # tokenizers does not say what is wrong with half a surrogate pair
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def _examples(self, fields: dict[str, Any]) -> Iterator[Example]:
        match fields:
            case {"messages": list(messages)}:
                yield from self._chat(messages, fields.get("tools"))
            case {"prompt": str(prompt), "completion": str(completion)}:
                yield self._answer(prompt, completion)
            case {"instruction": str(instruction), "output": str(output)}:
                given = fields.get("input") or ""
                if not isinstance(given, str):
                    raise ValueError(f'"input" is a {type(given).__name__}; expected a string')
                prompt = ALPACA.format(
                    paired=", paired with an input that provides further context" * bool(given),
                    instruction=instruction,
                    given=f"### Input:\n{given}\n\n" * bool(given),
                )
                yield self._answer(prompt, output)
            case {"text": str(text)}:
                yield self._answer("", text)
            case _:
                told = [f"{name} ({type(value).__name__})" for name, value in fields.items()]
                raise ValueError(f"it has {', '.join(told) or 'nothing'}; expected {FORMS}")

    def _following(self, before: str, text: str) -> list[int]:
        """Returns the tokens of `text` after `before`: at the beginning of a text some tokenizers
        put a space, and others take it away."""
        first, both = self._tokens(before), self._tokens(before + text)
        if both[: len(first)] == first:
            return both[len(first) :]
        # A token stands across. Alone the text may get a space, but not after what is one token.
        mark, after_mark = self._tokens(MARK), self._tokens(MARK + text)
        ways = [self._tokens(text), after_mark[len(mark) :]]
        decode = self.tokenizer.decode
        return next((one for one in ways if decode([*first, *one]) == decode(both)), ways[0])

    def _answer(self, prompt: str, completion: str) -> Example:
        before, after = self._tokens(prompt, special=True), self._following(prompt, completion)
        learned = [False] * len(before) + [True] * (len(after) + 1)
        return Example([*before, *after, self.end], learned)

    def _chat(self, messages: Sequence[Any], tools: Any) -> Iterator[Example]:
        if self.template is None:
            raise ValueError(
                'it has "messages", and the model has no chat template; expected one in its '
                "tokenizer_config.json or chat_template.jinja"
            )
        messages = list(messages)
        for number, one in enumerate(messages, 1):
            if not isinstance(one, dict) or not isinstance(one.get("role"), str):
                raise ValueError(f'message {number} has no "role"; expected a string')
            if one.get("content") is not None:
                if (content := text_of(one["content"])) is None:
                    told = str(one["content"])[:100]
                    raise ValueError(f"message {number} has content {told!r}; expected {CONTENT}")
                messages[number - 1] = one | {"content": content}
            if one.get("weight") not in (None, 1):
                raise ValueError(
                    f'message {number} has "weight" {one["weight"]!r}; expected 1, or none: every '
                    "reply is learned"
                )
        if tools is not None and not _is_objects(tools):
            raise ValueError(f'"tools" is {str(tools)[:100]!r}; expected a list of objects')
        turns = self.template.turns(messages, tools=tools)
        if not turns:
            raise ValueError('no message has the role "assistant", whose replies are learned')
        for pieces in turns:
            tokens: list[int] = []
            learned: list[bool] = []
            before = ""
            for text, is_reply in pieces:
                more, before = self._following(before, text), text
                tokens += more
                learned += [is_reply] * len(more)
            yield Example(tokens, learned)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)
