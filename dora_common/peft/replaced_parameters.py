"""Parameters of the base model that PEFT folders have replaced (modules_to_save, biases, rows of
single tokens).

An adapted layer can give its base layer back, but the values that a folder has replaced are gone.
The record of them is an attribute of the model, and its copies have it too.
"""

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dora_common.rules import listing

_LOG = logging.getLogger(__name__)
_ATTRIBUTE = "_replaced_by_folders"


@dataclass(frozen=True)
class Replacement:
    """The folder whose values a parameter has, and its rows that are the folder's; None if all
    are."""

    folder: str
    rows: frozenset[int] | None


def replaced_parameters(model: Any) -> Mapping[str, Replacement]:
    """Returns the replaced parameters of `model` by name."""
    return dict(sorted(getattr(model, _ATTRIBUTE, ())))


def replace(
    model: Any, folder: str | os.PathLike[str], new: Mapping[str, Collection[int] | None]
) -> None:
    """Records that `folder` replaces parameters of `model`, by name the rows or None for all, and
    warns of those that keep the values of an earlier folder."""

    def is_kept(name: str, old: Replacement) -> bool:
        at = new.get(name, ())
        return at is not None and (old.rows is None or not old.rows.issubset(at))

    kept = {name: old for name, old in replaced_parameters(model).items() if is_kept(name, old)}
    warn_of(kept, f"after {os.fspath(folder)}, ")
    replaced = {
        name: Replacement(os.fspath(folder), None if at is None else frozenset(at))
        for name, at in new.items()
    }
    if replaced or replaced_parameters(model):
        # Hashable, since Flax compares a module's attributes to find its compiled function.
        setattr(model, _ATTRIBUTE, frozenset((replaced | kept).items()))


def warn_of(kept: Mapping[str, Replacement], when: str) -> None:
    """Warns about parameters that are not the base model's; `when` begins the message."""
    if kept:
        _LOG.warning(
            "%sthese parameters still have the values of an earlier folder, not those of the base "
            "model, which the model no longer has; if these are needed, load the base model "
            "again:%s",
            when,
            described(kept),
        )


def described(replaced: Mapping[str, Replacement]) -> str:
    """Returns the names of replaced parameters with their folders, as a list for messages."""
    return listing(f"{name}, from {of.folder}" for name, of in replaced.items())
