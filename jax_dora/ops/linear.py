"""A whole adapted projection, y = x W' + bias, and its gradient.

With base = xW, z = xA, lora = zB and g from `magnitude_scale` (arXiv 2603.22276, section 2):

    y = base + ((g-1)∘base + g∘(s·lora)) + bias

and, with d = g∘dy, the gradient in the order that never makes an [in, out] product:

    dz = s·(d Bᵀ)    dx = d Wᵀ + dz Aᵀ    dA = xᵀ dz    dB = s·(zᵀ d)
    d_g = Σ_rows dy∘(base + s·lora)       dbias = Σ_rows dy

`lora_linear` is inner = x (W + s·A B) alone, as if g were 1. The kernel is frozen: its gradient,
xᵀ d, is computed only where somebody differentiates it.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jax_dora.ops import check, device, dispatch, tuning
from jax_dora.ops import dropout as dropouts
from jax_dora.ops import mesh as meshes
from jax_dora.ops.check import InnerName
from jax_dora.ops.compose import (
    Plan,
    backward,
    compose_delta,
    forward,
    plan_compose,
    refuse_scale_gradient,
    witness,
)
from jax_dora.ops.dropout import Dropout, drop, kept_share
from jax_dora.ops.mosaic import dropped as mosaic_dropped
from jax_dora.ops.mosaic import expand_compose as mosaic_expand
from jax_dora.ops.mosaic import projection as mosaic_projection
from jax_dora.ops.norm import factored_norm, magnitude_scale, of_layer
from jax_dora.ops.residuals import pack, unpack

NORM_NAME = "dora_norm"


def dora_linear(
    x: jax.Array,
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    magnitude: jax.Array,
    scale: ArrayLike,
    *,
    bias: jax.Array | None = None,
    norm: jax.Array | None = None,
    kernel_sq_norm: jax.Array | None = None,
    implementation: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    dropout: Dropout | None = None,
    inner_name: InnerName = None,
) -> jax.Array:
    """y = magnitude ∘ x (kernel + scale·lora_a lora_b) / ‖kernel + scale·lora_a lora_b‖ + bias.

    Args:
      x: [..., in].
      kernel: [in, out], frozen.
      lora_a: [in, r].
      lora_b: [r, out].
      magnitude: [out].
      scale: alpha/r or alpha/sqrt(r).
      bias: [out]; never scaled.
      norm: f32[out], `factored_norm` of these very arrays, computed earlier. Not recomputed and
        not checked.
      kernel_sq_norm: f32[out], `squared_norm(kernel)`; used where `norm` is not given.
      implementation: None, "mosaic" or "xla"; a named one runs or raises. "mosaic" stands for the
        most fused of its kernels that takes the call: the whole projection, else expand and
        compose, else compose alone; the norm then takes the best that accepts it. Under dropout it
        also draws the mask in the kernels of lora_a's product and gradient, where they accept the
        call; x's gradient, and mode "input", are XLA's.
      precision: of the matrix products with x, as in `jax.lax.dot_general`.
      dropout: of x, in training; its mask is never in memory, see `jax_dora.ops.Dropout`.
      inner_name: a `jax.ad_checkpoint.checkpoint_name` for x (kernel + scale·lora_a lora_b)
        [..., out], which only magnitude's gradient reads; a policy of `jax.checkpoint` may keep it.
        Or a name and a share, such as ("inner", 0.5): the first half of the tokens, x's last axis
        but one, carries the name, and the rest is computed apart from y, so that a policy which
        keeps the name leaves no more to compute again. Elsewhere it is computed twice.

    Returns:
      [..., out] in the dtype that x and kernel promote to; adapters of a wider dtype are cast to it
      for the products with activations (the norm takes them as they are), and their gradients come
      back in their own dtype. The norm carries the checkpoint name "dora_norm".

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation cannot take the call; inner_name with dropout
        mode "input".
    """
    check.inner_name(inner_name)
    _check_operands(x, kernel, lora_a, lora_b, implementation)
    out_features = kernel.shape[1]
    check.is_float("magnitude", magnitude)
    check.has_shape("magnitude", magnitude, (out_features,), "[out]")
    if bias is not None:
        check.is_float("bias", bias)
        check.has_shape("bias", bias, (out_features,), "[out]")
    if norm is None:
        fresh = factored_norm(
            kernel,
            lora_a,
            lora_b,
            scale,
            kernel_sq_norm=kernel_sq_norm,
            implementation=of_layer(implementation),
        )
        norm = jnp.asarray(checkpoint_name(fresh, NORM_NAME))
    elif kernel_sq_norm is not None:
        raise ValueError("norm and kernel_sq_norm are both given; norm already contains the other")

    g = magnitude_scale(magnitude, norm, _result_dtype(x, kernel))
    rate, seed = _active(dropout)
    operands = (x, kernel, lora_a, lora_b, g, check.scale_array(scale), bias, seed)
    if dropout is not None and dropout.mode == "input" and rate:
        if inner_name is not None:
            raise NotImplementedError(
                f"inner_name is {inner_name!r} with dropout mode 'input', whose correction is "
                "composed apart from base; expected None, or dropout mode 'adapter'"
            )
        return _on_mesh(_with_dropped_input, (implementation, precision, rate), *operands)
    static = ("dora_linear", implementation, precision, rate, inner_name)
    return _on_mesh(_planned, static, *operands)


def lora_linear(
    x: jax.Array,
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: ArrayLike,
    *,
    implementation: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    dropout: Dropout | None = None,
) -> jax.Array:
    """inner = x (kernel + scale·lora_a lora_b), by the kernels of `dora_linear`.

    A LoRA layer without its bias (arXiv 2106.09685), or what `swiglu` makes a pair of DoRA layers
    of. Arguments, result and errors as `dora_linear`'s.

    Raises:
      NotImplementedError: dropout has mode "input", which is DoRA's.
    """
    _check_operands(x, kernel, lora_a, lora_b, implementation)
    rate, seed = _active(dropout)
    if dropout is not None and dropout.mode == "input" and rate:
        raise NotImplementedError(
            "dropout has mode 'input', in which the kernel's product of the dropped x is scaled by "
            "g; expected mode 'adapter'"
        )
    operands = (x, kernel, lora_a, lora_b, None, check.scale_array(scale), None, seed)
    return _on_mesh(_planned, ("lora_linear", implementation, precision, rate, None), *operands)


def _check_operands(x, kernel, lora_a, lora_b, implementation) -> None:
    dispatch.check_name(implementation)
    check.is_float("x", x)
    check.adapter(kernel, lora_a, lora_b)
    in_features = kernel.shape[0]
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"x has shape {x.shape}; its last axis must have kernel's {in_features} input features"
        )


def _active(dropout: Dropout | None) -> tuple[float, jax.Array | None]:
    """(rate, seed), or (0, None) where nothing is dropped."""
    if dropout is None:
        return 0.0, None
    dropouts.check(dropout)
    return (dropout.rate, dropout.seed) if dropout.rate else (0.0, None)


def _on_mesh(function, static, x, kernel, lora_a, lora_b, g, scale, bias, seed) -> jax.Array:
    """`function(*static, …)` of these operands.

    On a mesh with explicit axes the result is sharded as x's rows and the kernel's columns are, and
    each device computes its part of it by itself, where it can.
    """
    operands = (x, kernel, lora_a, lora_b, g, scale, bias, seed)
    mesh = meshes.explicit(x, kernel)
    if mesh is None:
        return function(*static, *operands)
    *rows, contracted = meshes.spec(x)
    of_in, columns = meshes.spec(kernel)
    result = jax.P(*rows, columns)
    axes = jax.tree.leaves(tuple(result))
    if (contracted and of_in) or len(axes) > len(set(axes)):
        return function(*static, *operands)  # JAX asks for an out_sharding, or refuses
    if contracted or of_in or seed is not None:
        # A mask is drawn by an element's position in the whole of x, and a kernel whose inputs are
        # sharded is gathered only where XLA needs it.
        call = functools.partial(function, *static)
        return meshes.left_to_xla(call, mesh, result)(*operands)
    of_x, of_kernel, vector = jax.P(*rows, None), jax.P(None, columns), jax.P(columns)
    specs = (of_x, of_kernel, jax.P(None, None), of_kernel, vector, jax.P(), vector, jax.P())
    return meshes.per_device(function, static, mesh, specs, result, *operands)


def _planned(op, implementation, precision, rate, inner_name, *operands):
    """y, or inner where g is None, of the operands of `_project`."""
    x, kernel, lora_a, *_ = operands
    shape = (*x.shape[:-1], kernel.shape[1])
    result = jax.ShapeDtypeStruct(shape, _result_dtype(x, kernel))
    plan = _plan(op, x, kernel, lora_a.shape[1], result, implementation, rate)
    plan = plan._replace(inner_name=check.inner_name(inner_name))
    precision = lax.Precision(precision) if isinstance(precision, str) else precision
    return meshes.differentiable(_project, (plan, precision), *operands)


def _with_dropped_input(
    implementation, precision, rate, x, kernel, lora_a, lora_b, g, scale, bias, seed
):
    """Mode "input": base of x, the whole correction of the dropped x."""
    dtype = _result_dtype(x, kernel)
    dot = functools.partial(_dot, dtype, precision)
    dropped = drop(*meshes.vary_alike(x.astype(dtype), seed), rate)
    lora = dot(dot(dropped, lora_a, (-1, 0)), lora_b, (-1, 0))
    corrected = dot(dropped, kernel, (-1, 0))
    y = dot(x, kernel, (-1, 0))
    y = y + compose_delta(corrected, lora, g, scale, implementation=implementation)
    return y if bias is None else y + bias.astype(dtype).reshape((1,) * (y.ndim - 1) + (-1,))


class LinearPlan(NamedTuple):
    """What is static in a call.

    Attributes:
      compose: of the stand-alone compose and its backward.
      forward: "project", "expand" or "compose", the kernel that makes y.
      backward: "project" or "xla", what makes dx.
      dropout: the rate at which the adapter's x is dropped.
      drops: "mosaic" or "xla", what draws the mask for z,
      drops_back: and what for dA.
      inner_name: what rematerialisation knows `inner` by, and the share of it that it does.
    """

    compose: Plan
    forward: str
    backward: str
    dropout: float
    drops: str = "xla"
    drops_back: str = "xla"
    inner_name: tuple[str | None, float] = (None, 1.0)


def _plan(
    op: str, x, kernel, rank: int, result, implementation: str | None, rate: float
) -> LinearPlan:
    target = device.target()
    fits = dispatch.runs_mosaic(target)
    in_features, out = kernel.shape
    rows, dtype = math.prod(x.shape[:-1]), result.dtype
    sizes = _sizes(x, kernel, rank)

    def takes(kernel_name: str, refusal: str | None) -> bool:
        if implementation == "xla" or fits.refusal or refusal:
            return False
        return implementation == "mosaic" or not (
            fits.slower or tuning.slower(target.device_kind, kernel_name, sizes)
        )

    projects = mosaic_projection.refuses(rows, in_features, out, dtype, dtype)
    # Of a dropped x, the adapter's part of dx is masked before it is added.
    backward = "project" if not rate and takes("project_back", projects) else "xla"
    if takes("project", projects):
        forward = "project"
    elif takes("expand_compose", mosaic_expand.refuses(rows, rank, out, dtype, dtype)):
        forward = "expand"
    else:
        forward = "compose"
    compose = plan_compose(op, False, result, implementation)
    drops = drops_back = "xla"
    if rate:
        refusal = mosaic_dropped.refuses(rows, in_features, rank, dtype)
        drops = "mosaic" if takes("dropped_product", refusal) else "xla"
        drops_back = "mosaic" if takes("dropped_product_back", refusal) else "xla"
    return LinearPlan(compose, forward, backward, rate, drops, drops_back)


def _sizes(x, kernel, rank: int) -> dict[str, int]:
    (in_features, out), rows = kernel.shape, math.prod(x.shape[:-1])
    return {"rows": rows, "in": in_features, "rank": rank, "out": out, "elements": rows * out}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(plan, precision, x, kernel, lora_a, lora_b, g, scale, bias, seed):
    return _forward(plan, precision, x, kernel, lora_a, lora_b, g, scale, bias, seed, False)[0]


def _forward(plan, precision, x, kernel, lora_a, lora_b, g, scale, bias, seed, want_inner):
    """(y, inner or None, z); z is already scaled where the plan is to project."""
    dtype = _result_dtype(x, kernel)
    dot = functools.partial(_dot, dtype, precision)
    reduce = functools.partial(_reduce, plan, dot, x.astype(dtype), lora_a.astype(dtype), seed)
    if plan.forward == "project":
        z = (scale.astype(jnp.float32) * reduce(jnp.float32)).astype(dtype)
    else:
        z = reduce(dtype)
    y, inner = _expand(plan, precision, x, kernel, z, lora_b, g, scale, bias, want_inner)
    return y, inner, z


def _expand(plan, precision, x, kernel, z, lora_b, g, scale, bias, want_inner):
    """(y, inner or None) of z; y is inner where g is None."""
    dtype = _result_dtype(x, kernel)
    one = jnp.ones((kernel.shape[1],), jnp.float32) if g is None else g
    dot = functools.partial(_dot, dtype, precision)
    if plan.forward == "compose":
        base, lora = dot(x, kernel, (-1, 0)), dot(z, lora_b, (-1, 0))
        return forward(plan.compose, base, lora, one, scale, bias, want_inner=want_inner)

    target, sm_count = device.target(), device.sm_count()
    rank = z.shape[-1]
    measured = functools.partial(tuning.config, target.device_kind, sizes=_sizes(x, kernel, rank))
    if plan.forward == "expand":
        config = measured(
            "expand_compose", fits=lambda config: mosaic_expand.fits(config, rank, want_inner)
        )
        base = dispatch.on_cuda(dot(x, kernel, (-1, 0)), target)
        return mosaic_expand.expand_compose(
            base,
            z,
            lora_b.astype(dtype),
            one,
            scale,
            bias,
            want_inner=want_inner,
            sm_count=sm_count,
            config=config,
        )
    x = dispatch.on_cuda(x.astype(dtype), target)
    return mosaic_projection.project(
        x,
        kernel.astype(dtype),
        z,
        lora_b.astype(dtype),
        g,
        bias,
        want_inner=want_inner,
        sm_count=sm_count,
        config=measured("project", fits=mosaic_projection.fits),
    )


def _named(
    plan, precision, inner, x, kernel, z, lora_b, scale
) -> tuple[jax.Array, jax.Array | None]:
    """inner in one part, or two along the tokens, of which the first carries the plan's name."""
    name, share = plan.inner_name
    if name is None:
        return inner, None
    tokens = x.shape[-2] if x.ndim > 1 else 1
    kept = max(1, round(share * tokens))
    if kept >= tokens:
        return jnp.asarray(checkpoint_name(inner, name)), None
    first = lax.slice_in_dim(inner, 0, kept, axis=-2)
    x, z = (lax.slice_in_dim(array, kept, tokens, axis=array.ndim - 2) for array in (x, z))
    rest, _ = _expand(plan, precision, x, kernel, z, lora_b, None, scale, None, False)
    return jnp.asarray(checkpoint_name(first, name)), rest


