"""A layer's whole result for few tokens, as in :mod:`torch_dora.vllm.product`, in segments:

    y = g[slot] ∘ (x Wᵀ) + bias + z B[slot],  z = x A[slot]ᵀ

cuBLAS sums the products of a result in the order of the inputs, in fp32; for some shapes in a few
segments, whose sums are added in turn. So do the kernels here and in `product`, and
:func:`find_segments` finds out in how many, by comparing bits.

In segments, for more than 16 tokens, two kernels compute a layer, as cuBLAS's do. In the first one,
some programs compute parts of z, and each of the others the sum of a segment for a block of
outputs. The second one is launched while the first ends, and adds the sums in their order, and the
adapters' part.

Traffic: that of `product`, and the sums of segments once each way.
"""

import functools
import logging
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from dora_common.triton.jit import WIDEN, bound, cdiv, next_power_of_2
from torch_dora.ops.triton.jit import launch_kernel
from torch_dora.vllm import batch, product, shrink
from torch_dora.vllm.product import COLUMNS, Adapters

SEGMENTS = range(1, 9)  # that are looked for
ROWS = 64
FEW_TOKENS = 16  # for so many, one program sums all segments
TILE = 16  # tokens of a program that adds
_ROWS_AT_A_TIME = 64
# As in `product`, with a depth that divides all segments.
ALONE = product.Config(64, 12)
SHARED = product.Config(64, 6)


@triton.jit(do_not_specialize=["tokens", "tiles", "shrinking", "segment", "segments"])
def _sum_kernel(
    weight,  # [out, in], in blocks [COLUMNS, DEPTH]
    x,  # [tokens, in], in blocks [ROWS, DEPTH]
    x_ptr,
    a_ptr,  # [slots, RANKS, in]
    tiles_ptr,  # i32[tiles, HEAD + TILE]
    parts_ptr,  # f32[SPLITS, tokens, RANKS]
    sums_ptr,  # f32[segments, tokens, out]
    tokens,
    inputs,
    features,
    tiles,
    segment,  # inputs of a segment
    segments,
    shrinking,  # programs that compute z
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    RANKS: tl.constexpr,  # of all projections
    MAX_RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    TILE: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    LANE_DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    STARTS_NEXT: tl.constexpr,
):
    program = tl.program_id(0)
    if program < shrinking:
        if STARTS_NEXT:
            cuda.gdc_launch_dependents()
        shrink.multiply_tiles(
            x_ptr, a_ptr, tiles_ptr, parts_ptr, program, shrinking, tokens, inputs, tiles, SPLITS,
            CHUNK, CHUNK, PROJECTIONS, RANKS // PROJECTIONS, MAX_RANK, PADDED_RANK, TILE, LANES,
            LANE_DEPTH, HEAD, False,
        )  # fmt: skip
    else:
        block = (program - shrinking) // segments
        part = (program - shrinking) % segments
        begin = part * segment
        end = tl.minimum(begin + segment, inputs)
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for k in tl.range(bound(begin), bound(end), DEPTH, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            w = weight.load([block * COLUMNS, k])
            inner = x.load([0, k])
            if WIDEN:
                w, inner = w.to(tl.float32), inner.to(tl.float32)
            total = tl.dot(w, inner.T, total)
        if STARTS_NEXT:
            # All programs run by now. Those of the next kernel, which wait, take no one's place.
            cuda.gdc_launch_dependents()
        column = block * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        token = tl.arange(0, ROWS)[None, :]
        row = (part * tokens + token).to(tl.int64)
        tl.store(sums_ptr + (row * features + column), total, mask=token < tokens)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _add_kernel(
    sums_ptr,  # f32[SEGMENTS, tokens, out]
    parts_ptr,  # f32[SPLITS, tokens, RANKS]
    b_ptr,  # [slots, out, MAX_RANK]
    g_ptr,  # f32[slots + 1, out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    y_ptr,  # [tokens, out]
    slots_ptr,  # i32[tokens]
    used_ptr,  # i32[1 + slots, 2]: how many the batch has; then they and their ranks
    blocks_ptr,  # i32[blocks], the projection of each block
    tokens,
    features,
    blocks,
    SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,  # whose B is read at a time
    OVERLAPS: tl.constexpr,
):
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    row_mask = token < tokens
    slot = tl.load(slots_ptr + token, mask=row_mask, other=-1)[None, :]
    projection = tl.load(blocks_ptr + block)
    used = tl.load(used_ptr)
    given = product.load_slots(
        b_ptr, g_ptr, used_ptr, 0, used, column, features, MAX_RANK, PADDED_RANK, SLOTS
    )
    if OVERLAPS:
        cuda.gdc_wait()
    split = tl.arange(0, PADDED_SPLITS)[:, None, None]
    r = tl.arange(0, PADDED_RANK)[None, :, None]
    source = parts_ptr + projection * MAX_RANK + (split * tokens + token[None, None, :]) * RANKS + r
    mask = (split < SPLITS) & (r < MAX_RANK) & (slot >= 0)[None, :, :]
    z = tl.sum(tl.load(source, mask=mask, other=0.0), 0).to(b_ptr.dtype.element_ty)
    target = token[None, :].to(tl.int64) * features + column[:, None]  # [COLUMNS, TILE]
    total = tl.zeros((COLUMNS, TILE), tl.float32)
    for part in tl.static_range(SEGMENTS):  # pyright: ignore[reportGeneralTypeIssues]
        sums = sums_ptr + part * tokens.to(tl.int64) * features
        total += tl.load(sums + target, mask=row_mask[None, :], other=0.0)
    y = total
    for number in tl.range(0, bound(used), SLOTS, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        more = product.load_slots(
            b_ptr, g_ptr, used_ptr, number + SLOTS, used, column, features, MAX_RANK,
            PADDED_RANK, SLOTS,
        )  # fmt: skip
        y = product.with_slots(y, total, z, slot, number, used, given, SLOTS)
        given = more
    if HAS_BIAS:
        y += tl.load(bias_ptr + column).to(tl.float32)[:, None]
    tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty), mask=row_mask[None, :])


