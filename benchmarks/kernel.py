"""A Mosaic kernel as `tune` and `tools/sanitize.py` see it: what it computes, at which sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops import choose
from jax_dora.ops.dropout import draw_seed
from jax_dora.ops.quantised import bits

BF16 = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """A kernel, what it computes in plain jnp, and what there is to try.

    Attributes:
      module: one of `jax_dora.ops.mosaic`.
      define: the results that the launch does not return as None, computed by XLA.
      call: the sizes that `module.config` takes, before the dtypes.
      operands: their axes, by the names of sizes; "" is a layer's number, "seed" a dropout seed,
        "slot" a slot for each group, "ids" for each row, "ranks" the rank of each slot. bf16 if two
        axes or more, else fp32; those after "nf4" are codes.
      shapes: at which it is measured, as sizes.
      candidates: configs to be tried.
      products: axes of its matrix products.
      scaled: the launch takes a scale after its operands, here 1.
      options: static arguments of the launch.
      kinds: the dtypes and formats in the call, after its sizes.
      launched: what stands for the module's launch, where that takes other operands.
    """

    module: ModuleType
    define: Callable[..., Any]
    call: str
    operands: tuple[str, ...]
    shapes: Sequence[Mapping[str, int]]
    candidates: Sequence[Any]
    products: tuple[str, ...] = ()
    scaled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[Any, ...] = (BF16,)
    launched: Callable[..., Any] | None = None

    def launch(self, *operands: jax.Array, config: Any = None) -> Any:
        """Returns the kernel's results, launched by `config`, or by the kernel's own choice if that
        is None."""
        sizes: dict[str, int] = {}
        for axes, operand in zip(self.operands, operands, strict=True):
            names = axes.removeprefix("nf4 ").split()
            sizes |= dict(zip(names, operand.shape, strict=True))
        knobs = {"config": config or self.module.config(*self.arguments(sizes))}
        knobs["sm_count"] = choose.target().sm_count
        launch = self.launched or self.module.launch
        scale = (jnp.float32(1),) if self.scaled else ()
        return launch(*operands, *scale, **self.options, **knobs)

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
    if not axes:
        return jnp.int32(0)
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
