"""The Mosaic kernels one by one, with configs to be tried: for `tune` and `tools/sanitize.py`.

The one place outside of `jax_dora.ops` that calls kernel modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops import device
from jax_dora.ops.dropout import draw_seed, drop, kept_share
from jax_dora.ops.mosaic import (
    compose,
    compose_backward,
    dropped,
    expand_compose,
    norm,
    projection,
    rowwise,
    strips,
    swiglu_backward,
)

RATE = 0.1
ONE = jnp.float32(1)
F32: dict[str, Any] = {"preferred_element_type": jnp.float32}


@dataclass(frozen=True)
class Kernel:
    """A kernel, what it computes in plain jnp, and what there is to try.

    Attributes:
      launch: of the operands, and `config=`, which is the kernel's own choice if None.
      define: the same of XLA.
      operands: their axes, by the names of sizes; "seed" is a dropout seed. bf16 if two axes, else
        fp32.
      results: their axes.
      shapes: at which it is measured, as sizes.
      candidates: configs to be tried.
    """

    launch: Callable[..., Any]
    define: Callable[..., Any]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    shapes: Sequence[Mapping[str, int]]
    candidates: Sequence[Any]
    products: tuple[str, ...] = ()

    def draw(self, sizes: Mapping[str, int], seed: int = 0) -> list[jax.Array]:
        """Returns random operands of these sizes."""
        keys = jax.random.split(jax.random.key(seed), len(self.operands))
        return [_draw(key, axes, sizes) for key, axes in zip(keys, self.operands, strict=True)]

    def bytes(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes of each operand read once and each result written once."""
        tensors = [_shape(axes, sizes) for axes in (*self.operands, *self.results)]
        return sum(_count(shape) * (2 if len(shape) == 2 else 4) for shape in tensors)

    def flops(self, sizes: Mapping[str, int]) -> int:
        """Returns the FLOPs of the matrix products."""
        return sum(2 * _count(_shape(axes, sizes)) for axes in self.products)


def _shape(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[name] for name in axes.split()) if axes != "seed" else (2,)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _draw(key: jax.Array, axes: str, sizes: Mapping[str, int]) -> jax.Array:
    if axes == "seed":
        return draw_seed(key)
    shape = _shape(axes, sizes)
    values = jax.random.normal(key, shape)
    if len(shape) == 1:
        return 1 + 0.1 * values
    # Whatever is contracted over, sums of products stay near 1.
    return (values * shape[0] ** -0.5 if axes.startswith(("in", "rank")) else values).astype(
        jnp.bfloat16
    )


def _grid(**sizes: Sequence[int]) -> list[dict[str, int]]:
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())]


def _named(names: str, *shapes: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), shape, strict=True)) for shape in shapes]


def _norm(kernel, a, b, config=None):
    return norm.norm(kernel, a, b, ONE, sm_count=device.sm_count(), config=config)


def _norm_defined(kernel, a, b):
    return jnp.linalg.norm(kernel.astype(jnp.float32) + jnp.matmul(a, b, **F32), axis=0)


def _compose(base, lora, g, config=None):
    options = {"delta": False, "want_inner": False, "sm_count": device.sm_count()}
    return compose.compose(base, lora, g, ONE, config=config, **options)[0]


def _composed(base, lora, g):
    return (g * (base.astype(jnp.float32) + lora)).astype(base.dtype)


def _compose_backward(dy, inner, g, config=None):
    options: dict[str, Any] = {"delta": False, "want_base": True, "want_lora": False}
    options |= {"sm_count": device.sm_count(), "config": config}
    d_base, _, d_g = compose_backward.compose_backward(dy, inner, g, ONE, **options)
    return d_base, d_g


def _compose_backward_defined(dy, inner, g):
    wide = dy.astype(jnp.float32)
    return (g * wide).astype(dy.dtype), jnp.sum(wide * inner, axis=0)


def _expand_compose(base, z, b, g, config=None):
    options = {"want_inner": False, "sm_count": device.sm_count(), "config": config}
    return expand_compose.expand_compose(base, z, b, g, ONE, **options)[0]


def _project(x, kernel, z, b, g, config=None):
    options = {"want_inner": False, "sm_count": device.sm_count(), "config": config}
    return projection.project(x, kernel, z, b, g, **options)[0]


def _project_back(d, kernel, dz, a, config=None):
    return projection.project_back(d, kernel, dz, a, sm_count=device.sm_count(), config=config)


def _dropped(transposed: bool) -> Callable[..., Any]:
    def launch(x, right, seed, config=None):
        options = {"transposed": transposed, "sm_count": device.sm_count(), "config": config}
        return dropped.dropped_product(x, right, seed, rate=RATE, **options) / kept_share(RATE)

    return launch


def _dropped_defined(transposed: bool) -> Callable[..., Any]:
    def define(x, right, seed):
        seen = drop(x, seed, RATE)
        return jnp.matmul(seen.T if transposed else seen, right, **F32)

    return define