_FOUND: dict[Any, int] = {}
_LOG = logging.getLogger(__name__)


def segments_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """Returns in how many segments cuBLAS sums products of such shapes; 0 if in other ways, or if
    :func:`find_segments` has not found it out."""
    return _FOUND.get((len(x), *_kind(weight, bias)), 0)


def _kind(weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    return weight.device, *weight.shape, weight.dtype, bias is None


def launch_some(weight: Tensor, bias: Tensor | None, adapters: Adapters, most: int) -> None:
    """Launches the kernels that :func:`find_segments` asks, without finding out anything."""
    for tokens in {min(FEW_TOKENS, most), most}:
        for segments in (1, 2):
            if tokens > FEW_TOKENS or product.segment_of(weight.shape[1], segments) % 128 == 0:
                _base(weight.new_empty(tokens, weight.shape[1]), weight, bias, segments, adapters)


def find_segments(weight: Tensor, bias: Tensor | None, adapters: Adapters, most: int) -> None:
    """Finds out in how many segments cuBLAS sums such a layer's products, for each number of tokens
    up to ``most``, by comparing bits for tokens without an adapter.

    This takes the memory of another such weight for a moment. Where there is none, layers are
    computed as if cuBLAS summed in other ways.
    """
    kind = _kind(weight, bias)
    counts = [count for count in range(1, most + 1) if (count, *kind) not in _FOUND]
    if not counts:
        return
    adapters = adapters._replace(
        tiles=torch.zeros_like(adapters.tiles),
        slots=torch.full_like(adapters.slots, -1),
        used=torch.zeros_like(adapters.used),
    )
    try:
        x, weight, bias = _operands_that_tell(most, weight, bias)
        for count in counts:
            _FOUND[count, *kind] = _segments_of(x[:count], weight, bias, adapters)
    except torch.OutOfMemoryError:
        _LOG.warning(
            "there is not enough memory left to find out how cuBLAS multiplies %s by a weight of "
            "%s: steps with few tokens are computed in a slower way",
            weight.dtype,
            list(weight.shape),
        )


def _segments_of(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters) -> int:
    operands = x, weight, bias
    expected = nn.functional.linear(*operands)
    ways = dict.fromkeys(cdiv(x.shape[1], product.segment_of(x.shape[1], one)) for one in SEGMENTS)
    if len(x) <= FEW_TOKENS:
        ways = (one for one in ways if one == 1 or product.segment_of(x.shape[1], one) % 128 == 0)
    same = (one for one in ways if torch.equal(_base(*operands, one, adapters), expected))
    return next(same, 0)


def _base(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: int, adapters: Adapters
) -> Tensor:
    """Returns what :func:`launch` does without adapters in the batch. It launches kernels that are
    the same for any number of segments: the one that adds takes a second to compile for each."""
    if segments == 1 or len(x) <= FEW_TOKENS:
        return launch(x, weight, bias, segments, adapters)
    y = functools.reduce(torch.add, _sum(x, weight, segments, adapters)[0])
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _operands_that_tell(
    tokens: int, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns random operands of such shapes, whose exact results are the bias, which is small.

    A result is what was rounded in its sum then, and differs with the way to sum. Of other numbers,
    such as a layer's own, these bits are lost when the result is rounded to half precision; and
    zeros, or NaN, are alike in all ways.
    """
    generator = torch.Generator(weight.device).manual_seed(0)
    half = weight.shape[1] // 2
    x, weight = weight.new_empty(tokens, 2 * half), torch.empty_like(weight)
    for one, sign in ((x, -1), (weight, 1)):
        one.normal_(generator=generator)
        # In pieces, since each of them takes memory of its own.
        for rows in one.split(_ROWS_AT_A_TIME):
            rows[:, half:] = sign * rows[:, :half].flip(1)
    if bias is not None:
        bias = torch.empty_like(bias).normal_(std=2**-16, generator=generator)
    return x, weight, bias


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: int, adapters: Adapters
) -> Tensor:
    """Returns y, whose products are summed in so many segments."""
    if segments == 1 or len(x) <= FEW_TOKENS:
        return product.launch(x, weight, bias, segments, adapters)
    return launch_two(x, weight, bias, segments, adapters)


def launch_two(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: int, adapters: Adapters
) -> Tensor:
    """The same, always by two kernels."""
    tokens, features = len(x), len(weight)
    blocks = features // COLUMNS
    sums, parts = _sum(x, weight, segments, adapters)
    overlaps = shrink.can_overlap(x.device)
    y = x.new_empty(tokens, features)
    max_rank = adapters.lora_b.shape[2]
    launch_kernel(
        _add_kernel,
        (blocks * cdiv(tokens, TILE),),
        *(sums, parts, adapters.lora_b, adapters.g, y if bias is None else bias, y),
        *(adapters.slots, adapters.used, adapters.blocks),
        *(tokens, features, blocks),
        SEGMENTS=segments,
        PADDED_SPLITS=next_power_of_2(len(parts)),
        HAS_BIAS=bias is not None,
        TILE=TILE,
        SLOTS=4 if max_rank <= 16 else 1,
        OVERLAPS=overlaps,
        num_warps=4,
        num_stages=1,
        launch_pdl=overlaps,
        **_constants(parts, max_rank),
    )
    return y


def _sum(x: Tensor, weight: Tensor, segments: int, adapters: Adapters) -> tuple[Tensor, Tensor]:
    """Returns the sums of the segments, f32[segments, tokens, out], and the parts of z."""
    tokens, inputs = x.shape
    features = len(weight)
    blocks = features // COLUMNS
    is_alone = blocks * segments <= product.processors(x.device)
    config = ALONE if is_alone else SHARED
    slots, ranks, _ = adapters.lora_a.shape
    max_rank = adapters.lora_b.shape[2]
    tiles = min(len(adapters.tiles), batch.most_tiles(tokens, slots, batch.SMALL))
    chunk, splits = shrink.parts_of(inputs, shrink.BESIDE)
    projections = ranks // max_rank
    shrinking = max(1, min(tiles * projections * splits, product.PROGRAMS))
    parts = torch.empty(splits, tokens, ranks, dtype=torch.float32, device=x.device)
    sums = torch.empty(segments, tokens, features, dtype=torch.float32, device=x.device)
    launch_kernel(
        _sum_kernel,
        (shrinking + blocks * segments,),
        TensorDescriptor.from_tensor(weight, [COLUMNS, config.depth]),
        TensorDescriptor.from_tensor(x, [ROWS, config.depth]),
        *(x, adapters.lora_a, adapters.tiles, parts, sums),
        *(tokens, inputs, features, tiles, product.segment_of(inputs, segments)),
        *(segments, shrinking),
        CHUNK=chunk,
        PROJECTIONS=projections,
        TILE=batch.SMALL,
        HEAD=batch.HEAD,
        LANES=shrink.BESIDE.lanes,
        LANE_DEPTH=shrink.BESIDE.depth,
        ROWS=ROWS,
        DEPTH=config.depth,
        STAGES=config.stages,
        STARTS_NEXT=shrink.can_overlap(x.device),
        num_warps=config.warps,
        num_stages=product.shrink_stages(max_rank),
        **_constants(parts, max_rank),
    )
    return sums, parts


def _constants(parts: Tensor, max_rank: int) -> dict[str, Any]:
    splits, _, ranks = parts.shape
    return {
        "SPLITS": splits,
        "RANKS": ranks,
        "MAX_RANK": max_rank,
        "PADDED_RANK": max(16, next_power_of_2(max_rank)),
        "COLUMNS": COLUMNS,
    }
