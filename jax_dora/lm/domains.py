"""The valid values of settings, for dataclasses that check and commands that parse them."""

import dataclasses
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from dora_common.hyperparameters import LARGEST, LEAST, is_integer

MAX_INTEGER = 2**31 - 1  # the largest index of an array


class Domain(NamedTuple):
    """The valid values of a setting.

    Attributes:
      kind: the type of the values, which also parses them.
      expected: the values in words, for error messages.
      contains: returns whether a value is valid.
      choices: the values, if they are few.
    """

    kind: type[int] | type[float] | type[str]
    expected: str
    contains: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


def integers(least: int, most: int = MAX_INTEGER) -> Domain:
    """Returns the integers from `least` to `most`."""
    expected = f"an integer from {least:,} to {most:,}"
    return Domain(int, expected, lambda value: is_integer(value) and least <= value <= most)


def one_of(*choices: str) -> Domain:
    """Returns the domain of a few words."""
    return Domain(str, " or ".join(map(repr, choices)), lambda value: value in choices, choices)


def numbers(expected: str, is_valid: Callable[[float], bool]) -> Domain:
    """Returns the numbers for which `is_valid` is true and that float32 holds."""

    def contains(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        size: Any = abs(value)
        return (size == 0 or LEAST <= size <= LARGEST) and is_valid(float(value))

    words = f"a number {expected} that is 0 or has a magnitude from {LEAST:.1e} to {LARGEST:.1e}"
    return Domain(float, f"{words}, the range of float32", contains)


POSITIVE = numbers("above 0", lambda value: value > 0)
NOT_NEGATIVE = numbers("of at least 0", lambda value: value >= 0)
RATE = numbers("from 0 to below 1", lambda value: 0 <= value < 1)
SHARE = numbers("above 0 and at most 1", lambda value: 0 < value <= 1)
PROBABILITY = numbers("from 0 to 1", lambda value: 0 <= value <= 1)


def check(settings: Any, domains: Mapping[str, Domain]) -> None:
    """Checks the fields of a dataclass. A field whose default is None may be None.

    Raises:
      ValueError: a field is not in its domain. The message begins with "name=value: ".
    """
    optional = {field.name for field in dataclasses.fields(settings) if field.default is None}
    for name, domain in domains.items():
        value = getattr(settings, name)
        if not (value is None and name in optional) and not domain.contains(value):
            raise ValueError(f"{name}={value!r}: expected {domain.expected}")
