"""The operands of the differentiable operators, each bundle a pytree that is handed on whole.

None stands for an operand that the call does without.
"""

from typing import NamedTuple

import jax


class Projection(NamedTuple):
    """The operands of one adapted projection.

    Attributes:
      x: [..., in].
      kernel: [in, out].
      lora_a: [in, r].
      lora_b: [r, out].
      g: f32[out], the magnitude over the norm; None for x (kernel + scale·lora_a lora_b) alone.
      scale: f32[].
      bias: [out].
      seed: uint32[2], of the dropout of x.
    """

    x: jax.Array
    kernel: jax.Array
    lora_a: jax.Array
    lora_b: jax.Array
    g: jax.Array | None
    scale: jax.Array
    bias: jax.Array | None = None
    seed: jax.Array | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Returns (rows, in, rank, out)."""
        in_features, out = self.kernel.shape
        return self.x.size // max(self.x.shape[-1], 1), in_features, self.lora_a.shape[1], out


class Composition(NamedTuple):
    """The operands of compose: base, lora [..., out], g f32[out], scale f32[]."""

    base: jax.Array
    lora: jax.Array
    g: jax.Array
    scale: jax.Array


class Gating(NamedTuple):
    """The operands of SwiGLU: gate, up [..., out], g f32[out] and bias [out] of either."""

    gate: jax.Array
    up: jax.Array
    gate_g: jax.Array
    gate_bias: jax.Array | None
    up_g: jax.Array
    up_bias: jax.Array | None


class Adapted(NamedTuple):
    """The operands of a norm: kernel [in, out], lora_a [in, r], lora_b [r, out], scale f32[]."""

    kernel: jax.Array
    lora_a: jax.Array
    lora_b: jax.Array
    scale: jax.Array
