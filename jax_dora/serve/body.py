"""The bodies of requests: every field is read, refused by name, or one whose value asks nothing."""

import dataclasses
import secrets
from typing import Any

from jax_dora.models.chat import CONTENT, text_of
from jax_dora.serve.errors import ApiError, wrong
from jax_dora.serve.request import TOP_LOGPROBS, SamplingParams

STOPS, STOP_LENGTH = 4, 256
# Values of what is not there that ask for nothing.
type FieldValues = dict[str, tuple[Any, ...]]
NO_EFFECT: FieldValues = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
}
NO_EFFECT_COMPLETION: FieldValues = {"best_of": (1,), "echo": (False,), "suffix": ("",)}
NO_EFFECT_CHAT: FieldValues = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "store": (False,),
}
# Who asks, and their notes: nothing follows from them.
IGNORED = {"user": str, "safety_identifier": str, "prompt_cache_key": str, "metadata": dict}


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields that both kinds of requests have."""

    model: str
    max_tokens: int | None
    sampling: SamplingParams
    stream: bool
    include_usage: bool


def completion(body: Any) -> tuple[Fields, str | list[int]]:
    body = _without_nulls(body)
    prompt = body.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_tokens = isinstance(prompt, list) and all(_is_int(one) for one in prompt)
    if not (isinstance(prompt, str) or is_tokens) or not prompt:
        raise wrong("prompt", prompt, "one text, or one list of tokens; several are not supported")
    logprobs = _integer(body, "logprobs", 0, TOP_LOGPROBS)
    # OpenAI's 16, which surprises; but so do answers that end elsewhere than theirs.
    max_tokens = _integer(body, "max_tokens", 1, 2**31 - 1) or 16
    return _fields(body, max_tokens, logprobs, NO_EFFECT_COMPLETION), prompt


def chat(body: Any) -> tuple[Fields, list[dict[str, Any]]]:
    body = _without_nulls(body)
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of one or more")
    asks = _boolean(body, "logprobs")
    logprobs = _integer(body, "top_logprobs", 0, TOP_LOGPROBS)
    if logprobs is not None and not asks:
        raise wrong("logprobs", asks, "true beside top_logprobs")
    limits = [
        _integer(body, name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")
    ]
    max_tokens = min(filter(None, limits), default=None)
    fields = _fields(body, max_tokens, (logprobs or 0) if asks else None, NO_EFFECT_CHAT)
    return fields, [_message(one) for one in messages]


def _fields(
    body: dict[str, Any], max_tokens: int | None, logprobs: int | None, neutral: FieldValues
) -> Fields:
    """Reads what both kinds of requests have, of a body whose other fields have been taken."""
    model = body.pop("model", None)
    if not isinstance(model, str):
        raise wrong("model", model, "the name of a model, as /v1/models lists them")
    stream, options = _boolean(body, "stream"), body.pop("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise wrong("stream_options", options, "an object with include_usage")
    options = _without_nulls(options)
    if options and not stream:
        raise wrong("stream_options", options, "it beside stream alone")
    seed = _integer(body, "seed", -(2**63), 2**63 - 1)
    fields = Fields(
        model=model,
        max_tokens=max_tokens,
        sampling=SamplingParams(
            temperature=_number(body, "temperature", 0.0, 2.0, 1.0),
            top_p=_number(body, "top_p", 0.0, 1.0, 1.0, above=True),
            seed=secrets.randbits(64) if seed is None else seed % 2**64,
            stop=_stops(body.pop("stop", None)),
            logprobs=logprobs,
        ),
        stream=stream,
        include_usage=_boolean(options, "include_usage"),
    )
    _reject_unsupported(body, NO_EFFECT | neutral)
    return fields


def _without_nulls(body: Any) -> dict[str, Any]:
    """Returns the fields that are not null."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; expected a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def _reject_unsupported(body: dict[str, Any], neutral: FieldValues) -> None:
    """Refuses the fields that are not supported, unless they have a value that changes nothing."""
    for name, value in body.items():
        if name in IGNORED:
            if not isinstance(value, IGNORED[name]):
                raise wrong(name, value, "a text" if IGNORED[name] is str else "an object")
            continue
        if name not in neutral:
            raise ApiError(400, f"Unrecognized request argument: {name[:100]!r}", param=name[:100])
        # True is 1 in Python, and not in JSON.
        is_flag = isinstance(value, bool)
        if not any(value == one and is_flag == isinstance(one, bool) for one in neutral[name]):
            expected = f"{neutral[name][0]!r} or nothing: more is not supported"
            raise wrong(name, value, expected)


def _message(message: Any) -> dict[str, Any]:
    """Returns a message, its content in one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise wrong("messages", message, "objects with role and content")
    # Answers have fields that are null, and clients send them back.
    message = {name: value for name, value in message.items() if value is not None}
    content = text_of(message.get("content"))
    if content is None:
        raise wrong("messages", message, f"content that is {CONTENT}")
    if odd := message.keys() - {"role", "content", "name"}:
        raise wrong("messages", sorted(odd), "role, content and name in each, and nothing else")
    if not isinstance(message.get("name", ""), str):
        raise wrong("messages", message, "a name that is a text")
    return message | {"content": content}


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > STOPS:
        raise wrong("stop", value, f"a text, or a list of up to {STOPS}")
    if not all(isinstance(one, str) and 0 < len(one) <= STOP_LENGTH for one in stops):
        raise wrong("stop", value, f"texts of 1 to {STOP_LENGTH} letters")
    return tuple(unicode("stop", one) for one in stops)


def unicode(param: str, text: str) -> str:
    """Returns a text, which may have no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(param, text, f"Unicode ({error})") from error
    return text


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = body.pop(name, None)
    if value is None:
        return None
    if not _is_int(value) or not least <= value <= most:
        raise wrong(name, value, f"a whole number from {least} to {most}")
    return value


def _number(
    body: dict[str, Any], name: str, least: float, most: float, otherwise: float, above=False
) -> float:
    value = body.pop(name, otherwise)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (above and value == least):
        raise wrong(name, value, f"a number {'above' if above else 'from'} {least} to {most}")
    return float(value)


def _boolean(body: dict[str, Any], name: str) -> bool:
    value = body.pop(name, False)
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value
