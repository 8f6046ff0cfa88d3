"""Compose: combines the base's and the adapter's results into the result of a DoRA layer.

    y  = base + ((g-1)∘base + g∘(s·lora))          ΔY = (g-1)∘base + g∘(s·lora)

(arXiv 2603.22276, section 4; base, lora [..., out], g [out].) In trained adapters g is within about
0.002 of 1. So g-1 is computed in fp32, and the result is rounded once, at the end. With
inner = base + s·lora, the gradients are

    d_base = g∘dy  ((g-1)∘dy for ΔY)     d_lora = s·g∘dy     d_g = Σ_rows dy∘inner

``inner`` is saved for the backward pass only if g requires a gradient.

A projection with a bias passes the sum base + bias, as its matrix product rounds it, and the bias.
Then y is computed from this sum, while g scales the sum minus the bias. So with g = 1 and lora = 0,
y equals the base layer's result bit for bit.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from torch_dora.ops import check, choose
from torch_dora.ops.choose import Call
from torch_dora.ops.dtypes import accumulation_dtype, cast
from torch_dora.ops.operator import is_compiled
from torch_dora.ops.shards import is_sharded

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import compose_backward as triton_backward
    from torch_dora.ops.triton import compose_forward as triton_forward
else:
    triton_forward = None


def compose(
    base: Tensor, lora: Tensor, g: Tensor, scale: float, *, implementation: str | None = None
) -> Tensor:
    """Returns y = base + ((g-1)·base + g·(scale·lora)), computed in fp32 and rounded once.

    Args:
        base: [..., out], the frozen projection's result without its bias.
        lora: [..., out], ``(x @ lora_a.T) @ lora_b.T``, not yet scaled.
        g: f32[out] from :func:`~torch_dora.ops.magnitude_scale`.
        scale: alpha/r or alpha/sqrt(r).
        implementation: None, "triton" or "eager"; a named one runs or raises.

    Returns:
        [..., out] in base's dtype.

    Raises:
        TypeError, ValueError: an argument's dtype or shape is wrong; unknown implementation.
        NotImplementedError: the named implementation cannot run the call.
    """
    return _checked(base, lora, g, scale, False, implementation)


def compose_delta(
    base: Tensor, lora: Tensor, g: Tensor, scale: float, *, implementation: str | None = None
) -> Tensor:
    """Returns ΔY = (g-1)·base + g·(scale·lora), the paper's operator, to be added to base.

    Arguments, result and errors are those of :func:`compose`. Prefer :func:`compose`: adding a
    rounded ΔY to base costs another pass over memory and another rounding.
    """
    return _checked(base, lora, g, scale, True, implementation)


def choose_compose(
    base: Tensor, lora: Tensor, g: Tensor, implementation: str | None, want_inner: bool = False
) -> str:
    """Returns the implementation of both passes for these operands. Under torch.compile a call
    whose g has a gradient uses "eager": the compiler fuses both passes with the operations around
    them, which a custom operator would prevent.
    """
    if implementation is None and want_inner and is_compiled():
        return "eager"
    features = base.shape[-1]
    call = Call(
        rows=base.numel() // max(1, features),
        features=features,
        dtypes=(base.dtype, lora.dtype, g.dtype),
        device=base.device.type,
        transformed=choose.in_transform(),
        sharded=is_sharded(base, lora, g),
    )
    return choose.choose(call, implementation, triton_forward)


def forward(
    base: Tensor,
    lora: Tensor,
    g: Tensor,
    bias: Tensor | None,
    scale: float,
    delta: bool,
    want_inner: bool,
    implementation: str,
) -> tuple[Tensor, Tensor | None]:
    """Computes (y or ΔY, inner or None) with one implementation; this function is not
    differentiable."""
    if implementation == "triton":
        y, *inner = triton_forward.compose(base, lora, g, bias, scale, delta, want_inner)
        return y, inner[0] if want_inner else None
    dtype = accumulation_dtype(base, lora, g)
    wide = cast(base, dtype)
    unbiased = wide if bias is None else wide - cast(bias, dtype)
    g, scaled = cast(g, dtype), scale * cast(lora, dtype)
    change = (g - 1) * unbiased + g * scaled
    result = cast(change if delta else wide + change, base.dtype)
    return result, cast(unbiased + scaled, base.dtype) if want_inner else None


if triton_forward is not None:

    @triton_forward.compose.define
    def _definition(base, lora, g, bias, scale, delta, want_inner) -> list[Tensor]:
        result, inner = forward(base, lora, g, bias, scale, delta, want_inner, "eager")
        return [result] if inner is None else [result, inner]


def backward(
    dy: Tensor,
    inner: Tensor | None,
    g: Tensor,
    scale: float,
    delta: bool,
    want_base: bool,
    want_lora: bool,
    implementation: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns (d_base, d_lora, d_g): the first two in dy's dtype if wanted, d_g [out] in fp32 if
    ``inner`` is given."""
    if implementation == "triton":
        d = iter(triton_backward.compose_backward(dy, inner, g, scale, delta, want_base, want_lora))
        d_base, d_lora, d_g = (
            next(d) if wanted else None for wanted in (want_base, want_lora, inner is not None)
        )
        return d_base, d_lora, d_g
    dtype = accumulation_dtype(dy, g)
    wide, g = cast(dy, dtype), cast(g, dtype)
    d_base = cast((g - 1 if delta else g) * wide, dy.dtype) if want_base else None
    d_lora = cast(g * (scale * wide), dy.dtype) if want_lora else None
    d_g = None
    if inner is not None:
        terms = wide * cast(inner, dtype)
        d_g = terms.flatten(0, -2).sum(0) if terms.ndim > 1 else terms
    return d_base, d_lora, d_g


