"""`coverage`: a table of a model's weights, which tells what is adapted and what can be adapted."""

import dataclasses
import logging
import math
from collections.abc import Iterable
from typing import Any

from flax import nnx

from jax_dora.adapt.find_sites import find_sites
from jax_dora.adapt.site import Site
from jax_dora.adapt.trace_reads import trace_reads
from jax_dora.adapt.tree import check_model
from jax_dora.layers.quantised import act_qtype_of
from jax_dora.ops import quantised
from jax_dora.weights.read_log import Example

_LOG = logging.getLogger("jax_dora")


@dataclasses.dataclass(frozen=True)
class CoveredWeight:
    """One weight of a model.

    Attributes:
      path: the weight's path, as rules match it.
      shape: the weight's shape.
      status: "adapted", "adaptable" or "not adaptable".
      how: what adapts the weight, with its axes as in `jax_dora.register`; or why nothing can adapt
        it. For a quantised weight also the format.
      is_linear: whether "all-linear" selects the weight.
      merged_bytes: the size, in fp32, of the arrays W' that a call computes for operations that are
        neither products nor lookups.
    """

    path: str
    shape: tuple[int, ...]
    status: str
    how: str
    is_linear: bool
    merged_bytes: int = 0

    @property
    def elements(self) -> int:
        """The number of the weight's elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """A table of a model's weights of two axes or more. `str()` formats it.

    Attributes:
      weights: one row for each weight.
    """

    weights: tuple[CoveredWeight, ...]

    def count(self, *statuses: str) -> int:
        """Returns how many weights have one of these statuses."""
        return sum(weight.status in statuses for weight in self.weights)

    def share(self, *statuses: str) -> float:
        """Returns the share of all elements, 0 to 1, that belong to weights with one of these
        statuses."""
        total = sum(weight.elements for weight in self.weights)
        part = sum(weight.elements for weight in self.weights if weight.status in statuses)
        return part / total if total else 0.0

    def summary(self) -> str:
        """Returns counts and shares by status in one line."""
        parts = [
            f"{self.count(status)} {status} ({self.share(status):.1%} of the elements)"
            for status in ("adapted", "adaptable", "not adaptable")
        ]
        return f"{len(self.weights)} weights: {', '.join(parts)}"

    def __str__(self) -> str:
        total = sum(weight.elements for weight in self.weights) or 1
        rows = [("path", "shape", "elements", "share", "status", "how")]
        for weight in self.weights:
            shape = "×".join(map(str, weight.shape))
            how = weight.how
            if weight.merged_bytes:
                how += f"; W' as an array, {_size(weight.merged_bytes)}"
            share = f"{weight.elements / total:.1%}"
            rows.append((weight.path, shape, f"{weight.elements:,}", share, weight.status, how))
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
      model: a model with or without adapters; its arrays may be abstract.
      *example, **kwargs: the inputs to call the model with, once and abstractly, to find the
        operations that read each weight: arrays or `jax.ShapeDtypeStruct`s. Or one function that
        takes the model and calls it. Without inputs, only the classes of the modules decide.

    Raises:
      TypeError: `model` is not an nnx module.
      Exception: any error of the model's call.
    """
    check_model(model, for_linen="jax_dora.linen.coverage")
    inputs = Example.of_arguments(*example, **kwargs)
    return table(find_sites(model, trace_reads(model, inputs) if example or kwargs else None))


def log_summary(sites: Iterable[Site]) -> None:
    """Logs how many weights are adapted, and their share of all elements."""
    _LOG.info(table(sites).summary())


def _size(count: int) -> str:
    units = ("B", "KiB", "MiB", "GiB")
    power = min((count.bit_length() - 1) // 10, len(units) - 1)
    return f"{count / 1024**power:.4g} {units[power]}"


def table(sites: Iterable[Site]) -> Coverage:
    return Coverage(tuple(_row(site) for site in sites if site.param))


def _row(site: Site) -> CoveredWeight:
    refusal = "" if site.is_adapted else _refusal(site)
    status = "adapted" if site.is_adapted else "not adaptable" if refusal else "adaptable"
    how = refusal or site.how
    value = site.parameter.get_value() if site.is_parameter else None
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


def _refusal(site: Site) -> str:
    """Returns why `apply_dora` would refuse the weight, whatever the rule, or ""."""
    try:
        return site.refusal or site.check() or ""
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
