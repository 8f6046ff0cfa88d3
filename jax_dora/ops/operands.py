"""The operands of the differentiable operators: one NamedTuple, and so one pytree, per operator.

A field holds an array, or None for an optional operand that is absent. The same NamedTuples also
hold one value per operand: its gradient, whether the gradient is wanted, or its axis names.
"""

from typing import Any, NamedTuple


class Static(NamedTuple):
    """The settings of a call that are not arrays. They are static arguments under `jax.jit`.

    Attributes:
      op: the operator's name, for error messages.
      implementation, precision, keep_inner, act_qtype: see `dora_linear`.
      rate, mode: the dropout's rate and mode.
      global_shape: the shape of the whole x; a device may hold a shard of x.
      dtype: the dtype of lora_a's gradient.
      want_inner, want_base, want_lora, want_bias: which optional results are computed.
      scale_is_zero: the norm's scale is known to be zero.
      slots: the number of slots of a bank.
      expand_implementation: the implementation of a bank's second product. It keeps the caller's
        choice where `implementation` has been replaced by "xla".
    """

    op: str
    implementation: str | None
    precision: Any = None
    rate: float = 0.0
    mode: str = "adapter"
    keep_inner: bool = False
    act_qtype: str | None = None
    global_shape: tuple[int, ...] = ()
    dtype: Any = None
    want_inner: bool = False
    want_base: bool = True
    want_lora: bool = False
    want_bias: bool = False
    scale_is_zero: bool = False
    slots: int = 0
    expand_implementation: str | None = None


class Projection(NamedTuple):
    """The operands of one adapted projection.

    Attributes:
      x: [..., in].
      kernel: [in, out].
      lora_a: [in, r].
      lora_b: [r, out].
      g: f32[out], magnitude / norm; None if the result is x (kernel + scale·lora_a lora_b).
      scale: f32[].
      bias: [out].
      seed: uint32[2], the seed of x's dropout.
      z: [..., r], drop(x) (scale·lora_a), once it has been computed. lora_a is then None if z must
        not be recomputed from it.
      codes, row_scales: those of `row_wise.CodedRows`, if x is quantised for the product with the
        kernel.
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
    codes: Any = None
    row_scales: Any = None

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
    """The operands of SwiGLU and of its gradient.

    Attributes:
      gate, up: [..., out].
      gate_g, up_g: f32[out].
      gate_bias, up_bias: [out].
      dh: [..., out], the gradient of the result; only for the backward pass.
      h: [..., out], the result, if it has been computed.
    """

    gate: Any
    up: Any
    gate_g: Any
    gate_bias: Any
    up_g: Any
    up_bias: Any
    dh: Any = None
    h: Any = None


class AdaptedKernel(NamedTuple):
    """The operands of the norm: kernel [in, out], lora_a [in, r], lora_b [r, out], scale f32[]."""

    kernel: Any
    lora_a: Any
    lora_b: Any
    scale: Any
