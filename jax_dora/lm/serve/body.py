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

# OpenAI's clients send up to 4 stop strings, and evaluations more.
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_TOKENS = 16, 256, 256
COUNT, LOGPROBS = integers(1), integers(0, TOP_LOGPROBS)
CHOICES = integers(1, 128)  # OpenAI's limit
# The numbers that become settings of `Sampling`, with the ranges of OpenAI's interface.
SAMPLING = {
    **Sampling.DOMAINS,
    "temperature": numbers("from 0 to 2", lambda value: 0 <= value <= 2),
    "seed": integers(-(2**63), 2**63 - 1),
}
DEFAULTS = {"temperature": 1.0, "seed": None}
# Fields of unsupported features, with the values that have no effect.
type Values = dict[str, tuple[Any, ...]]
NO_EFFECT: Values = {"service_tier": ("auto", "default")}
NO_EFFECT_COMPLETION: Values = {"best_of": (1,), "suffix": ("",)}
NO_EFFECT_CHAT: Values = {
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "store": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
# The same, for the features that vLLM has.
OF_VLLM: Values = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
}
MODEL = "the name of a model, as /v1/models lists them"
VLLM = "jax-dora serve has no tools and no JSON schemas; vLLM with the plugin of this package does"
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
    n: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool = False
    template_variables: dict[str, Any] = dataclasses.field(default_factory=dict)


type Prompt = str | list[int] | list[dict[str, Any]]
"""A text or its tokens, or the messages of a chat."""


def completion(body: Any) -> tuple[Fields, list[Prompt]]:
    """Parses the body of a completion; returns its fields and its prompts."""
    body = without_nulls(body)
    prompt = body.pop("prompt", None)
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_int, prompt)))
    prompts: list[Any] = [prompt] if is_one or not isinstance(prompt, list) else prompt
    for one in prompts:
        if not one or not (isinstance(one, str) or (_is_list(one) and all(map(_is_int, one)))):
            expected = "a text, a list of tokens, or a list of texts or of lists of tokens"
            raise invalid_field("prompt", prompt, f"{expected}, none of them empty")
    logprobs = _value(body, "logprobs", LOGPROBS)
    # 16 is OpenAI's default. It is surprisingly low, but a different default would surprise too.
    max_tokens = _value(body, "max_tokens", integers(0), 16)
    echo = _boolean(body, "echo")
    fields = _fields(body, max_tokens, logprobs, NO_EFFECT_COMPLETION)
    return dataclasses.replace(fields, echo=echo), prompts


def chat(body: Any) -> tuple[Fields, list[Prompt]]:
    """Parses the body of a chat; returns its fields, and a list of its messages."""
    body = without_nulls(body)
    messages, variables = messages_of(body), template_variables(body)
    has_logprobs = _boolean(body, "logprobs")
    logprobs = _value(body, "top_logprobs", LOGPROBS)
    if logprobs is not None and not has_logprobs:
        raise invalid_field("logprobs", has_logprobs, "true, since top_logprobs is given")
    limits = [_value(body, name, COUNT) for name in ("max_completion_tokens", "max_tokens")]
    max_tokens = min(filter(None, limits), default=None)
    fields = _fields(body, max_tokens, (logprobs or 0) if has_logprobs else None, NO_EFFECT_CHAT)
    return dataclasses.replace(fields, template_variables=variables), [messages]


def tokenization(body: Any) -> tuple[str | None, Prompt, dict[str, Any]]:
    """Parses a request for the tokens of a text or of a chat.

    Returns the model's name, the text or the messages, and options of `Service.tokens`.
    """
    body = without_nulls(body)
    model, options = _model(body), {}
    if "messages" in body:
        prompt: Prompt = messages_of(body)
        options["variables"] = template_variables(body)
    else:
        prompt = body.pop("prompt", None)
        if not isinstance(prompt, str):
            raise invalid_field("prompt", prompt, "a text, or messages")
        options["adds_special_tokens"] = _boolean(body, "add_special_tokens", True)
    reject_unsupported(body, {"add_generation_prompt": (True,), "return_token_strs": (False,)})
    return model, prompt, options