def _project_fwd(plan, precision, *primals):
    x, kernel, lora_a, lora_b, g, scale, bias, seed = (p if p is None else p.value for p in primals)
    wanted = tuple(p is not None and p.perturbed for p in primals)
    refuse_scale_gradient(wanted[5])
    y, inner, z = _forward(
        plan, precision, x, kernel, lora_a, lora_b, g, scale, bias, seed, want_inner=wanted[4]
    )
    parts = (None, None)
    if inner is not None:
        parts = _named(plan, precision, inner, x, kernel, z, lora_b, scale)
    # What the wanted gradients need, and nothing else.
    _, wants_kernel, wants_a, wants_b = wanted[:4]
    kept = {
        "x": x if wants_a or wants_kernel else None,
        "kernel": kernel,
        "lora_a": lora_a,
        "lora_b": lora_b,
        "z": z if wants_b else None,
        "inner": parts,
        "g": g,
        "scale": scale,
        "seed": seed,
        "like": tuple(None if p is None else witness(p.value, p.perturbed) for p in primals),
    }
    return y, pack(kept)


def _project_bwd(plan, precision, kept, dy):
    if isinstance(dy, SymbolicZero):
        return (None,) * 8
    kept = unpack(kept)
    like_x, like_kernel, like_a, like_b, like_g, _, like_bias, _ = kept["like"]
    dtype = dy.dtype
    dot = functools.partial(_dot, dtype, precision)
    wide = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    rows = tuple(range(dy.ndim - 1))
    scale = kept["scale"].astype(wide)

    def summed(left, right, like):
        """Over rows, which may lie on several devices: then their sums are added up in fp32."""
        partial_sums = wide if device.target().partitioned else like.dtype
        return dot(left, right, (rows, rows), partial_sums).astype(like.dtype)

    d, d_g = dy, None
    if kept["g"] is not None:
        parts = [part for part in kept["inner"] if part is not None]
        inner = lax.concatenate(parts, dy.ndim - 2) if parts else None
        ct = backward(plan.compose, dy, inner, kept["g"], kept["scale"], want_lora=False)
        d, d_g = ct.base, ct.g
    dz = None
    if like_x is not None or like_a is not None:
        dz = (scale * dot(d, kept["lora_b"], (-1, 1), wide)).astype(dtype)
    dx = d_kernel = d_a = d_b = d_bias = None
    if like_x is not None:
        dx = _dx(plan, dot, d, dz, kept).astype(like_x.dtype)
    if like_kernel is not None:
        d_kernel = summed(kept["x"], d, like_kernel)
    if like_a is not None:
        seen = kept["x"].astype(dtype)
        if plan.drops_back == "mosaic":
            d_a = _dropped_product(plan, seen, dz, kept["seed"], transposed=True)
            d_a = d_a.astype(like_a.dtype)
        else:
            if plan.dropout:
                seen = _drop_again(seen, kept["seed"], plan.dropout)
            d_a = summed(seen, dz, like_a)
    if like_b is not None:
        if plan.forward == "project":  # s is in z
            d_b = summed(kept["z"], d, like_b)
        else:
            d_b = (scale * dot(kept["z"], d, (rows, rows), wide)).astype(like_b.dtype)
    if like_bias is not None:
        d_bias = jnp.sum(dy.astype(wide), axis=rows).astype(like_bias.dtype)
    d_g = None if d_g is None else d_g.astype(like_g.dtype)
    return dx, d_kernel, d_a, d_b, d_g, None, d_bias, None


