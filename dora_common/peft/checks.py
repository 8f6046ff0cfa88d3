"""Checks of the fields of adapter_config.json. Each error names the field and its value."""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

# Initializations that do not change the base weights, so that the adapter's tensors are complete.
# "pissa", "olora", "corda", "loftq" and "lora_ga" store an adapter for a changed base model.
_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal", "mica")


def check_rank(name: str, value: Any) -> None:
    check(_is_integer(value) and value >= 1, name, value, "an integer of at least 1")


def check_alpha(name: str, value: Any) -> None:
    check(is_finite(value), name, value, "a finite number")


def check_pattern(name: str, value: Any, check_value: Callable[[str, Any], None]) -> None:
    check_type(name, value, Mapping, "an object whose keys are regular expressions")
    for key, one in value.items():
        check_regex(name, rf"(.*\.)?({key})$", key)
        check_value(f"{name}[{key!r}]", one)


def check(is_valid: bool, name: str, value: Any, expected: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} is {short(value)}; expected {expected}")


def check_type(name: str, value: Any, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {short(value)}, a {type(value).__name__}; expected {expected}")


def check_targets(name: str, value: Any) -> None:
    """Raises an error unless a field is a tuple of names, or one regular expression."""
    if isinstance(value, str) and value:
        check_regex(name, value, value)
    else:
        check_names(name, value)


def check_token_indices(name: str, value: Any) -> None:
    """Raises an error unless a field is token indices, or a mapping from module names to them."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            check_token_indices(f"{name}[{key!r}]", one)
        return
    check_type(name, value, tuple, "a list of token indices, or an object of such lists")
    check(bool(value) and are_indices(value), name, value, "one or more indices from 0 on")
    check(len(set(value)) == len(value), name, value, "every index once")


def are_indices(values: Any) -> bool:
    return all(_is_integer(one) and one >= 0 for one in values)


def check_initialization(init_lora_weights: Any) -> None:
    if not any(
        type(init_lora_weights) is type(one) and init_lora_weights == one
        for one in _INITIALIZATIONS
    ):
        raise NotImplementedError(
            f"init_lora_weights is {short(init_lora_weights)}; expected one of "
            f"{', '.join(map(repr, _INITIALIZATIONS))}: the others change the base weights, which "
            "an adapter folder does not contain. PEFT converts such an adapter to a plain one: "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def short(value: Any) -> str:
    """Returns `repr(value)`, shortened to at most 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def check_names(name: str, value: Any) -> None:
    check_type(name, value, tuple, "a list of names")
    all_named = all(isinstance(one, str) and one for one in value)
    check(bool(value) and all_named, name, value, "a list of one or more names")


def check_regex(name: str, expression: str, given: str) -> None:
    try:
        with warnings.catch_warnings():
            # Python warns about syntax that will change: it could select other layers one day.
            warnings.simplefilter("error", FutureWarning)
            re.compile(expression)
    except (re.error, RecursionError, OverflowError, FutureWarning) as error:
        message = f"{name} has {short(given)}; expected a regular expression ({error})"
        raise ValueError(message) from error


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    try:
        return (_is_integer(value) or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:
        return False


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version such as (0, 19, 1), or () for any other string."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in found.groups()) if found else ()
