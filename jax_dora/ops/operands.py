"""The operands and the settings of the differentiable operators, a NamedTuple each.

Operands are a pytree: a field holds an array, or None for an optional operand that is absent. The
same NamedTuples also hold one value per operand: its gradient, whether the gradient is wanted, or
its axis names. Settings are hashable, and static arguments under `jax.jit`.
"""

from typing import Any, NamedTuple


class ProductSettings(NamedTuple):
    """The settings of a product of matrices; see `dora_linear`."""

    implementation: str | None
    precision: Any = None
    bwd_qtype: str | None = None


class ProjectionSettings(NamedTuple):
    """The settings of an adapted projection: the public function's name, for errors;
    `dora_linear`'s; the dropout's rate and mode; and whether the gradient that comes back is that
    of inner, because the reader of the result multiplies it by g itself, as `swiglu` does."""

    op: str
    implementation: str | None
    precision: Any = None
    act_qtype: str | None = None
    bwd_qtype: str | None = None
    keep_inner: bool | None = None
    rate: float = 0.0
    mode: str = "adapter"
    of_inner: bool = False


class Projection(NamedTuple):
    """The operands of one adapted projection.

    Attributes:
      x: [..., in], or its `row_scaled.RowScaled` if it is quantised for the product with the
        kernel.
      kernel: [in, out].
      lora_a: [in, r].
      lora_b: [r, out].
      g: f32[out], magnitude / norm; None if the result is x (kernel + scale·lora_a lora_b).
      scale: f32[].
      bias: [out].
      seed: uint32[2], the seed of x's dropout.
      z: [..., r], drop(x) (scale·lora_a), once it has been computed. lora_a is then None if z must
        not be recomputed from it.
      codes: the codes [out, in] of a quantised kernel, with contiguous rows, if they exist.
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


class Composition(NamedTuple):
    """The operands of compose: base, lora [..., out], g f32[out], scale f32[]."""

    base: Any
    lora: Any
    g: Any
    scale: Any


class CompositionSettings(NamedTuple):
    """The settings of compose: the name of the public function that composes, `compose`'s
    `implementation`, and whether inner is a result."""

    op: str
    implementation: str | None
    want_inner: bool = False


class Gating(NamedTuple):
    """The operands of SwiGLU and of its gradient: gate, up [..., out], their g f32[out] and biases
    [out]; dh [..., out], the gradient of the result, for the backward pass; and h [..., out], the
    result, if it has been computed."""

    gate: Any
    up: Any
    gate_g: Any
    gate_bias: Any
    up_g: Any
    up_bias: Any
    dh: Any = None
    h: Any = None


class GatingSettings(NamedTuple):
    """The settings of SwiGLU and its gradient; `want_bias` asks for the biases' gradients, `scaled`
    says that gate and up are multiplied by g already, and `want_result` asks the gradient for the
    result, too."""

    implementation: str | None
    want_bias: bool = False
    scaled: bool = False
    want_result: bool = False


class AdaptedKernel(NamedTuple):
    """The operands of the norm: kernel [in, out], lora_a [in, r], lora_b [r, out], scale f32[]."""

    kernel: Any
    lora_a: Any
    lora_b: Any
    scale: Any


class NormSettings(NamedTuple):
    """The settings of the norm: `factored_norm`'s, whether the scale is known to be zero, and
    whether the transposed codes of a kernel in FP8 are a result, too."""

    implementation: str | None
    scale_is_zero: bool = False
    want_codes: bool = False
