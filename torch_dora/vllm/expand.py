"""Adds the part of the adapters to a base layer's result, in one pass over it:

    y = g[slot] ∘ (y - bias) + bias + z B[slot]

y: [tokens, out] in place, its rows contiguous, and B: [slots, out, max_rank], already multiplied by
g and s, both fp16 or bf16; z: f32[splits, tokens, ranks], as parts that are added here, with the
ranks of the projections of a packed layer side by side, rounded to B's dtype; g: f32[slots + 1,
out]; bias: [out]. Tokens without an adapter are neither read nor written.

Traffic: y of the tokens with an adapter once each way; B once for every tile of its slot; the parts
once for every block of outputs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from dora_common.triton.jit import WIDEN, bound, jit, next_power_of_2
from torch_dora.ops.triton.jit import launch_kernel
from torch_dora.vllm import batch, shrink


@dataclasses.dataclass(frozen=True)
class Config:
    """A program computes a block of outputs of a tile, then another block.

    Attributes:
        blocks: outputs of a block, for layers of at least so many outputs.
        programs: the most programs.
        columns: outputs at a time.
    """

    blocks: dict[int, int]
    programs: int
    columns: int = 128
    warps: int = 4

    def width(self, features: int) -> int:
        """Returns the outputs of a block of a layer with so many outputs."""
        return next(width for least, width in self.blocks.items() if features >= least)


# Each block adds the parts of z again, which wide layers would do most often.
SMALL = Config(blocks={16384: 512, 0: 128}, programs=1056)
LARGE = Config(blocks={0: 512}, programs=65536)


def unit_of(sizes: Sequence[int]) -> int:
    """Returns the number of outputs in which blocks are counted, for projections of such sizes.
    The compiler knows from it that addresses are aligned."""
    return 16 if all(size % 16 == 0 for size in sizes) else 1


def column_blocks(config: Config, sizes: Sequence[int], device: torch.device | str) -> Tensor:
    """Returns i32[blocks, 4]: the projection of each block of outputs, its begin and its end."""
    unit, blocks, begin, width = unit_of(sizes), [], 0, config.width(sum(sizes))
    for projection, size in enumerate(sizes):
        end = begin + size
        for first in range(begin, end, width):
            last = min(end, first + width)
            blocks.append((projection, first // unit, last // unit, 0))
        begin = end
    return torch.tensor(blocks, dtype=torch.int32, device=device).view(-1, 4)


@jit
def _load_item(
    tiles_ptr, blocks_ptr, item, tiles, blocks, ROWS: tl.constexpr, HEAD: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Returns the slot of a tile, its rank, its tokens [ROWS] and the first of them, and the
    projection of a block of outputs, its begin and its end.

    All are read at once, since one read after the other would take twice as long. Without a mask
    the compiler would move some behind those that the loop waits for."""
    number = item // blocks
    slot, rank, tokens = shrink.load_tile(tiles_ptr, number, tiles, ROWS, HEAD)
    first = tl.load(tiles_ptr + (HEAD + ROWS) * number + HEAD, mask=number < tiles, other=0)
    block = blocks_ptr + 4 * (item % blocks)
    projection = tl.load(block, mask=number < tiles, other=0)
    begin = tl.load(block + 1, mask=number < tiles, other=0) * UNIT
    end = tl.load(block + 2, mask=number < tiles, other=0) * UNIT
    return slot, rank, tokens, first, projection, begin, end


