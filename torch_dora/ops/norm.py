"""The factored norm of an adapted weight, and g = magnitude / norm.

With weight W [out, in], lora_a A [r, in], lora_b B [out, r] and scale s, per output feature
(arXiv 2603.22276, section 3; every sum names its axis):

    ‖W + sBA‖² = Σ_in W² + 2s Σ_r B∘(W Aᵀ) + s² Σ_r (B A Aᵀ)∘B

BA is never formed. All sums accumulate in fp32 (fp64 for fp64 operands). The operands of products
keep their dtypes: see :mod:`torch_dora.ops.products`.
"""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_dora.ops import check, choose, kept_norms, quantised, sharded, shards
from torch_dora.ops.choose import Call
from torch_dora.ops.dtypes import accumulation_dtype, no_autocast
from torch_dora.ops.operator import is_compiled, operator
from torch_dora.ops.products import pieces, product
from torch_dora.ops.shards import place_like

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import norm_assembly, one_pass_norm

# The limit for temporaries of the factored form. It affects the result only through the order of
# fp32 sums.
CHUNK_BYTES = 256 * 2**20
_COLUMN_ALIGNMENT = 64

EPS_FULL = 1e-12
EPS_HALF = 1e-6


def factored_norm(
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Returns ‖weight + scale · lora_b @ lora_a‖ per output feature, without forming the product.

    Args:
        weight: [out, in], fp16, bf16, fp32 or fp64; or quantised by torchao, in int8, fp8 or NF4,
            or by bitsandbytes in 4 bits. A quantised weight is read as codes, or in blocks of rows
            whose floats take at most 128 MiB with their temporaries.
        lora_a: [r, in].
        lora_b: [out, r].
        scale: alpha/r or alpha/sqrt(r). 0 skips the adapter's terms.
        implementation: None, "triton" or "eager"; a named one runs or raises. If the weight is
            half-precision or in 4 bits, "triton" is one pass that computes tiles of W + s·BA in
            registers. Otherwise it is the factored form with its last step in a kernel.

    Returns:
        f32[out] (f64 if an operand is fp64), detached: no gradient flows through the norm (arXiv
        2402.09353, section 4.3). A NaN in the operands gives a NaN. The squares are fp32: a
        norm above 1.8e19 gives inf or NaN, and elements below 1.1e-19 count inexactly or not at
        all.

        For DTensors the result is a DTensor, sharded like the weight's outputs. If the weight's
        inputs are sharded, the processes exchange their sums of squares, [out].

    Raises:
        TypeError, ValueError: an argument's dtype or shape is wrong; unknown implementation.
        NotImplementedError: the named implementation cannot run the call; a DTensor is a pending
            sum.
    """
    weight = quantised.as_matrix(weight)
    quantised.refuse_sharded_codes(weight)
    check.adapter(weight, lora_a, lora_b)
    check.is_scale(scale)
    choose.check_name(implementation)
    detached = lora_a.detach(), lora_b.detach()
    if quantised.is_quantised(weight):
        return _quantised_norm(weight, *detached, float(scale), implementation)
    weight = weight.detach()
    # A kept norm is found by lora_b itself. In a compiled program the operator has no gradient.
    keep = _may_repeat(lora_a, lora_b)
    lora_a, lora_b = (lora_a, lora_b) if keep else detached

    def compute_local(weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        call = _call(weight, weight.dtype, lora_a.dtype, lora_b.dtype)
        chosen = choose.choose(call, implementation, None)
        if chosen == "triton" and one_pass_norm.refuses(call) is None:
            chosen = "one_pass"
        return _factored_norm(weight, lora_a, lora_b, float(scale), chosen, keep)

    return sharded.norm(compute_local, _sqrt, weight, lora_a, lora_b)


def magnitude_scale(magnitude: Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns g = magnitude / max(norm, eps): one number per output feature, in fp32.

    Args:
        magnitude: [out], any float dtype.
        norm: f32[out] from :func:`factored_norm`; constant under differentiation. If magnitude is a
            DTensor, a DTensor too, or the full norm in every process.
        dtype: the dtype of the layer's result, which sets eps: 1e-6 for bf16 and fp16, else 1e-12.

    Returns:
        f32[out] (f64 if ``dtype`` is fp64); dg/dmagnitude = 1 / max(norm, eps). A zero norm gives a
        finite g; a NaN gives a NaN.

    Raises:
        TypeError, ValueError: a dtype is not a float dtype, or the two shapes differ.
    """
    check.is_float("magnitude", magnitude)
    check.is_float("norm", norm)
    check.has_shape("magnitude", magnitude, (None,), "[out]")
    check.has_shape("norm", norm, tuple(magnitude.shape), "[out]")
    check.is_float_dtype("dtype", dtype)
    result = torch.float64 if dtype == torch.float64 else torch.float32
    norm = place_like(norm, magnitude)
    return magnitude.to(result) / norm.detach().to(result).clamp(min=eps_of(dtype))


def adapted_scale(
    weight: Any,
    lora_a: Tensor,
    lora_b: Tensor,
    magnitude: Tensor,
    scale: float,
    dtype: torch.dtype,
    implementation: str | None,
) -> Tensor:
    """Returns :func:`magnitude_scale` for the norm that :func:`factored_norm` computes. In compiled
    inference the norm's last kernel computes g, too."""
    tensors = weight, lora_a, lora_b, magnitude
    if _is_one_kernel(tensors, scale, dtype, implementation):
        return _one_pass_scale(*tensors, float(scale), eps_of(dtype))
    norm = factored_norm(weight, lora_a, lora_b, scale, implementation=implementation)
    return magnitude_scale(magnitude, norm, dtype)


def _is_one_kernel(
    tensors: tuple[Any, ...], scale: float, dtype: torch.dtype, implementation: str | None
) -> bool:
    """Returns whether a compiled program without a gradient computes the norm in one pass."""
    weight, lora_a, lora_b, magnitude = tensors
    if not is_compiled() or quantised.is_quantised(weight) or shards.is_sharded(*tensors):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if scale == 0 or not weight.numel() or torch.float64 in (magnitude.dtype, dtype):
        return False
    call = _call(weight, weight.dtype, lora_a.dtype, lora_b.dtype)
    chosen = choose.choose(call, implementation, None)
    return chosen == "triton" and one_pass_norm.refuses(call) is None


@operator("torch_dora::one_pass_scale")
def _one_pass_scale(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, magnitude: Tensor, scale: float, eps: float
) -> Tensor:
    return one_pass_norm.launch(weight, lora_a, lora_b, scale, magnitude=magnitude, eps=eps)[1]


@_one_pass_scale.fake
def _(weight, lora_a, lora_b, magnitude, scale, eps):
    return weight.new_empty((2, weight.shape[0]), dtype=torch.float32)[1]


def eps_of(dtype: torch.dtype) -> float:
    """Returns the smallest divisor of a magnitude, for a layer whose result has ``dtype``."""
    return EPS_FULL if dtype in (torch.float32, torch.float64) else EPS_HALF


def _call(weight: Any, *dtypes: torch.dtype) -> Call:
    """Returns the facts that decide which implementation computes the norm of a weight."""
    return Call(
        rows=weight.shape[1],
        features=weight.shape[0],
        dtypes=dtypes,
        device=weight.device.type,
        transformed=choose.in_transform(),
    )


def _quantised_norm(
    weight: Any, lora_a: Tensor, lora_b: Tensor, scale: float, implementation: str | None
) -> Tensor:
    chosen = "eager"
    if quantised.has_codes(weight):
        call = _call(weight, lora_a.dtype, lora_b.dtype)
        chosen = choose.choose(call, implementation, None)
    elif implementation == "triton":
        raise NotImplementedError(
            f"implementation 'triton' accepts no {type(weight).__name__} of shape "
            f"{tuple(weight.shape)}: it reads 4-bit codes, an even number of them in each row "
            "and each run; pass None or 'eager'"
        )
    with no_autocast(weight):
        if chosen == "triton":
            if scale == 0:
                # The kernel would still multiply NaN and infinity in the adapter by 0.
                lora_a, lora_b = torch.zeros_like(lora_a), torch.zeros_like(lora_b)
            return _norm_of_codes(*quantised.codes(weight), lora_a, lora_b, scale)
        return quantised.norm(weight, lora_a, lora_b, scale, accumulation_dtype(lora_a, lora_b))


@operator("torch_dora::norm_of_codes")
def _norm_of_codes(
    packed: Tensor,
    levels: Tensor,
    scales: Tensor,
    run: int,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
) -> Tensor:
    dtype = torch.promote_types(lora_a.dtype, lora_b.dtype)
    codes = quantised.Codes(packed, levels, scales, run)
    return one_pass_norm.launch(codes, lora_a.to(dtype), lora_b.to(dtype), scale)


@_norm_of_codes.fake
def _(packed, levels, scales, run, lora_a, lora_b, scale):
    return scales.new_empty(lora_b.shape[0])


@_norm_of_codes.count
def _(packed, levels, scales, run, lora_a, lora_b, *_, **__):
    return 2 * math.prod(lora_a) * lora_b[0]


# This must be a separate operator, opaque to torch.compile: a compiler that keeps intermediates in
# fp32 would undo the rounding that splits an fp32 operand into bf16 pieces.
@operator("torch_dora::factored_norm")
def _factored_norm(
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    implementation: str,
    keep: bool = False,
) -> Tensor:
    if keep:
        operands, constants = (weight, lora_a, lora_b), (scale, implementation)
        compute = functools.partial(_factored_norm.function, *operands, *constants)
        return kept_norms.kept(compute, operands, constants)
    if implementation == "one_pass" and scale != 0:
        return one_pass_norm.launch(weight, lora_a, lora_b, scale)
    dtype = accumulation_dtype(weight, lora_a, lora_b)
    if not weight.numel():  # for example, this process has no rows of a sharded weight
        return weight.new_zeros(weight.shape[0], dtype=dtype)
    with no_autocast(weight):
        base_sq = _squared_norm(weight, dtype)
        cross = ba_sq = torch.zeros_like(base_sq)
        if scale != 0:
            cross, ba_sq = _adapter_terms(weight, lora_a, lora_b, dtype)
        assemble = assemble_norm if implementation == "eager" else norm_assembly.launch
        return assemble(base_sq, cross, ba_sq, scale)


def _examples(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Tensor, int]:
    """Calls the operator once for each example."""
    pairs = list(zip(arguments, in_dims, strict=True))
    results = [
        _factored_norm(
            *(argument if dim is None else argument.select(dim, at) for argument, dim in pairs)
        )
        for at in range(info.batch_size)
    ]
    return torch.stack(results), 0


torch.library.register_vmap(_factored_norm.op, _examples)


@_factored_norm.fake
def _(weight, lora_a, lora_b, scale, implementation, keep=False):
    return weight.new_empty(weight.shape[0], dtype=accumulation_dtype(weight, lora_a, lora_b))


@_factored_norm.count
def _(weight, lora_a, lora_b, scale, implementation, *_, **__):
    (out_features, in_features), rank = weight, lora_a[0]
    small = 0 if implementation == "one_pass" else rank * (in_features + out_features)
    return 2 * rank * (out_features * in_features + small) if scale != 0 else 0


@_factored_norm.define
def _definition(
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    implementation: str,
    keep: bool = False,
) -> Tensor:
    dtype = accumulation_dtype(weight, lora_a, lora_b)
    weight, lora_a, lora_b = (operand.to(dtype) for operand in (weight, lora_a, lora_b))
    cross = (lora_b * (weight @ lora_a.T)).sum(1)
    ba_sq = (lora_b * (lora_b @ (lora_a @ lora_a.T))).sum(1)
    return assemble_norm(weight.square().sum(1), cross, ba_sq, scale)


def _may_repeat(lora_a: Tensor, lora_b: Tensor) -> bool:
    """Returns whether a compiled program computes the norm for a gradient: checkpointing may call
    it again. Eager calls of :mod:`torch_dora.ops.direct` keep theirs by themselves."""
    has_gradient = torch.is_grad_enabled() and (lora_a.requires_grad or lora_b.requires_grad)
    return is_compiled() and has_gradient and not choose.in_transform()


def _squared_norm(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns Σ_in weight² per output feature: [out], accumulated in ``dtype``."""
    if weight.device.type == "cuda" or weight.dtype == dtype:
        # The reduction converts while it reads, so no converted copy of the weight is created.
        return torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
    height = max(1, CHUNK_BYTES // max(1, weight.shape[1] * dtype.itemsize))
    return torch.cat(
        [torch.linalg.vector_norm(rows.to(dtype), dim=1).square() for rows in weight.split(height)]
    )


def assemble_norm(base_sq: Tensor, cross: Tensor, ba_sq: Tensor, scale: float) -> Tensor:
    """Returns √max(base_sq + 2·scale·cross + scale²·ba_sq, 0) for three [out]; a NaN stays a
    NaN."""
    return _sqrt((base_sq + (2 * scale) * cross + (scale * scale) * ba_sq).clamp(min=0))


def _sqrt(x: Tensor) -> Tensor:
    """Returns the correctly rounded square root, on a CPU through fp64: there torch's fp32 root is
    sometimes one unit in the last place off."""
    return x.double().sqrt().to(x.dtype) if x.device.type == "cpu" else x.sqrt()


def _adapter_terms(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns Σ_r B∘(W Aᵀ) and Σ_r (B A Aᵀ)∘B, [out] each, in tiles within the memory budget: both
    are linear in each slab of input features, so a tile's [height, r] product is reduced at once.
    """
    out_features, in_features = weight.shape
    rank = lora_a.shape[0]
    width, height = _tile(weight, lora_a, lora_b, dtype)
    cross = weight.new_zeros(out_features, dtype=dtype)
    ba_sq = weight.new_zeros(out_features, dtype=dtype)
    gram = weight.new_zeros(rank, rank, dtype=dtype)
    for first in range(0, in_features, width):
        slab = lora_a[:, first : first + width]
        gram += product(slab, slab.T, dtype)
        for top in range(0, out_features, height):
            rows = slice(top, top + height)
            u = product(weight[rows, first : first + width], slab.T, dtype)
            cross[rows] += (u.mul_(lora_b[rows])).sum(1)
    for top in range(0, out_features, height):
        rows = slice(top, top + height)
        ba_sq[rows] = product(lora_b[rows], gram, dtype).mul_(lora_b[rows]).sum(1)
    return cross, ba_sq


def _tile(weight: Tensor, lora_a: Tensor, lora_b: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the number of input features of a slab of A, and the number of output features of a
    tile; each gets half of the budget."""
    out_features, in_features = weight.shape
    rank = lora_a.shape[0]
    w_bytes, a_bytes = _operand_bytes(weight, lora_a, dtype), _operand_bytes(lora_a, weight, dtype)
    # Per element of a product [., r]: up to six terms of pieces, their partial sum and the next
    # one, and the result.
    product_bytes = 9 * dtype.itemsize
    row_bytes = rank * (product_bytes + _operand_bytes(lora_b, lora_a, dtype))
    gram_bytes = rank * rank * product_bytes
    narrowest = min(in_features, _COLUMN_ALIGNMENT)
    least = gram_bytes + 2 * max(narrowest * rank * 2 * a_bytes, narrowest * w_bytes + row_bytes)
    budget = max(CHUNK_BYTES, least)
    half = (budget - gram_bytes) // 2
    width = in_features
    if a_bytes:
        width = min(width, half // (rank * 2 * a_bytes))
    if w_bytes:
        # Prefer many rows of part of a wide weight to one full row.
        share = (half - row_bytes) // (2 * w_bytes * min(out_features, 64))
        width = min(width, max(narrowest, share))
    if width < in_features:
        width -= width % narrowest
    return width, min(out_features, half // (width * w_bytes + row_bytes))


def _operand_bytes(tensor: Tensor, other: Tensor, dtype: torch.dtype) -> int:
    """Returns the bytes of temporaries per element of ``tensor`` in a product with ``other``."""
    if dtype == torch.float64 or tensor.device.type != "cuda":
        return 0 if tensor.dtype == dtype == other.dtype else dtype.itemsize
    if tensor.dtype == other.dtype != torch.float32:
        return 0
    # The bf16 pieces exist twice, separately and concatenated; added to this is the remainder to be
    # split.
    return 0 if pieces(tensor) == 1 else 4 * pieces(tensor) + 2 * dtype.itemsize
