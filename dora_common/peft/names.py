"""Names of layers and parameters, selected by the patterns of a configuration, and such patterns
made of names."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Names = tuple[str, ...]


def first_match(pattern: Mapping[str, Any], name: str) -> str | None:
    """Returns the key of a rank_pattern or alpha_pattern that gives the layer `name` its value, if
    any."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", name)), None)


def patterns_for(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the commonest of `values`, which are keyed by layer name, and a pattern for the
    others.

    A pattern's key is anchored, so that it matches its layer alone.
    """
    kinds = list(values.values())
    default = max(kinds, key=kinds.count)
    others = {name: value for name, value in values.items() if value != default}
    return default, {f"^{re.escape(name)}": value for name, value in others.items()}


def targets_for(adapted: Collection[str], all_modules: Iterable[str]) -> Names | str:
    """Returns target_modules that select `adapted` and nothing else of `all_modules`.

    The last parts of the names where they suffice, as people write them; else the whole names; else
    a regular expression.
    """
    others = set(all_modules) - set(adapted)
    last_parts = tuple(sorted({name.rpartition(".")[2] for name in adapted}))
    for targets in (last_parts, tuple(sorted(adapted))):
        if not any(matches(targets, name) for name in others):
            return targets
    return "|".join(re.escape(name) for name in sorted(adapted))


def parameters_for(adapted: Collection[str], all_parameters: Iterable[str]) -> Names:
    """Returns target_parameters that select `adapted` and nothing else of `all_parameters`: the
    last two parts of the names where they suffice, else the whole names."""
    others = set(all_parameters) - set(adapted)
    ends = tuple(sorted({".".join(name.split(".")[-2:]) for name in adapted}))
    return tuple(sorted(adapted)) if any(matches(ends, one) for one in others) else ends


def matches(targets: Names | str | None, name: str) -> bool:
    """Tells whether `targets` select the module `name`: a regular expression that fits the whole
    name, or names, one of which is its own or its ending."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets or ())
