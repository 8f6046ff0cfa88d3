"""What was measured per kind of device: where a kernel wins, and with which configuration.

One JSON file per device kind in `tuning_data/`, named by `file_name` ("NVIDIA H200" is
`nvidia_h200.json`). A kind without a file takes the H200's: the crossovers of the other Hopper
cards lie near its own. Nothing is tuned on first call; `python -m benchmarks tune` writes a table:

    {"source": [{"file": …, "commit": …, "card": …, "versions": {…}}, …],
     "crossovers": {kernel: {"min": {size: bound}, "max": {size: bound}} or null, …},
     "configs": {kernel: [{"min": {…}, "max": {…}, "config": {knob: value}}, …], …}}

`crossovers` says at which sizes a kernel was seen to be no slower than XLA, null where it never
was. `configs` is tried from the front; a call that no entry is for takes the kernel's heuristic.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from jax_dora.ops.mosaic.dropped import DroppedConfig
from jax_dora.ops.mosaic.projection import ProjectionConfig
from jax_dora.ops.mosaic.rowwise import RowwiseConfig
from jax_dora.ops.mosaic.strips import StripConfig

FALLBACK = "NVIDIA H200"

type Config = StripConfig | RowwiseConfig | ProjectionConfig | DroppedConfig

_ELEMENTWISE = ("rows", "out", "elements", "lane", "itemsize")
_LINEAR = ("rows", "in", "rank", "out", "elements")
# Without the rank, which only makes the axis that is summed over longer, in XLA's product too.
_PROJECTION = ("rows", "in", "out", "elements")
_DROPPED = ("rows", "in", "rank")


class Kernel(NamedTuple):
    """What a table may say of a kernel: bounds on these sizes, and knobs of this class."""

    sizes: tuple[str, ...]
    config: type[Config]


KERNELS = {
    "compose": Kernel(_ELEMENTWISE, RowwiseConfig),
    "compose_backward": Kernel(_ELEMENTWISE, RowwiseConfig),
    "dropped_product": Kernel(_DROPPED, DroppedConfig),
    "dropped_product_back": Kernel(_DROPPED, DroppedConfig),
    "expand_compose": Kernel(_LINEAR, StripConfig),
    "norm": Kernel(("in", "rank", "out"), StripConfig),
    "project": Kernel(_PROJECTION, ProjectionConfig),
    "project_back": Kernel(_PROJECTION, ProjectionConfig),
    "swiglu_backward": Kernel(_ELEMENTWISE, RowwiseConfig),
}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Smallest and largest sizes, both included; a size that neither names is free."""

    min: Mapping[str, int] = dataclasses.field(default_factory=dict)
    max: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def below(self, sizes: Mapping[str, int]) -> str | None:
        """The first size that lies below its bound, or None."""
        return next((name for name, bound in self.min.items() if sizes[name] < bound), None)

    def above(self, sizes: Mapping[str, int]) -> str | None:
        """The first size that lies above its bound, or None."""
        return next((name for name, bound in self.max.items() if sizes[name] > bound), None)

    def hold(self, sizes: Mapping[str, int]) -> bool:
        return not (self.below(sizes) or self.above(sizes))


@dataclasses.dataclass(frozen=True)
class Table:
    """A device kind's table, checked."""

    crossovers: Mapping[str, Bounds | None]
    configs: Mapping[str, tuple[tuple[Bounds, Config], ...]]


def slower(device_kind: str, kernel: str, sizes: Mapping[str, int]) -> str | None:
    """Why XLA is the better choice than `kernel` for a call of `sizes`, or None."""
    wins = load(device_kind).crossovers[kernel]
    if wins is None:
        return f"XLA was as fast as {kernel} at every size"
    if name := wins.below(sizes):
        return f"{name} = {sizes[name]} is below {wins.min[name]}, where {kernel} begins to win"
    if name := wins.above(sizes):
        return f"{name} = {sizes[name]} is above {wins.max[name]}, where {kernel} ceases to win"
    return None