def detokenization(body: Any) -> tuple[str | None, list[int]]:
    """Parses a request for the text of tokens; returns the model's name, and the tokens."""
    body = without_nulls(body)
    model, tokens = _model(body), body.pop("tokens", None)
    if not _is_list(tokens) or not all(map(_is_int, tokens)):
        raise invalid_field("tokens", tokens, "a list of token ids")
    reject_unsupported(body, {})
    return model, tokens


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Removes the messages from a body, and returns them."""
    messages = body.pop("messages", None)
    if not _is_list(messages) or not messages:
        raise invalid_field("messages", messages, "a list of one or more messages")
    return [_message(one) for one in messages]


def template_variables(body: dict[str, Any]) -> dict[str, Any]:
    """Removes the variables for the chat template from a body, and returns them."""
    variables = body.pop("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise invalid_field("chat_template_kwargs", variables, "an object")
    return variables


def _fields(
    body: dict[str, Any], max_tokens: int | None, logprobs: int | None, no_effect: Values
) -> Fields:
    """Parses the common fields of a body from which all other used fields have been removed."""
    model = _model(body)
    if model is None:
        raise invalid_field("model", model, MODEL)
    stream, options = _boolean(body, "stream"), body.pop("stream_options", {})
    names = "include_usage", "continuous_usage_stats", "include_obfuscation"
    if not isinstance(options, dict) or options.keys() - set(names):
        raise invalid_field("stream_options", options, f"an object with {' or '.join(names[:2])}")
    options = without_nulls(options)
    if options and not stream:
        raise invalid_field("stream_options", options, "no such field unless stream is true")
    # The last, which adds random characters to events, has no effect.
    include_usage, continuous_usage, _ = [_boolean(options, name) for name in names]
    numbers = {
        name: _value(body, name, domain, DEFAULTS.get(name, getattr(GREEDY, name)))
        for name, domain in SAMPLING.items()
    }
    seed = numbers["seed"]
    numbers["seed"] = secrets.randbits(64) if seed is None else seed % 2**64
    fields = Fields(
        model=model,
        max_tokens=max_tokens,
        sampling=Sampling(**numbers, logit_bias=_biases(body.pop("logit_bias", {}))),
        n=_value(body, "n", CHOICES, 1),
        stop=_stops(body.pop("stop", None)),
        stop_token_ids=_tokens(body, "stop_token_ids"),
        ignore_eos=_boolean(body, "ignore_eos"),
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
    )
    if max_tokens is not None and fields.sampling.min_tokens > max_tokens:
        expected = f"at most max_tokens, which is {max_tokens}"
        raise invalid_field("min_tokens", fields.sampling.min_tokens, expected)
    reject_unsupported(body, NO_EFFECT | no_effect | OF_VLLM)
    return fields


def _model(body: dict[str, Any]) -> str | None:
    model = body.pop("model", None)
    if not isinstance(model, str | None):
        raise invalid_field("model", model, MODEL)
    return model


def without_nulls(body: Any) -> dict[str, Any]:
    """Returns the fields of a JSON object that are not null."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; expected a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def reject_unsupported(body: dict[str, Any], no_effect: Values) -> None:
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
            expected = " or ".join([*map(repr, no_effect[name][:1]), "no such field"])
            reason = VLLM if name in OF_VLLM else "since it is not supported"
            raise invalid_field(name, value, f"{expected}: {reason}")


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
        expected = "only role, content and name in each"
        raise invalid_field("messages", sorted(others), f"{expected}: {VLLM}")
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
    is_valid = _is_list(value) and all(_is_int(one) and one >= 0 for one in value)
    if not is_valid or len(value) > MAX_STOP_TOKENS:
        raise invalid_field(name, value, f"a list of up to {MAX_STOP_TOKENS} token ids")
    return tuple(value)


def _biases(value: Any) -> dict[int, float]:
    """Returns the biases by the ids of tokens, which are strings in JSON."""
    if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
        raise invalid_field("logit_bias", value, "an object with the ids of tokens as its names")
    biases = {int(key): bias for key, bias in value.items()}
    try:
        return dict(Sampling(logit_bias=biases).logit_bias)
    except ValueError as error:
        raise ApiError(400, str(error), param="logit_bias") from error


def check_unicode(param: str, text: str) -> str:
    """Returns the text, or raises an error if it has a lone surrogate, which is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid_field(param, text, f"valid Unicode ({error})") from error
    return text


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


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


def _boolean(body: dict[str, Any], name: str, default: bool = False) -> bool:
    value = body.pop(name, default)
    if not isinstance(value, bool):
        raise invalid_field(name, value, "true or false")
    return value
