"""The table of a model's weights: which are adapted, and which can be."""

import dataclasses
import logging
import math
from collections.abc import Iterable
from typing import Any

from flax import nnx

from jax_dora.adapt.reads import trace_reads
from jax_dora.adapt.site import Site
from jax_dora.adapt.sites import sites
from jax_dora.adapt.tree import check_model
from jax_dora.layers.quantised import act_qtype_of
from jax_dora.ops import quantised
from jax_dora.weights.reads import Example

_LOG = logging.getLogger("jax_dora")


@dataclasses.dataclass(frozen=True)
class CoveredWeight:
    """One weight of a model.

    Attributes:
      path: of the weight, as rules match it.
      shape: of its array.
      status: "adapted", "adaptable" or "not adaptable".
      how: what adapts it, with its axes as `jax_dora.register` has them; or why nothing can. Of a
        quantised weight its format too.
      is_linear: whether "all-linear" means it.
      merged_bytes: the size of the arrays that a call makes of W' for readers that are no products
        of it, in fp32.
    """

    path: str
    shape: tuple[int, ...]
    status: str
    how: str
    is_linear: bool
    merged_bytes: int = 0

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """A table of a model's weights of two axes or more. `str()` prints it.

    Attributes:
      weights: one row each.
    """

    weights: tuple[CoveredWeight, ...]

    def count(self, *statuses: str) -> int:
        """Returns how many weights have one of these statuses."""
        return sum(one.status in statuses for one in self.weights)

    def share(self, *statuses: str) -> float:
        """Returns the share of all elements that lies in weights of these statuses, 0 to 1."""
        total = sum(one.elements for one in self.weights)
        part = sum(one.elements for one in self.weights if one.status in statuses)
        return part / total if total else 0.0

    def summary(self) -> str:
        """Returns one line with counts and shares."""
        told = [
            f"{self.count(status)} {status} ({self.share(status):.1%} of the elements)"
            for status in ("adapted", "adaptable", "not adaptable")
        ]
        return f"{len(self.weights)} weights: {', '.join(told)}"

    def __str__(self) -> str:
        total = sum(one.elements for one in self.weights) or 1
        rows = [("path", "shape", "elements", "share", "status", "how")]
        for one in self.weights:
            shape = "×".join(map(str, one.shape))
            how = one.how
            if one.merged_bytes:
                how += f"; W' as an array, {_size(one.merged_bytes)}"
            share = f"{one.elements / total:.1%}"
            rows.append((one.path, shape, f"{one.elements:,}", share, one.status, how))
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = [
            "  ".join(
                cell.rjust(width) if column in (2, 3) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self.summary()])


def coverage(model: nnx.Module, *example: Any, **kwargs: Any) -> Coverage:
    """Returns every weight of two axes or more of `model`, and whether and how it can be adapted.

        print(jax_dora.coverage(model, tokens))

    Args:
      model: with adapters or without; its arrays may be abstract.
      *example, **kwargs: what to call the model with, once and abstractly, to see what reads each
        weight: arrays or `jax.ShapeDtypeStruct`s. Or one function that takes the model and calls
        it. Without any, only the modules' classes say.

    Raises:
      TypeError: `model` is no nnx module.
      Exception: whatever the call of the model raises.
    """
    check_model(model)
    given = Example.of_arguments(*example, **kwargs)
    return table(sites(model, trace_reads(model, given) if example or kwargs else None))


def logged(found: Iterable[Site]) -> None:
    _LOG.info(table(found).summary())


def _size(count: int) -> str:
    units = ("B", "KiB", "MiB", "GiB")
    power = min((count.bit_length() - 1) // 10, len(units) - 1)
    return f"{count / 1024**power:.4g} {units[power]}"


def table(found: Iterable[Site]) -> Coverage:
    return Coverage(tuple(_row(site) for site in found if site.param))


def _row(site: Site) -> CoveredWeight:
    status = "adapted" if site.is_adapted else "adaptable"
    if site.refusal and not site.is_adapted:
        status = "not adaptable"
    how = site.refusal if status == "not adaptable" else site.how
    value = site.parameter.get_value()
    if quantised.is_quantised(value):
        how += f"; {quantised.describe(value)}"
        if act_qtype := act_qtype_of(site.found.module):
            how += f", activations {act_qtype}"
    return CoveredWeight(
        site.names[0],
        site.shape,
        status,
        how,
        site.is_linear,
        4 * math.prod(site.shape) * site.merged,
    )
