"""The operands of the differentiable operators, each bundle a pytree that is handed on whole.

A field holds an array, or None for an operand that the call does without. The same bundle also
holds, field by field, what belongs to its operands: their gradients, or how they are sharded.
"""

from typing import Any, NamedTuple


class Static(NamedTuple):
    """The settings of a call, which are no arrays: static wherever it is compiled.

    Attributes:
      op: the operator's name, for messages.
      implementation, precision, keep_inner, act_qtype: as `dora_linear`'s.
      rate, mode: the dropout's.
      whole: the shape of all of x, of which a device may have a part.
      dtype: of lora_a's gradient.
      want_inner, want_base, want_lora, want_bias: which results are wanted.
      is_zero: of a norm, the scale is known to be zero.
      slots: of a bank, how many are meant.
      of_expand: of a bank, the implementation of the second product, where it stays what the caller
        has named while that of the others becomes "xla".
    """

    op: str
    implementation: str | None
    precision: Any = None
    rate: float = 0.0
    mode: str = "adapter"
    keep_inner: bool = False
    act_qtype: str | None = None
    whole: tuple[int, ...] = ()
    dtype: Any = None
    want_inner: bool = False
    want_base: bool = True
    want_lora: bool = False
    want_bias: bool = False
    is_zero: bool = False
    slots: int = 0
    of_expand: str | None = None


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
      z: [..., r], x (scale·lora_a) of the dropped x, once it is computed; lora_a is None then where
        nobody may take z from it.
    """

    x: Any
    kernel: Any
    lora_a: Any
    lora_b: Any
    g: Any
    scale: Any
    bias: Any = None
    seed: Any = None
    z: Any = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Returns (rows, in, rank, out)."""
        in_features, out = self.kernel.shape
        return self.x.size // max(self.x.shape[-1], 1), in_features, self.lora_a.shape[1], out


class Composition(NamedTuple):
    """The operands of compose: base, lora [..., out], g f32[out], scale f32[]."""

    base: Any
    lora: Any
    g: Any
    scale: Any


class Gating(NamedTuple):
    """The operands of SwiGLU: gate, up [..., out], g f32[out] and bias [out] of either; and of its
    gradient dh [..., out]."""

    gate: Any
    up: Any
    gate_g: Any
    gate_bias: Any
    up_g: Any
    up_bias: Any
    dh: Any = None


class Adapted(NamedTuple):
    """The operands of a norm: kernel [in, out], lora_a [in, r], lora_b [r, out], scale f32[]."""

    kernel: Any
    lora_a: Any
    lora_b: Any
    scale: Any