def config(
    device_kind: str, kernel: str, sizes: Mapping[str, int], fits: Callable[[Any], bool]
) -> Any | None:
    """The measured config for `kernel` and a call of `sizes`, or None for the kernel's heuristic.

    The first entry whose bounds hold decides; it is passed over where `fits`, the kernel's own
    account of its shared memory, has no room for it.
    """
    for bounds, measured in load(device_kind).configs.get(kernel, ()):
        if bounds.hold(sizes):
            return measured if fits(measured) else None
    return None


@functools.cache
def load(device_kind: str) -> Table:
    """The table of `device_kind`, or the fallback's."""
    folder = resources.files("jax_dora.ops") / "tuning_data"
    for kind in (device_kind, FALLBACK):
        file = folder / file_name(kind)
        if file.is_file():
            return read(file)
    raise FileNotFoundError(f"the tuning table of {FALLBACK} is missing from the installation")


def file_name(device_kind: str) -> str:
    return f"{device_kind.lower().replace(' ', '_')}.json"


def read(file: Path | Traversable) -> Table:
    """The table in `file`.

    Raises:
      ValueError: it is malformed; says the file, the kernel and the field.
    """
    data = json.loads(file.read_text())
    at = file.name
    _expect(isinstance(data, dict), at, "expected an object")
    crossovers = _section(data, "crossovers", at)
    for kernel in KERNELS:
        _expect(kernel in crossovers, f"{at}: crossovers: {kernel}", "missing")
    configs = _section(data, "configs", at)
    return Table(
        {
            kernel: None if entry is None else _bounds(kernel, entry, f"{at}: crossovers: {kernel}")
            for kernel, entry in crossovers.items()
        },
        {
            kernel: tuple(
                _config_entry(kernel, entry, f"{at}: configs: {kernel}[{i}]")
                for i, entry in enumerate(_list(entries, f"{at}: configs: {kernel}"))
            )
            for kernel, entries in configs.items()
        },
    )


def _section(data: Mapping[str, Any], name: str, at: str) -> Mapping[str, Any]:
    section = data.get(name, {})
    _expect(isinstance(section, dict), f"{at}: {name}", "expected an object with an entry a kernel")
    for kernel in section:
        _expect(kernel in KERNELS, f"{at}: {name}: {kernel}", f"no kernel; {_one_of(KERNELS)}")
    return section


def _list(entries: Any, at: str) -> list[Any]:
    _expect(isinstance(entries, list), at, "expected a list of entries")
    return entries


def _config_entry(kernel: str, entry: Any, at: str) -> tuple[Bounds, Config]:
    _expect(isinstance(entry, dict), at, "expected an object")
    knobs = entry.get("config")
    _expect(isinstance(knobs, dict), f"{at}: config", "expected an object of knobs")
    made = KERNELS[kernel].config
    known = {field.name: field for field in dataclasses.fields(made)}
    for name, value in knobs.items():
        where = f"{at}: config: {name}"
        _expect(name in known, where, f"no knob of {made.__name__}; {_one_of(known)}")
        if isinstance(known[name].default, bool):
            _expect(isinstance(value, bool), where, f"is {value!r}, expected true or false")
        else:
            _expect_positive(value, where)
    bounds = {name: value for name, value in entry.items() if name != "config"}
    return _bounds(kernel, bounds, at), made(**knobs)


def _bounds(kernel: str, entry: Any, at: str) -> Bounds:
    _expect(isinstance(entry, dict), at, "expected an object or null")
    sizes = KERNELS[kernel].sizes
    for side, named in entry.items():
        _expect(side in ("min", "max"), f"{at}: {side}", "expected min or max")
        _expect(isinstance(named, dict), f"{at}: {side}", "expected an object of sizes")
        for name, bound in named.items():
            where = f"{at}: {side}: {name}"
            _expect(name in sizes, where, f"no size of {kernel}; {_one_of(sizes)}")
            _expect_positive(bound, where)
    return Bounds(**entry)


def _expect_positive(value: Any, at: str) -> None:
    positive = isinstance(value, int) and not isinstance(value, bool) and value > 0
    _expect(positive, at, f"is {value!r}, expected a positive integer")


def _expect(condition: bool, at: str, wrong: str) -> None:
    if not condition:
        raise ValueError(f"tuning table {at}: {wrong}")


def _one_of(names: Any) -> str:
    return f"expected one of {', '.join(names)}"
