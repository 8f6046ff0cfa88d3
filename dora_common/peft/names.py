"""Selects names of layers and parameters by a configuration's patterns, and creates patterns."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Names = tuple[str, ...]


def first_match(pattern: Mapping[str, Any], name: str) -> str | None:
    """Returns the key of a rank_pattern or alpha_pattern that applies to the layer `name`, or
    None."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", name)), None)


def patterns_for(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the most common of ranks or alphas by layer name, and a dict from regular
    expressions, each of which matches a single layer, to the other values."""
    kinds = list(values.values())
    default = max(kinds, key=kinds.count)
    others = {name: value for name, value in values.items() if value != default}
    return default, {f"^{re.escape(name)}": value for name, value in others.items()}


def targets_for(adapted: Collection[str], all_modules: Iterable[str]) -> Names | str:
    """Returns target_modules that select only `adapted` from `all_modules`, and no module that
    contains others either: the last parts of the names, as people usually write them, the whole
    names, or a regular expression."""
    parts = [name.split(".") for name in all_modules]
    modules = {".".join(one[:length]) for one in parts for length in range(1, len(one) + 1)}
    others = modules - set(adapted)
    last_parts = tuple(sorted({name.rpartition(".")[2] for name in adapted}))
    for targets in (last_parts, tuple(sorted(adapted))):
        if not any(matches(targets, name) for name in others):
            return targets
    return "|".join(re.escape(name) for name in sorted(adapted))


def parameters_for(adapted: Collection[str], all_parameters: Iterable[str]) -> Names:
    """Returns target_parameters that select only `adapted` from `all_parameters`: the last two
    parts of the names if they select nothing else, or the whole names."""
    others = set(all_parameters) - set(adapted)
    ends = tuple(sorted({".".join(name.split(".")[-2:]) for name in adapted}))
    return tuple(sorted(adapted)) if any(matches(ends, one) for one in others) else ends


def matches(targets: Names | str | None, name: str) -> bool:
    """Returns whether `targets`, a regular expression for the whole name, or names and ends of
    names, or None, select the module `name`."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets or ())
