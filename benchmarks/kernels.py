"""The Mosaic kernels one by one, with configs to be tried: for `tune` and `tools/sanitize.py`.

The one place outside of `jax_dora.ops` that calls kernel modules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import kernel_definitions as definitions
from benchmarks.kernel_definitions import RATE
from jax_dora.ops import choose
from jax_dora.ops.dropout import draw_seed
from jax_dora.ops.mosaic import (
    bank_expand,
    bank_rows,
    compose,
    compose_backward,
    dropped_product,
    dropped_product_back,
    elementwise,
    expand_compose,
    low_rank_tiling,
    norm,
    product_tiling,
    project,
    project_back,
    quantised_norm,
    quantised_product,
    quantised_rows,
    swiglu_backward,
)
from jax_dora.ops.quantised import Format, bits

ONE = jnp.float32(1)
BF16 = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """A kernel, what it computes in plain jnp, and what there is to try.

    Attributes:
      module: one of `jax_dora.ops.mosaic`.
      define: the results that the launch does not return as None, computed by XLA.
      call: the sizes that `module.config` takes, before the dtypes.
      operands: their axes, by the names of sizes; "seed" is a dropout seed, "slot" a slot for each
        group, "ids" for each row, "ranks" the rank of each slot. bf16 if two axes or more, else
        fp32; those after "nf4" or "int8" are codes.
      shapes: at which it is measured, as sizes.
      candidates: configs to be tried.
      products: axes of its matrix products.
      extra: further operands of the launch.
      options: static arguments of the launch.
      kinds: the dtypes and formats in the call, after its sizes.
    """

    module: ModuleType
    define: Callable[..., Any]
    call: str
    operands: tuple[str, ...]
    shapes: Sequence[Mapping[str, int]]
    candidates: Sequence[Any]
    products: tuple[str, ...] = ()
    extra: tuple[jax.Array, ...] = (ONE,)
    options: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[Any, ...] = (BF16,)

    def launch(self, *operands: jax.Array, config: Any = None) -> Any:
        """Returns the kernel's results, with its own choice of a config if that is None."""
        sizes: dict[str, int] = {}
        for axes, operand in zip(self.operands, operands, strict=True):
            names = axes.removeprefix("nf4 ").removeprefix("int8 ").split()
            sizes |= dict(zip(names, operand.shape, strict=True))
        knobs = {"config": config or self.module.config(*self.arguments(sizes))}
        knobs["sm_count"] = choose.target().sm_count
        return self.module.launch(*operands, *self.extra, **self.options, **knobs)

    def arguments(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """Returns the call that `module.config`, `refuses` and `wins` take."""
        return (*(sizes[name] for name in self.call.split()), *self.kinds)

    def draw(self, sizes: Mapping[str, int], seed: int = 0) -> list[jax.Array]:
        """Returns random operands of these sizes."""
        keys = jax.random.split(jax.random.key(seed), len(self.operands))
        return [_draw(key, axes, sizes) for key, axes in zip(keys, self.operands, strict=True)]

    def bytes(self, operands: Sequence[jax.Array]) -> int:
        """Returns the bytes of each operand read once and each result written once."""
        tensors = [*operands, *jax.tree.leaves(jax.eval_shape(self.define, *operands))]
        return sum(math.prod(t.shape) * bits(t.dtype) for t in tensors) // 8

    def flops(self, sizes: Mapping[str, int]) -> int:
        """Returns the FLOPs of the matrix products."""
        return sum(2 * math.prod(sizes[n] for n in axes.split()) for axes in self.products)


def _draw(key: jax.Array, axes: str, sizes: Mapping[str, int]) -> jax.Array:
    if axes == "seed":
        return draw_seed(key)
    if axes.startswith("nf4 "):
        shape = tuple(sizes[name] for name in axes.split()[1:])
        return jax.random.randint(key, shape, 0, 16, jnp.uint8).astype(jnp.uint4)
    if axes.startswith("int8 "):
        shape = tuple(sizes[name] for name in axes.split()[1:])
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    if axes in ("slot", "ids"):
        count = sizes["groups" if axes == "slot" else "rows"]
        return jnp.arange(count, dtype=jnp.int32) % sizes["slots"]
    if axes == "ranks":
        return jnp.full(sizes["slots"], sizes["rank"], jnp.int32)
    shape = tuple(sizes[name] for name in axes.split())
    values = jax.random.normal(key, shape)
    if len(shape) == 1:
        return 1 + 0.1 * values
    # Whatever is contracted over, sums of products stay near 1.
    return (values * shape[0] ** -0.5 if axes.startswith(("in", "rank")) else values).astype(BF16)


def _grid(**sizes: Sequence[int]) -> list[dict[str, int]]:
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())]