_project.defvjp(_project_fwd, _project_bwd, symbolic_zeros=True)


def _reduce(plan, dot, x, lora_a, seed, result) -> jax.Array:
    """drop(x) A in the dtype `result`."""
    if plan.drops == "mosaic":
        return _dropped_product(plan, x, lora_a, seed, transposed=False).astype(result)
    seen = drop(x, seed, plan.dropout) if plan.dropout else x
    return dot(seen, lora_a, (-1, 0), result)


def _dropped_product(plan, x, right, seed, *, transposed: bool) -> jax.Array:
    """f32: drop(x) A, or drop(x)ᵀ dz if `transposed`."""
    target, shape, rank = device.target(), x.shape, right.shape[-1]
    x = dispatch.on_cuda(x.reshape(-1, shape[-1]), target)
    config = tuning.config(
        target.device_kind,
        "dropped_product_back" if transposed else "dropped_product",
        {"rows": x.shape[0], "in": shape[-1], "rank": rank},
        functools.partial(mosaic_dropped.fits, rank=rank),
    )
    product = mosaic_dropped.dropped_product(
        x,
        right.reshape(-1, rank),
        seed,
        rate=plan.dropout,
        transposed=transposed,
        sm_count=device.sm_count(),
        config=config,
    )
    product = product * jnp.float32(1 / kept_share(plan.dropout))
    return product if transposed else product.reshape(*shape[:-1], rank)


