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

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from dora_common.triton.jit import WIDEN, cdiv, jit, next_power_of_2
from torch_dora.ops.triton.jit import launch_kernel
from torch_dora.vllm import batch, shrink


@dataclasses.dataclass(frozen=True)
class Config:
    """A program computes a block of outputs of a tile, ``columns`` at a time, then another block.

    Attributes:
        blocks: outputs of a block, for layers of at least so many outputs.
        overlaps: whether the kernel is launched while the one before it ends.
        programs: the most programs.
    """

    blocks: dict[int, int]
    overlaps: bool
    programs: int
    columns: int = 128
    warps: int = 4

    def width(self, features: int) -> int:
        """Returns the outputs of a block of a layer with so many outputs."""
        return next(width for least, width in self.blocks.items() if features >= least)


SMALL = Config(blocks={16384: 512, 0: 128}, overlaps=True, programs=1056)
LARGE = Config(blocks={0: 512}, overlaps=False, programs=65536)


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
def _load_block(blocks_ptr, number, UNIT: tl.constexpr):
    """Returns the projection of a block, its begin and its end. Read beside the tile, since one
    read after the other would take twice as long."""
    block = blocks_ptr + 4 * number
    return tl.load(block), tl.load(block + 1) * UNIT, tl.load(block + 2) * UNIT


@jit
def _adapter(
    b_ptr,
    g_ptr,
    slot,
    rank,
    begin,
    end,
    features,
    MAX_RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Returns B and g of `COLUMNS` outputs."""
    column = begin + tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = column < end
    r = tl.arange(0, PADDED_RANK)  # [PADDED_RANK]
    # In steps of 16, so that the ranks of an output are read together; B is zero beyond its rank.
    has_rank = (r < MAX_RANK) & (r // 16 * 16 < rank)
    b = tl.load(
        b_ptr + (slot * features + column[None, :]) * MAX_RANK + r[:, None],
        mask=has_rank[:, None] & inside[None, :],
        other=0.0,
    )
    return b, tl.load(g_ptr + slot * features + column, mask=inside, other=0.0)


@jit
def _base(y_ptr, tokens_of_tile, begin, end, y_stride, COLUMNS: tl.constexpr):
    """Returns y of `COLUMNS` outputs."""
    column = begin + tl.arange(0, COLUMNS)  # [COLUMNS]
    target = y_ptr + tokens_of_tile[:, None].to(tl.int64) * y_stride + column[None, :]
    mask = (tokens_of_tile >= 0)[:, None] & (column < end)[None, :]
    return tl.load(target, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["tokens", "tiles", "blocks", "splits"])
def _kernel(
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
    SPLITS: tl.constexpr,  # 0: `splits`
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
    slot, rank, tokens_of_tile = shrink.load_tile(tiles_ptr, item // blocks, tiles, ROWS, HEAD)
    projection, begin, end = _load_block(blocks_ptr, item % blocks, UNIT)
    r = tl.arange(0, PADDED_RANK)  # [PADDED_RANK]
    while rank > 0:
        item += tl.num_programs(0)
        next_slot, next_rank, next_tokens = shrink.load_tile(
            tiles_ptr, item // blocks, tiles, ROWS, HEAD
        )
        next_projection, next_begin, next_end = _load_block(blocks_ptr, item % blocks, UNIT)
        b, g = _adapter(
            b_ptr, g_ptr, slot, rank, begin, end, features, MAX_RANK, PADDED_RANK, COLUMNS
        )
        if OVERLAPS:
            # The kernels before this one have written y and the parts.
            cuda.gdc_wait()
        y = _base(y_ptr, tokens_of_tile, begin, end, y_stride, COLUMNS)
        row_mask = tokens_of_tile >= 0
        row = tl.where(row_mask, tokens_of_tile, 0).to(tl.int64)
        z = tl.zeros((ROWS, PADDED_RANK), tl.float32)
        source = parts_ptr + row[:, None] * RANKS + projection * MAX_RANK + r[None, :]
        for split in range(SPLITS if SPLITS > 0 else splits):
            z += tl.load(
                source + split * tokens * RANKS,
                mask=row_mask[:, None] & (r < MAX_RANK)[None, :],
                other=0.0,
            )
        z = z.to(b_ptr.dtype.element_ty)
        if WIDEN:
            z = z.to(tl.float32)
        for step in tl.static_range(STEPS):  # pyright: ignore[reportGeneralTypeIssues]
            first = begin + step * COLUMNS
            next_b, next_g, next_y = b, g, y
            if step + 1 < STEPS:
                # Reads the next columns while it computes these.
                next_b, next_g = _adapter(
                    b_ptr, g_ptr, slot, rank, first + COLUMNS, end, features, MAX_RANK,
                    PADDED_RANK, COLUMNS,
                )  # fmt: skip
                next_y = _base(y_ptr, tokens_of_tile, first + COLUMNS, end, y_stride, COLUMNS)
            if WIDEN:
                b = b.to(tl.float32)
            added = tl.dot(z, b)
            column = first + tl.arange(0, COLUMNS)
            inside = column < end
            g, scaled = g[None, :], y.to(tl.float32)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
                scaled = g * (scaled - bias) + bias
            else:
                scaled = g * scaled
            target = y_ptr + row[:, None] * y_stride + column[None, :]
            result = (scaled + added).to(y_ptr.dtype.element_ty)
            tl.store(target, result, mask=row_mask[:, None] & inside[None, :])
            b, g, y = next_b, next_g, next_y
        slot, rank, tokens_of_tile = next_slot, next_rank, next_tokens
        projection, begin, end = next_projection, next_begin, next_end


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
    config = SMALL if rows == batch.SMALL else LARGE
    most = min(tiles.shape[0], batch.most_tiles(tokens, slots, rows))
    overlaps = config.overlaps and shrink.can_overlap(y.device)
    launch_kernel(
        _kernel,
        (max(1, min(most * count, config.programs)),),
        y,
        parts,
        lora_b,
        g,
        g if bias is None else bias,
        blocks,
        tiles,
        tokens,
        features,
        y.stride(0),
        most,
        count,
        splits,
        SPLITS=splits if rows == batch.SMALL else 0,
        RANKS=ranks,
        MAX_RANK=max_rank,
        PADDED_RANK=max(16, next_power_of_2(max_rank)),
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=config.columns,
        STEPS=cdiv(config.width(features), config.columns),
        UNIT=unit,
        HEAD=batch.HEAD,
        OVERLAPS=overlaps,
        num_warps=config.warps,
        num_stages=1,  # A program mostly has one tile.
        launch_pdl=overlaps,
    )
