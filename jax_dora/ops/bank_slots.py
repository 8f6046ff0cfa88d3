"""The operands of a bank: adapters in slots, their lookup for each row, and projections with them.

For each row, y = g[id]∘(base + s[id]·x A[id] B[id]) + bias.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The kernels read ranks in groups of this size.
RANKS = 8


class Slots(NamedTuple):
    """The adapters of one projection, in slots.

    An adapter has the last ranks of its slot, in groups of `RANKS`; all other elements are zero.

    Attributes:
      lora_a: [slots, rank, in].
      lora_b: [slots, rank, out].
      g: f32[slots, out], magnitude / norm; 1 for LoRA; NaN in a slot without an adapter. None if
        all adapters are LoRA.
      scale: f32[slots].
      rank: i32[slots], each adapter's own rank; 0 if it does not adapt this projection.
    """

    lora_a: Any
    lora_b: Any
    g: Any
    scale: Any
    rank: Any


def checked_ids(ids: jax.Array, slots: int) -> jax.Array:
    """Returns i32 ids, in which `slots` replaces each id that is below -1 or has no slot."""
    # Compared in the ids' own dtype: a cast to i32 could turn an invalid id into a valid one.
    info = jnp.iinfo(ids.dtype)
    valid = jnp.ones(ids.shape, bool)
    if info.max >= slots:
        valid = valid & (ids < jnp.asarray(slots, ids.dtype))
    if info.min < -1:
        valid = valid & (ids >= jnp.asarray(-1, ids.dtype))
    return jnp.where(valid, ids.astype(jnp.int32), slots)


class Rows(NamedTuple):
    """The slot i32[batch], g f32[batch, out] and scale f32[batch] of each row. For id -1, g is 1
    and the scale 0; for an invalid id the scale is NaN."""

    slot: Any
    g: Any
    scale: Any


def _rows_of(slots: Slots, ids: jax.Array, first: jax.Array, count: int, dtype: Any) -> Rows:
    slot = first + jnp.clip(ids, 0, count - 1)
    ones = jnp.ones((*ids.shape, slots.lora_b.shape[-1]), dtype)
    g = ones if slots.g is None else slots.g[slot].astype(dtype)
    scale = jnp.where(ids < count, slots.scale[slot], jnp.nan).astype(dtype)
    return Rows(slot, jnp.where((ids < 0)[:, None], 1, g), jnp.where(ids < 0, 0, scale))


# Jitted, so that `jax.debug_nans` does not raise for the NaN of an empty slot that no row selects.
rows_of: Callable[..., Rows] = jax.jit(_rows_of, static_argnames=("count", "dtype"), inline=True)


def compose_rows(base: jax.Array, lora: jax.Array, rows: Rows, bias: jax.Array | None) -> jax.Array:
    """Returns g∘(base + s·lora) + bias; base + bias, bit for bit, where g is 1 and s is 0."""
    g, scale = rows.g[:, None], rows.scale[:, None, None]
    wide = base.astype(g.dtype)
    y = g * (wide + scale * lora.astype(g.dtype))
    if bias is not None:
        y = y + bias.astype(g.dtype)[None, None]
        # Added as `nnx.Linear` does: XLA may add such a bias before it rounds the product.
        dtype = base.dtype if base.dtype == bias.dtype else g.dtype
        base = (base.astype(dtype) + bias.astype(dtype)[None, None]).astype(base.dtype)
    # Selected, because base + 0·lora turns -0 into 0, and is NaN if lora is not finite.
    return jnp.where((g == 1) & (scale == 0), base, y.astype(base.dtype))


class SlotProjection(NamedTuple):
    """One of several projections of the same x, with adapters in slots.

    A caller gives the fields up to `bias`. `of_rows` replaces the arrays of all slots by those of
    the batch's rows for the operators, which use only some of the fields; the others are None.

    Attributes:
      slots: the adapters, perhaps of all layers of a stack.
      base: [batch, time, out], x times the kernel; for `bank_linears`.
      kernel: [in, out] in x's dtype, or the kernels of a stack of layers, [layers, in, out]; for
        `bank_projections`.
      layer: i32[], the index of the layer in a stack of kernels.
      first, slot_count: use only this number of slots from i32[] `first` on, for one layer of a
        stack. ids count from `first`. By default all slots.
      bias: [out]; never scaled.
      rows: the slot, g and scale of each row.
      z: [batch, time, rank], x A of each row's adapter.
    """

    slots: Any
    base: Any = None
    kernel: Any = None
    layer: Any = None
    first: Any = None
    slot_count: int | None = None
    bias: Any = None
    rows: Any = None
    z: Any = None

    @property
    def layer_slots(self) -> int:
        """Returns the number of slots of the layer."""
        return self.slots.lora_a.shape[0] if self.slot_count is None else self.slot_count

    def of_rows(self, ids: jax.Array, dtype: Any) -> "SlotProjection":
        """Returns the projection with `rows`, of an accumulator's `dtype`, for i32[batch] ids."""
        first = jnp.int32(0) if self.first is None else self.first
        rows = rows_of(self.slots, ids, first, self.layer_slots, dtype)
        slots = self.slots._replace(g=None, scale=None)
        return self._replace(slots=slots, first=first, slot_count=None, rows=rows)

    def of_tokens(self) -> "SlotProjection":
        """Returns the fields that the product x A B reads."""
        return SlotProjection(self.slots, first=self.first)

    def composed(self, lora: jax.Array) -> jax.Array:
        """Returns the result, given the adapters' product in any shape of base's size."""
        return compose_rows(self.base, lora.reshape(self.base.shape), self.rows, self.bias)


class Batch(NamedTuple):
    """The operands of all projections of the same x [batch, time, in], or [rows, in] for rows of
    one token: ids i32[batch], the projections, and `step_of` the ids or None."""

    x: Any
    ids: Any
    projections: tuple[SlotProjection, ...]
    step: Any = None
