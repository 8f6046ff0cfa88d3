"""Parameters of the base model that PEFT folders have replaced (modules_to_save, biases, rows of
single tokens).

An adapted layer can give its base layer back, but the values that a folder has replaced are gone.
"""

import logging
import os
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from dora_common.rules import listing

_LOG = logging.getLogger(__name__)
_ATTRIBUTE = "_replaced_by_folders"


class Replacement(NamedTuple):
    """The folder whose values a parameter has, and its rows that are the folder's; None if all
    are."""

    folder: str
    rows: frozenset[int] | None


def replacements(model: nn.Module) -> Mapping[str, Replacement]:
    """Returns the replaced parameters of ``model`` by name."""
    return getattr(model, _ATTRIBUTE, {})


def replace(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    new: Mapping[str, Collection[int] | None],
) -> None:
    """Records that ``folder`` replaces parameters of ``model``, and warns about those that keep the
    values of an earlier folder.

    Args:
        parameters: the parameters of the model before, by all of their names.
        new: the rows that the folder replaces, or None for all, by the parameters' names.
    """
    rows = {id(parameters[name]): at for name, at in new.items()}

    def is_kept(name: str, old: Replacement) -> bool:
        at = rows.get(id(parameters.get(name)), ())
        return at is not None and (old.rows is None or not old.rows.issubset(at))

    kept = {name: old for name, old in replacements(model).items() if is_kept(name, old)}
    warn_of(kept, f"after {os.fspath(folder)}, ")
    replaced = {
        name: Replacement(os.fspath(folder), None if at is None else frozenset(at))
        for name, at in new.items()
    }
    if replaced or replacements(model):
        setattr(model, _ATTRIBUTE, replaced | kept)


def warn_of(kept: Mapping[str, Replacement], when: str) -> None:
    """Warns about parameters that are not the base model's; ``when`` begins the message."""
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
