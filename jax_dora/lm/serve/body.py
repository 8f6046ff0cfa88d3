"""Parses the bodies of requests.

Every field is either used, or ignored since it has no effect, or rejected with an error that names
it.
"""

import dataclasses
import secrets
from typing import Any

from jax_dora.lm.domains import Domain, integers, numbers
from jax_dora.lm.models.chat import CONTENT, text_of
from jax_dora.lm.models.sampling import GREEDY, TOP_LOGPROBS, Sampling
from jax_dora.lm.serve.errors import ApiError, invalid_field

MAX_STOPS, MAX_STOP_LENGTH = 4, 256
COUNT, LOGPROBS = integers(1), integers(0, TOP_LOGPROBS)
TEMPERATURE = numbers("from 0 to 2", lambda value: 0 <= value <= 2)  # OpenAI's range
# Fields of unsupported features, with the values that have no effect.
type Values = dict[str, tuple[Any, ...]]
NO_EFFECT: Values = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
}
NO_EFFECT_COMPLETION: Values = {"best_of": (1,), "echo": (False,), "suffix": ("",)}
NO_EFFECT_CHAT: Values = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "store": (False,),
}
# Fields of messages, as clients send answers back, that say that there is no such part.
NO_PARTS = (("tool_calls", []), ("annotations", []))
# Fields that are always ignored, with their types: information about the user.
IGNORED = {"user": str, "safety_identifier": str, "prompt_cache_key": str, "metadata": dict}


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields that completions and chats have in common; see `Request` for most of them."""

    model: str
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    stream: bool
    include_usage: bool


def completion(body: Any) -> tuple[Fields, str | list[int]]:
    """Parses the body of a completion; returns the common fields and the prompt."""
    body = _without_nulls(body)
    prompt = body.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_tokens = isinstance(prompt, list) and all(_is_int(one) for one in prompt)
    if not (isinstance(prompt, str) or is_tokens) or not prompt:
        raise invalid_field(
            "prompt", prompt, "one string or one list of tokens; several are not supported"
        )
    logprobs = _value(body, "logprobs", LOGPROBS)
    # 16 is OpenAI's default. It is surprisingly low, but a different default would surprise too.
    max_tokens = _value(body, "max_tokens", COUNT) or 16
    return _fields(body, max_tokens, logprobs, NO_EFFECT_COMPLETION), prompt


def chat(body: Any) -> tuple[Fields, list[dict[str, Any]]]:
    """Parses the body of a chat; returns the common fields and the messages."""
    body = _without_nulls(body)
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise invalid_field("messages", messages, "a list of one or more messages")
    has_logprobs = _boolean(body, "logprobs")
    logprobs = _value(body, "top_logprobs", LOGPROBS)
    if logprobs is not None and not has_logprobs:
        raise invalid_field("logprobs", has_logprobs, "true, since top_logprobs is given")
    limits = [_value(body, name, COUNT) for name in ("max_completion_tokens", "max_tokens")]
    max_tokens = min(filter(None, limits), default=None)
    fields = _fields(body, max_tokens, (logprobs or 0) if has_logprobs else None, NO_EFFECT_CHAT)
    return fields, [_message(one) for one in messages]


def _fields(
    body: dict[str, Any], max_tokens: int | None, logprobs: int | None, no_effect: Values
) -> Fields:
    """Parses the common fields of a body from which all other used fields have been removed."""
    model = body.pop("model", None)
    if not isinstance(model, str):
        raise invalid_field("model", model, "the name of a model, as /v1/models lists them")
    stream, options = _boolean(body, "stream"), body.pop("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise invalid_field("stream_options", options, "an object with include_usage")
    options = _without_nulls(options)
    if options and not stream:
        raise invalid_field("stream_options", options, "no such field unless stream is true")
    _boolean(options, "include_obfuscation")  # which has no effect
    seed = _value(body, "seed", integers(-(2**63), 2**63 - 1))
    drawing = {
        name: _value(body, name, Sampling.DOMAINS[name], getattr(GREEDY, name))
        for name in ("top_k", "top_p", "min_p")
    }
    fields = Fields(
        model=model,
        max_tokens=max_tokens,
        sampling=Sampling(
            temperature=_value(body, "temperature", TEMPERATURE, 1.0),
            seed=secrets.randbits(64) if seed is None else seed % 2**64,
            **drawing,
        ),
        stop=_stops(body.pop("stop", None)),
        stop_token_ids=_tokens(body, "stop_token_ids"),
        ignore_eos=_boolean(body, "ignore_eos"),
        logprobs=logprobs,
        stream=stream,
        include_usage=_boolean(options, "include_usage"),
    )
    _reject_unsupported(body, NO_EFFECT | no_effect)
    return fields


def _without_nulls(body: Any) -> dict[str, Any]:
    """Returns the fields of a JSON object that are not null."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; expected a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def _reject_unsupported(body: dict[str, Any], no_effect: Values) -> None:
    """Raises an error for unsupported fields, unless their values have no effect."""
    for name, value in body.items():
        if name in IGNORED:
            if not isinstance(value, IGNORED[name]):
                expected = "a string" if IGNORED[name] is str else "an object"
                raise invalid_field(name, value, expected)
            continue
        if name not in no_effect:
            raise ApiError(400, f"Unrecognized request argument: {name[:100]!r}", param=name[:100])
        # True equals 1 in Python, but not in JSON.
        is_flag = isinstance(value, bool)
        if not any(value == one and is_flag == isinstance(one, bool) for one in no_effect[name]):
            expected = f"{no_effect[name][0]!r} or no such field, since it is not supported"
            raise invalid_field(name, value, expected)


def _message(message: Any) -> dict[str, Any]:
    """Returns a message with its content as a single string."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid_field("messages", message, "objects with role and content")
    # Clients send answers back, which have fields that are null.
    message = {name: value for name, value in message.items() if value is not None}
    message = {name: value for name, value in message.items() if (name, value) not in NO_PARTS}
    # An answer that had no text, such as one that would only call tools.
    if message["role"] == "assistant":
        message = {"content": ""} | message
    content = text_of(message.get("content"))
    if content is None:
        raise invalid_field("messages", message, f"content that is {CONTENT}")
    if others := message.keys() - {"role", "content", "name"}:
        raise invalid_field("messages", sorted(others), "only role, content and name in each")
    if not isinstance(message.get("name", ""), str):
        raise invalid_field("messages", message, "a name that is a string")
    return message | {"content": content}


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid_field("stop", value, f"a string, or a list of up to {MAX_STOPS} strings")
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_LENGTH for one in stops):
        raise invalid_field("stop", value, f"strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(check_unicode("stop", one) for one in stops)


def _tokens(body: dict[str, Any], name: str) -> tuple[int, ...]:
    value = body.pop(name, [])
    if not isinstance(value, list) or not all(_is_int(one) and one >= 0 for one in value):
        raise invalid_field(name, value, "a list of token ids")
    return tuple(value)


def check_unicode(param: str, text: str) -> str:
    """Returns the text, or raises an error if it has a lone surrogate, which is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid_field(param, text, f"valid Unicode ({error})") from error
    return text


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _value(body: dict[str, Any], name: str, domain: Domain, default: Any = None) -> Any:
    """Removes a field, and returns its value, or the default if there is no such field."""
    if name not in body:
        return default
    value = body.pop(name)
    if not domain.contains(value):
        raise invalid_field(name, value, domain.expected)
    return domain.kind(value)


def _boolean(body: dict[str, Any], name: str) -> bool:
    value = body.pop(name, False)
    if not isinstance(value, bool):
        raise invalid_field(name, value, "true or false")
    return value
