"""Checks fields of adapter_config.json: each error names the field and its value."""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

# These leave the base weights alone, so that an adapter's own tensors say all; "pissa", "olora",
# "corda", "loftq" and "lora_ga" store the adapter of a base that they changed.
_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal", "mica")


def is_rank(name: str, value: Any) -> None:
    expect(_is_integer(value) and value >= 1, name, value, "an integer of at least 1")


def is_alpha(name: str, value: Any) -> None:
    expect(is_finite(value), name, value, "a finite number")


def is_pattern(name: str, value: Any, check: Callable[[str, Any], None]) -> None:
    has_type(name, value, Mapping, "an object whose keys are regular expressions")
    for key, one in value.items():
        is_expression(name, rf"(.*\.)?({key})$", key)
        check(f"{name}[{key!r}]", one)


def expect(right: bool, name: str, value: Any, expected: str) -> None:
    if not right:
        raise ValueError(f"{name} is {short(value)}; expected {expected}")


def has_type(name: str, value: Any, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {short(value)}, a {type(value).__name__}; expected {expected}")


def are_targets(name: str, value: Any) -> None:
    """Raises an error unless a field is names, or one regular expression."""
    if isinstance(value, str) and value:
        is_expression(name, value, value)
    else:
        are_names(name, value)


def are_token_indices(name: str, value: Any) -> None:
    """Raises an error unless a field is indices of tokens, or such by the name of a module."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            are_token_indices(f"{name}[{key!r}]", one)
        return
    has_type(name, value, tuple, "a list of token indices, or an object of such lists")
    expect(bool(value) and are_indices(value), name, value, "one or more indices from 0 on")
    expect(len(set(value)) == len(value), name, value, "every index once")


def are_indices(values: Any) -> bool:
    return all(_is_integer(one) and one >= 0 for one in values)


def keeps_the_base(init_lora_weights: Any) -> None:
    if not any(
        type(init_lora_weights) is type(one) and init_lora_weights == one
        for one in _INITIALIZATIONS
    ):
        raise NotImplementedError(
            f"init_lora_weights is {short(init_lora_weights)}; expected one of "
            f"{', '.join(map(repr, _INITIALIZATIONS))}: others change the base weights, which an "
            "adapter folder does not hold. PEFT converts such an adapter to a plain one: "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def short(value: Any) -> str:
    """Returns `repr(value)`, cut to fit into a message."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def are_names(name: str, value: Any) -> None:
    has_type(name, value, tuple, "a list of names")
    all_named = all(isinstance(one, str) and one for one in value)
    expect(bool(value) and all_named, name, value, "a list of one or more names")


def is_expression(name: str, expression: str, given: str) -> None:
    try:
        with warnings.catch_warnings():
            # What Python may read otherwise one day would then select other layers.
            warnings.simplefilter("error", FutureWarning)
            re.compile(expression)
    except (re.error, RecursionError, OverflowError, FutureWarning) as error:
        told = f"{name} has {short(given)}; expected a regular expression ({error})"
        raise ValueError(told) from error


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    try:
        return (_is_integer(value) or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:
        return False


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, (0, 19, 1); () if it is none."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in found.groups()) if found else ()