def _named(names: str, *shapes: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), shape, strict=True)) for shape in shapes]


RANKS = (64, 256, 384, 768)
LOW_RANK = (
    *low_rank_tiling.CONFIGS,
    low_rank_tiling.Config(tile_cols=128, stages=6, slots=1),
    low_rank_tiling.Config(tile_cols=128, stages=3, slots=1, consumers=3),
    low_rank_tiling.Config(tile_cols=64, stages=6, slots=2, consumers=3),
)
# Other tiles, and other orders of them, which decide what the level-2 cache holds.
PRODUCTS = (
    product_tiling.Config(band=4),
    product_tiling.Config(band=16),
    product_tiling.Config(band_in_cols=True),
    product_tiling.Config(tile_cols=192),
    product_tiling.Config(tile_cols=128, stages=6),
)
DROPPED = tuple(dropped_product.Config(**c) for c in ({"stages": 3}, {"parts": 1}, {"parts": 4}))
ELEMENTWISE = (
    elementwise.Config(blocks_per_sm=1),
    elementwise.Config(stages=2, blocks_per_sm=3),
    elementwise.Config(tile_bytes=4096, blocks_per_sm=3),
    elementwise.Config(tile_bytes=2048, stages=4, blocks_per_sm=3),
)
ROWS_OUT = _named("rows out", (512, 4096), (4096, 4096), (4096, 12288))
PRODUCT_SHAPES = _named(
    "rows in out rank",
    (1024, 2048, 2048, 384),
    (4096, 4096, 1024, 384),
    (4096, 4096, 12288, 384),
    (4096, 8192, 8192, 384),
    (4096, 12288, 4096, 384),
)
DROPPED_SHAPES = _grid(rows=(4096,), **{"in": (4096, 8192)}, rank=(16, 64, 256, 384, 768))
NO_INNER = {"want_inner": False}
TILED = Format("nf4", (64, 1), BF16, False)
QUANTISED_SHAPES = [{"in": n, "tiles": n // 64, "out": n} for n in (2048, 8192)]
KERNELS = {
    "norm": Kernel(
        *(norm, definitions.norm, "in rank out"),
        ("in out", "in rank", "rank out"),
        [s | {"in": s["out"]} for s in _grid(out=(1024, 2048, 8192), rank=RANKS)],
        LOW_RANK,
        ("in out rank",),
        kinds=(BF16, BF16),
    ),
    "quantised_norm": Kernel(
        *(quantised_norm, definitions.quantised_norm, "in rank out"),
        ("nf4 in out", "tiles out", "in rank", "rank out"),
        [shape | {"rank": rank} for shape in QUANTISED_SHAPES for rank in RANKS],
        LOW_RANK,
        ("in out rank",),
        kinds=(TILED, BF16),
    ),
    "quantised_product": Kernel(
        *(quantised_product, definitions.quantised_product, "rows in out"),
        ("rows in", "nf4 in out", "tiles out"),
        [shape | {"rows": rows} for shape in QUANTISED_SHAPES for rows in (1, 32)],
        [low_rank_tiling.Config(slots=2), low_rank_tiling.Config(slots=3)],
        ("rows in out",),
        extra=(),
        kinds=(TILED, BF16),
    ),
    "quantised_rows": Kernel(
        *(quantised_rows, definitions.quantised_rows, "rows in out"),
        ("rows in", "int8 in out", "tiles out"),
        [shape | {"rows": rows} for shape in QUANTISED_SHAPES for rows in (1, 2)],
        [low_rank_tiling.Config(slots=slots) for slots in (4, 6)],
        ("rows in out",),
        extra=(),
        kinds=(TILED._replace(qtype="int8"), BF16),
    ),
    "compose": Kernel(
        *(compose, definitions.compose, "rows out"),
        ("rows out", "rows out", "out"),
        ROWS_OUT,
        ELEMENTWISE,
        options=NO_INNER | {"delta": False},
    ),
    "compose_backward": Kernel(
        *(compose_backward, definitions.compose_backward, "rows out"),
        ("rows out", "rows out", "out"),
        ROWS_OUT,
        ELEMENTWISE,
        options={"delta": False, "want_base": True, "want_lora": False},
    ),
    "expand_compose": Kernel(
        *(expand_compose, definitions.expand_compose, "rows rank out"),
        ("rows out", "rows rank", "rank out", "out"),
        _grid(rows=(1024, 4096), out=(2048, 8192), rank=RANKS),
        LOW_RANK,
        ("rows rank out",),
        options=NO_INNER,
    ),
    "project": Kernel(
        *(project, definitions.project, "rows in out"),
        ("rows in", "in out", "rows rank", "rank out", "out"),
        PRODUCT_SHAPES,
        PRODUCTS,
        ("rows in out", "rows rank out"),
        extra=(),
        options=NO_INNER,
    ),
    "project_back": Kernel(
        *(project_back, definitions.project_back, "rows in out"),
        ("rows out", "in out", "rows rank", "in rank"),
        PRODUCT_SHAPES,
        PRODUCTS,
        ("rows in out", "rows in rank"),
        extra=(),
    ),
    "dropped_product": Kernel(
        *(dropped_product, definitions.dropped_product, "rows in rank"),
        ("rows in", "in rank", "seed"),
        DROPPED_SHAPES,
        DROPPED,
        ("rows in rank",),
        extra=(),
        options={"rate": RATE, "transposed": False},
    ),
    "dropped_product_back": Kernel(
        *(dropped_product_back, definitions.dropped_product_back, "rows in rank"),
        ("rows in", "rows rank", "seed"),
        DROPPED_SHAPES,
        DROPPED,
        ("rows in rank",),
        extra=(),
        options={"rate": RATE, "transposed": True},
    ),
    "swiglu_backward": Kernel(
        *(swiglu_backward, definitions.swiglu_backward, "rows out"),
        ("rows out",) * 3 + ("out", "out"),
        ROWS_OUT,
        ELEMENTWISE,
        extra=(),
    ),
    "bank_expand": Kernel(
        *(bank_expand, definitions.bank_expand, "groups time rank out"),
        ("groups time out", "groups time rank", "slots rank out", "slot", "groups out", "groups"),
        _grid(groups=(8,), slots=(64,), time=(512,), rank=(8, 64), out=(1024, 4096, 14336)),
        LOW_RANK,
        ("groups time rank out",),
        extra=(),
    ),
    "bank_rows": Kernel(
        *(bank_rows, definitions.bank_rows, "rows in out slots rank"),
        (
            *("rows out", "rows in", "slots rank in", "slots rank out", "slots out", "slots"),
            *("ranks", "ids"),
        ),
        _grid(rows=(8, 64, 256), **{"in": (4096,)}, out=(4096, 14336), slots=(64,), rank=(64,)),
        [bank_rows.Config(1, stages, stages) for stages in (4, 8, 12)],
        ("rows in rank", "rows rank out"),
        extra=(jnp.int32(0),),
        kinds=(BF16, BF16),
    ),
}