def differentiable_once[R](backward: Callable[..., R]) -> Callable[..., R]:
    """Wraps the ``backward`` of a torch.autograd.Function: differentiating its results again
    raises. With torch's own once_differentiable they depend on nothing, and a gradient penalty
    would have no gradient, without an error."""

    @functools.wraps(backward)
    def differentiated(ctx: Any, dy: Tensor) -> R:
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, dy)
        if not torch.is_grad_enabled():
            return (
                _of_a_batch(backward, ctx, dy) if is_legacy_batchedtensor(dy) else backward(ctx, dy)
            )
        ctx = _ReadOnce(ctx)
        with torch.no_grad():
            gradients = backward(ctx, dy)
        sources = *ctx.saved_tensors, *getattr(ctx, "parameters", ())
        return _Gradients.apply(gradients, dy, *sources)

    return differentiated


def _of_a_batch[R](backward: Callable[..., R], ctx: Any, dy: Tensor) -> R:
    """Returns the gradients of a batch of dy, if torch's own operations compute them."""
    try:
        return backward(ctx, dy)
    except RuntimeError as error:
        raise NotImplementedError(
            "an operator of torch_dora has no gradient for is_grads_batched=True, nor for "
            "torch.autograd.functional with vectorize=True: compute one gradient at a time, or use "
            "torch.func.vjp in torch.func.vmap"
        ) from error


class _ReadOnce:
    """The context of a backward pass. Its saved tensors are read once, as checkpoints demand."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Gradients(torch.autograd.Function):
    """Makes gradients depend on the tensors they were computed from, and raises if they are
    differentiated."""

    @staticmethod
    def forward(ctx, gradients, *sources):
        return gradients

    @staticmethod
    def backward(ctx, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "trying to differentiate twice through an operator of torch_dora, whose gradient is "
            "not differentiable; use torch.func.grad, hessian, jvp and so on, which can be nested"
        )


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, base, lora, g, scale, delta, want_inner, implementation):
        result, inner = forward(base, lora, g, None, scale, delta, want_inner, implementation)
        ctx.save_for_backward(inner, g)
        ctx.constants, ctx.lora_dtype = (scale, delta, implementation), lora.dtype
        return result

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        inner, g = ctx.saved_tensors
        want_base, want_lora, want_g = ctx.needs_input_grad[:3]
        scale, delta, implementation = ctx.constants
        inner = inner if want_g else None
        d_base, d_lora, d_g = backward(
            dy, inner, g, scale, delta, want_base, want_lora, implementation
        )
        d_lora = None if d_lora is None else d_lora.to(ctx.lora_dtype)
        d_g = None if d_g is None else d_g.to(g.dtype)
        return d_base, d_lora, d_g, None, None, None, None


def _checked(base, lora, g, scale, delta, implementation):
    check.is_float("base", base)
    check.is_float("lora", lora)
    check.is_float("g", g)
    if base.ndim == 0:
        raise ValueError("base has shape (); expected [..., out]")
    check.has_shape("lora", lora, tuple(base.shape), "base's shape [..., out]")
    check.has_shape("g", g, (base.shape[-1],), "[out]")
    check.is_scale(scale)
    want_inner = torch.is_grad_enabled() and g.requires_grad
    chosen = choose_compose(base, lora, g, implementation, want_inner)
    if choose.in_transform():
        return forward(base, lora, g, None, float(scale), delta, False, chosen)[0]
    return _Compose.apply(base, lora, g, float(scale), delta, want_inner, chosen)
