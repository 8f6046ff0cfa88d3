"""fp32 adapters in pieces that tensor cores multiply: two float16 numbers and a power of two.

    lora_a[k, j] ≈ (high[k, j] + low[k, j]) · unit[j]         lora_b[i, k] likewise, with unit[i]

A float16 number has 11 significant bits, and the second piece holds what the first one leaves: so
the two are within 2⁻²² of lora_a, relative to the largest number of its column, whose exponent sets
the unit. Three products of pieces (high·high, high·low, low·high) then give BA within 3·2⁻²² of
Σ_k |b|max·|a|max; six products of bfloat16 pieces would be needed for the same.

lora_a: [r, in], lora_b: [out, r], fp32; or B and A of the other layout, [r, out] and [in, r]. The
same pass can write both in another dtype too, for the products with activations. Traffic: 4 bytes
read and 6 written per element, a few µs.
"""

import triton.language as tl

from dora_common.triton.jit import cdiv, jit, next_power_of_2

# A program takes whole columns of lora_a, or whole rows of lora_b, and this many elements of them
# at a time, of at most DEPTH along the rank.
ELEMENTS, DEPTH, WARPS = 8192, 1024, 8
# The largest number of a column is scaled to 2¹³ to 2¹⁴: far from float16's largest number, and
# from the smallest one as far as possible.
_EXPONENT = tl.constexpr(13)


@jit
def kernel(
    lora_a_ptr,  # f32[r, in]
    lora_b_ptr,  # f32[out, r]
    a_ptr,  # f16[2, r, in]
    b_ptr,  # f16[2, out, r]
    cast_a_ptr,  # [r, in]
    cast_b_ptr,  # [out, r]
    unit_a_ptr,  # f32[in]
    unit_b_ptr,  # f32[out]
    in_features,
    out_features,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,  # the columns or rows of a program
):
    a_programs = tl.cdiv(in_features, COUNT)
    if tl.program_id(0) < a_programs:
        column = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
        _split(lora_a_ptr, a_ptr, cast_a_ptr, unit_a_ptr, column, in_features, RANK, DEPTH, 0)
    else:
        row = (tl.program_id(0) - a_programs) * COUNT + tl.arange(0, COUNT)
        _split(lora_b_ptr, b_ptr, cast_b_ptr, unit_b_ptr, row, out_features, RANK, DEPTH, 1)


@jit
def _split(
    source_ptr,
    pieces_ptr,
    cast_ptr,
    unit_ptr,
    index,  # [COUNT], the columns of lora_a or the rows of lora_b
    features,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    AXIS: tl.constexpr,  # the axis of the rank
):
    largest = tl.max(tl.abs(_load(source_ptr, index, 0, features, RANK, DEPTH, AXIS)), axis=AXIS)
    for first in range(DEPTH, RANK, DEPTH):
        x = _load(source_ptr, index, first, features, RANK, DEPTH, AXIS)
        largest = tl.maximum(
            largest, tl.max(tl.abs(x), axis=AXIS), propagate_nan=tl.PropagateNan.ALL
        )
    bits = largest.to(tl.int32, bitcast=True)  # pyright: ignore[reportAttributeAccessIssue]
    exponent = (bits >> 23) - 127
    shift = tl.maximum(exponent, -100) - _EXPONENT
    unit = ((shift + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(unit_ptr + index, unit, mask=index < features)
    per_unit = ((127 - shift) << 23).to(tl.float32, bitcast=True).expand_dims(AXIS)
    for first in range(0, RANK, DEPTH):
        offset, mask = _tile(index, first, features, RANK, DEPTH, AXIS)
        x = _load(source_ptr, index, first, features, RANK, DEPTH, AXIS)
        if cast_ptr is not None:
            tl.store(cast_ptr + offset, x.to(cast_ptr.dtype.element_ty), mask=mask)
        high = (x * per_unit).to(tl.float16)
        low = (x * per_unit - high.to(tl.float32)).to(tl.float16)
        tl.store(pieces_ptr + offset, high, mask=mask)
        tl.store(pieces_ptr + tl.cast(features, tl.int64) * RANK + offset, low, mask=mask)


@jit
def _load(
    source_ptr, index, first, features, RANK: tl.constexpr, DEPTH: tl.constexpr, AXIS: tl.constexpr
):
    offset, mask = _tile(index, first, features, RANK, DEPTH, AXIS)
    return tl.load(source_ptr + offset, mask=mask, other=0.0)


@jit
def _tile(index, first, features, RANK: tl.constexpr, DEPTH: tl.constexpr, AXIS: tl.constexpr):
    """Returns the offsets and the mask of a tile: [DEPTH, COUNT] of lora_a, or [COUNT, DEPTH] of
    lora_b."""
    inside = first + tl.arange(0, DEPTH)
    wide, at = index.to(tl.int64).expand_dims(AXIS), inside.to(tl.int64).expand_dims(1 - AXIS)
    offset = at * features + wide if AXIS == 0 else wide * RANK + at
    mask = (index < features).expand_dims(AXIS) & (inside < RANK).expand_dims(1 - AXIS)
    return offset, mask


def programs_of(rank: int, in_features: int, out_features: int) -> tuple[int, dict[str, int]]:
    """Returns the number of programs, and the kernel's constants."""
    depth = min(next_power_of_2(rank), DEPTH)
    count = max(1, ELEMENTS // depth)
    programs = cdiv(in_features, count) + cdiv(out_features, count)
    return programs, {"RANK": rank, "DEPTH": depth, "COUNT": count}