@jit
def _has_rank(r, rank, MAX_RANK: tl.constexpr):
    """Returns which ranks of B are read: in steps of 16, so that those of an output are read
    together. B is zero beyond the adapter's."""
    return (r < MAX_RANK) & (r // 16 * 16 < rank)


@jit
def _only(x):
    """Returns x[0] of x [1, ...]."""
    return tl.sum(x.to(tl.float32), 0).to(x.dtype)


@jit
def _result(y, z, b, g, bias, HAS_BIAS: tl.constexpr):
    """Returns the equation's result in fp32, for z [ROWS, ranks] and b [ranks, COLUMNS]."""
    if WIDEN:
        z, b = z.to(tl.float32), b.to(tl.float32)
    added = tl.dot(z, b)
    y = y.to(tl.float32)
    if HAS_BIAS:
        bias = bias.to(tl.float32)
        return g * (y - bias) + bias + added
    return g * y + added


@jit
def _read(
    y_ptr, b_ptr, g_ptr, bias_ptr, token, slot, rank, begin, end, y_stride, features,
    MAX_RANK: tl.constexpr, PADDED_RANK: tl.constexpr, HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Begins to read y [1, ROWS, COLUMNS], B [1, PADDED_RANK, COLUMNS], and g and the bias
    [1, 1, COLUMNS], for tokens [1, ROWS, 1].

    Triton changes the layout of numbers where it reads them, and waits for them there, unless a sum
    comes first, here of one summand: `_only`."""
    column = tl.arange(0, COLUMNS)[None, None, :]
    r = tl.arange(0, PADDED_RANK)
    inside = column < end - begin
    y = tl.load(y_ptr + begin + (token * y_stride + column), mask=inside, other=0.0)
    start = slot * features + begin
    g = tl.load(g_ptr + start + column, mask=inside, other=0.0)
    b = tl.load(
        b_ptr + start * MAX_RANK + (column * MAX_RANK + r[None, :, None]),
        mask=_has_rank(r, rank, MAX_RANK)[None, :, None] & inside,
        other=0.0,
    )
    bias = g
    if HAS_BIAS:
        bias = tl.load(bias_ptr + begin + column, mask=inside, other=0.0)
    return y, b, g, bias


@triton.jit(do_not_specialize=["tokens", "tiles", "blocks"])
def _small_kernel(
    y_ptr,  # [tokens, out], its rows y_stride apart
    parts_ptr,  # f32[SPLITS, tokens, RANKS]
    b_ptr,  # [slots, out, MAX_RANK]
    g_ptr,  # f32[slots + 1, out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    blocks_ptr,  # i32[blocks, 4]
    tiles_ptr,  # i32[tiles, HEAD + ROWS]
    tokens,
    features,
    y_stride,
    tiles,
    blocks,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,  # of COLUMNS in a block
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    item = tl.program_id(0)
    slot, rank, row, first, projection, begin, end = _load_item(
        tiles_ptr, blocks_ptr, item, tiles, blocks, ROWS, HEAD, UNIT
    )
    split = tl.arange(0, PADDED_SPLITS)[:, None, None]  # [PADDED_SPLITS, 1, 1]
    r = tl.arange(0, PADDED_RANK)  # [PADDED_RANK]
    column = tl.arange(0, COLUMNS)[None, None, :]  # [1, 1, COLUMNS]
    while rank > 0:
        if OVERLAPS:
            # The kernels before this one have written y and the parts.
            cuda.gdc_wait()
        # In place of tokens that the tile lacks, the first one is read.
        token = tl.where(row >= 0, row, first)[None, :, None]  # [1, ROWS, 1]
        parts = tl.load(
            parts_ptr + projection * MAX_RANK
            + ((split * tokens + token) * RANKS + r[None, None, :]),
            mask=(split < SPLITS) & (r < MAX_RANK)[None, None, :],
            other=0.0,
        )  # fmt: skip
        y, b, g, bias = _read(
            y_ptr, b_ptr, g_ptr, bias_ptr, token, slot, rank, begin, end, y_stride, features,
            MAX_RANK, PADDED_RANK, HAS_BIAS, COLUMNS,
        )  # fmt: skip
        z = tl.sum(parts, 0).to(b_ptr.dtype.element_ty)
        item += tl.num_programs(0)
        next_slot, next_rank, next_row, first, projection, next_begin, next_end = _load_item(
            tiles_ptr, blocks_ptr, item, tiles, blocks, ROWS, HEAD, UNIT
        )
        for step in tl.static_range(STEPS):  # pyright: ignore[reportGeneralTypeIssues]
            next_y, next_b, next_g, next_bias = y, b, g, bias
            after = begin + COLUMNS
            if step + 1 < STEPS:
                next_y, next_b, next_g, next_bias = _read(
                    y_ptr, b_ptr, g_ptr, bias_ptr, token, slot, rank, after, end, y_stride,
                    features, MAX_RANK, PADDED_RANK, HAS_BIAS, COLUMNS,
                )  # fmt: skip
            result = _result(_only(y), z, _only(b), _only(g), _only(bias), HAS_BIAS)
            tl.store(
                y_ptr + begin + (token * y_stride + column),
                result.to(y_ptr.dtype.element_ty)[None, :, :],
                mask=(row >= 0)[None, :, None] & (column < end - begin),
            )
            y, b, g, bias, begin = next_y, next_b, next_g, next_bias, after
        slot, rank, row, begin, end = next_slot, next_rank, next_row, next_begin, next_end


@triton.jit(do_not_specialize=["tokens", "tiles", "blocks", "splits"])
def _large_kernel(
    y_ptr,  # [tokens, out], its rows y_stride apart
    parts_ptr,  # f32[splits, tokens, RANKS]
    b_ptr,  # [slots, out, MAX_RANK]
    g_ptr,  # f32[slots + 1, out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    blocks_ptr,  # i32[blocks, 4]
    tiles_ptr,  # i32[tiles, HEAD + ROWS]
    tokens,
    features,
    y_stride,
    tiles,
    blocks,
    splits,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,  # of COLUMNS in a block
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
):
    item = tl.program_id(0)
    slot, rank, row, _, projection, begin, end = _load_item(
        tiles_ptr, blocks_ptr, item, tiles, blocks, ROWS, HEAD, UNIT
    )
    r = tl.arange(0, PADDED_RANK)  # [PADDED_RANK]
    while rank > 0:
        has_token, token = (row >= 0)[:, None], row[:, None].to(tl.int64)  # [ROWS, 1]
        source = parts_ptr + token * RANKS + projection * MAX_RANK + r[None, :]
        z = tl.zeros((ROWS, PADDED_RANK), tl.float32)
        for split in range(bound(splits)):
            z += tl.load(
                source + split * tokens * RANKS,
                mask=has_token & (r < MAX_RANK)[None, :],
                other=0.0,
            )
        z = z.to(b_ptr.dtype.element_ty)
        has_rank = _has_rank(r, rank, MAX_RANK)
        for step in range(STEPS):
            column = begin + step * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
            inside = column < end
            target = y_ptr + token * y_stride + column[None, :]
            mask = has_token & inside[None, :]
            y = tl.load(target, mask=mask, other=0.0)
            g = tl.load(g_ptr + slot * features + column, mask=inside, other=0.0)[None, :]
            b = tl.load(
                b_ptr + (slot * features + column[None, :]) * MAX_RANK + r[:, None],
                mask=has_rank[:, None] & inside[None, :],
                other=0.0,
            )
            bias = g
            if HAS_BIAS:
                bias = tl.load(bias_ptr + column, mask=inside, other=0.0)[None, :]
            result = _result(y, z, b, g, bias, HAS_BIAS)
            tl.store(target, result.to(y_ptr.dtype.element_ty), mask=mask)
        item += tl.num_programs(0)
        slot, rank, row, _, projection, begin, end = _load_item(
            tiles_ptr, blocks_ptr, item, tiles, blocks, ROWS, HEAD, UNIT
        )


def launch(
    y: Tensor,
    parts: Tensor,
    lora_b: Tensor,
    g: Tensor,
    bias: Tensor | None,
    blocks: Tensor,
    unit: int,
    tiles: Tensor,
) -> None:
    """Computes y in place.

    Args:
        parts: those of `shrink`.
        blocks: of :func:`column_blocks`, for the configuration of so many tokens.
        tiles: the table of :class:`batch.Batch` for so many tokens.
    """
    tokens, features = y.shape
    splits, _, ranks = parts.shape
    slots, _, max_rank = lora_b.shape
    rows, count = batch.rows_of_tile(tokens), blocks.shape[0]
    most = min(tiles.shape[0], batch.most_tiles(tokens, slots, rows))
    tensors = (y, parts, lora_b, g, g if bias is None else bias, blocks, tiles)
    sizes = (tokens, features, y.stride(0), most, count)
    constants: dict[str, Any] = {
        "RANKS": ranks,
        "MAX_RANK": max_rank,
        "PADDED_RANK": max(16, next_power_of_2(max_rank)),
        "HAS_BIAS": bias is not None,
        "ROWS": rows,
        "UNIT": unit,
        "HEAD": batch.HEAD,
    }
    if rows == batch.SMALL:
        overlaps = shrink.can_overlap(y.device)
        launch_kernel(
            _small_kernel,
            (max(1, min(most * count, SMALL.programs)),),
            *(*tensors, *sizes),
            SPLITS=splits,
            PADDED_SPLITS=next_power_of_2(splits),
            COLUMNS=SMALL.columns,
            STEPS=SMALL.width(features) // SMALL.columns,
            OVERLAPS=overlaps,
            num_warps=SMALL.warps,
            num_stages=1,  # A program mostly has one tile.
            launch_pdl=overlaps,
            **constants,
        )
        return
    launch_kernel(
        _large_kernel,
        (max(1, min(most * count, LARGE.programs)),),
        *(*tensors, *sizes, splits),
        COLUMNS=LARGE.columns,
        STEPS=LARGE.width(features) // LARGE.columns,
        num_stages=1,
        num_warps=LARGE.warps,
        **constants,
    )