def _swiglu_backward(dh, gate, up, gate_g, up_g, config=None):
    options = {"sm_count": device.sm_count(), "config": config}
    return swiglu_backward.swiglu_backward(dh, gate, up, gate_g, up_g, **options)[:4]


def _swiglu_backward_defined(dh, gate, up, gate_g, up_g):
    wide, inner_1, inner_2 = (t.astype(jnp.float32) for t in (dh, gate, up))
    y_1, y_2 = gate_g * inner_1, up_g * inner_2
    gated = lax.logistic(y_1)
    d_1 = wide * y_2 * gated * (1 + y_1 * (1 - gated))
    d_2 = wide * y_1 * gated
    sums = [jnp.sum(d * inner, axis=0) for d, inner in ((d_1, inner_1), (d_2, inner_2))]
    return ((gate_g * d_1).astype(dh.dtype), (up_g * d_2).astype(dh.dtype), *sums)


RANKS = (64, 256, 384, 768)
STRIPS = (
    *norm.CONFIGS,
    strips.StripConfig(tile_cols=128, stages=6, slots=1),
    strips.StripConfig(tile_cols=128, stages=3, slots=1, consumers=3),
    strips.StripConfig(tile_cols=64, stages=6, slots=2, consumers=3),
)
# Other tiles, and other orders of them, which decide what the level-2 cache holds.
PROJECTIONS = (
    projection.ProjectionConfig(band=4),
    projection.ProjectionConfig(band=16),
    projection.ProjectionConfig(band_in_cols=True),
    projection.ProjectionConfig(tile_cols=192),
    projection.ProjectionConfig(tile_cols=128, stages=6),
)
DROPPED = tuple(dropped.DroppedConfig(**c) for c in ({"stages": 3}, {"parts": 1}, {"parts": 4}))
ROWWISE = (
    rowwise.RowwiseConfig(blocks_per_sm=1),
    rowwise.RowwiseConfig(stages=2, blocks_per_sm=3),
    rowwise.RowwiseConfig(tile_bytes=4096, blocks_per_sm=3),
    rowwise.RowwiseConfig(tile_bytes=2048, stages=4, blocks_per_sm=3),
)
ROWS_OUT = _named("rows out", (512, 4096), (4096, 4096), (4096, 12288))
PRODUCTS = _named(
    "rows in out rank",
    (1024, 2048, 2048, 384),
    (4096, 4096, 1024, 384),
    (4096, 4096, 12288, 384),
    (4096, 8192, 8192, 384),
    (4096, 12288, 4096, 384),
)
DROPPED_SHAPES = _grid(rows=(4096,), **{"in": (4096, 8192)}, rank=(16, 64, 256, 384, 768))
KERNELS = {
    "norm": Kernel(
        *(_norm, _norm_defined),
        ("in out", "in rank", "rank out"),
        ("out",),
        [s | {"in": s["out"]} for s in _grid(out=(1024, 2048, 8192), rank=RANKS)],
        STRIPS,
        ("in out rank",),
    ),
    "compose": Kernel(
        *(_compose, _composed), ("rows out",) * 2 + ("out",), ("rows out",), ROWS_OUT, ROWWISE
    ),
    "compose_backward": Kernel(
        *(_compose_backward, _compose_backward_defined),
        ("rows out", "rows out", "out"),
        ("rows out", "out"),
        ROWS_OUT,
        ROWWISE,
    ),
    "expand_compose": Kernel(
        *(_expand_compose, lambda base, z, b, g: _composed(base, z @ b, g)),
        ("rows out", "rows rank", "rank out", "out"),
        ("rows out",),
        _grid(rows=(1024, 4096), out=(2048, 8192), rank=RANKS),
        STRIPS,
        ("rows rank out",),
    ),
    "project": Kernel(
        *(_project, lambda x, w, z, b, g: _composed(x @ w, z @ b, g)),
        ("rows in", "in out", "rows rank", "rank out", "out"),
        ("rows out",),
        PRODUCTS,
        PROJECTIONS,
        ("rows in out", "rows rank out"),
    ),
    "project_back": Kernel(
        *(_project_back, lambda d, w, dz, a: d @ w.T + dz @ a.T),
        ("rows out", "in out", "rows rank", "in rank"),
        ("rows in",),
        PRODUCTS,
        PROJECTIONS,
        ("rows in out", "rows in rank"),
    ),
    "dropped_product": Kernel(
        *(_dropped(False), _dropped_defined(False)),
        ("rows in", "in rank", "seed"),
        ("rows rank",),
        DROPPED_SHAPES,
        DROPPED,
        ("rows in rank",),
    ),
    "dropped_product_back": Kernel(
        *(_dropped(True), _dropped_defined(True)),
        ("rows in", "rows rank", "seed"),
        ("in rank",),
        DROPPED_SHAPES,
        DROPPED,
        ("rows in rank",),
    ),
    "swiglu_backward": Kernel(
        *(_swiglu_backward, _swiglu_backward_defined),
        (*("rows out",) * 3, "out", "out"),
        ("rows out", "rows out", "out", "out"),
        ROWS_OUT,
        ROWWISE,
    ),
}