def _dx(plan, dot, d, dz, kept):
    """d Wᵀ + dz Aᵀ, the latter dropped as x was."""
    kernel, lora_a = kept["kernel"], kept["lora_a"]
    if plan.backward == "project":
        target = device.target()
        config = tuning.config(
            target.device_kind,
            "project_back",
            _sizes(d, kernel, lora_a.shape[1]),
            mosaic_projection.fits,
        )
        d = dispatch.on_cuda(d, target)
        return mosaic_projection.project_back(
            d,
            kernel.astype(d.dtype),
            dz,
            lora_a.astype(d.dtype),
            sm_count=device.sm_count(),
            config=config,
        )
    through_adapter = dot(dz, lora_a, (-1, 1))
    if plan.dropout:
        through_adapter = drop(through_adapter, kept["seed"], plan.dropout)
    return dot(d, kernel, (-1, 1)) + through_adapter


def _drop_again(x, seed, rate: float):
    """drop(x), which XLA may not take from the forward pass instead: that would keep it."""
    return drop(*lax.optimization_barrier((x, seed)), rate)


def _result_dtype(x: jax.Array, kernel: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, kernel.dtype)


def _dot(dtype, precision, a, b, axes, result=None):
    """a and b in `dtype`, contracted over `axes`, accumulated in fp32, in `result` or `dtype`."""
    left, right = (
        [axis % operand.ndim for axis in ((ax,) if isinstance(ax, int) else ax)]
        for ax, operand in zip(axes, (a, b), strict=True)
    )
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        ((left, right), ((), ())),
        precision=precision,
        preferred_element_type=result or dtype,
    )
