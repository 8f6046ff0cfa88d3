"""Multiplies each token by the A of its adapter, in parts: parts[p] = x[:, p] A[slot][:, p]ᵀ.

x: [tokens, in] and A: [slots, ranks, in], both fp16 or bf16, where A holds the projections of a
packed layer one below the other, each with max_rank ranks; parts: f32[splits, tokens, ranks], whose
sum is z. Tokens without an adapter are not written, nor are ranks read beyond the adapter's.

A program computes a part of the features of a tile of tokens, for one projection or for all, and
goes on to another until it finds no tile: a CUDA graph launches the same programs for any batch.

Traffic: x once for every tile (in small ones, for every projection), A once for every tile of its
slot, up to the real rank.
"""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from dora_common.triton.jit import WIDEN, bound, cdiv, jit, next_power_of_2
from torch_dora.ops.choose import TRITON_MODE
from torch_dora.ops.triton.jit import capability, launch_kernel
from torch_dora.vllm import batch

# The expanding kernel adds the parts for each of its blocks.
MAX_SPLITS = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """A program multiplies ``chunk`` features or more of a tile, ``lanes`` times ``depth`` of them
    at a time.

    Attributes:
        lanes: parts of the features that different warps multiply.
        divides: whether a program computes one projection. Small tiles have few programs.
        overlaps: whether the kernel is launched while the one before it ends, and lets the next
            one be launched when it has begun (programmatic dependent launch). That next kernel
            waits on multiprocessors that large tiles need.
        programs: the most programs.
    """

    chunk: int
    lanes: int
    depth: int
    divides: bool
    overlaps: bool
    programs: int
    warps: int = 4
    stages: int = 3


# With few tokens, all that counts is how many reads follow one another.
SMALL = Config(chunk=512, lanes=4, depth=128, divides=True, overlaps=True, programs=528)
# The base product beside it reads far more, and is disturbed less by few programs.
BESIDE = dataclasses.replace(SMALL, chunk=2048, overlaps=False, programs=132)
LARGE = Config(chunk=256, lanes=1, depth=64, divides=False, overlaps=False, programs=65536)


@jit
def load_tile(tiles_ptr, number, tiles, ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Returns the slot of a tile, its rank and its tokens [ROWS]; the rank 0 if there is none.

    All are read at once. They are variables of the loop, which ends at rank 0."""
    entry = tiles_ptr + (HEAD + ROWS) * number
    slot = tl.load(entry, mask=number < tiles, other=0)
    rank = tl.load(entry + 1, mask=number < tiles, other=0)
    row = tl.load(entry + HEAD + tl.arange(0, ROWS), mask=number < tiles, other=-1)
    return slot.to(tl.int64), rank, row


@jit
def multiply_tiles(
    x_ptr,  # [tokens, in]
    a_ptr,  # [slots, PROJECTIONS * RANKS, in]
    tiles_ptr,  # i32[tiles, HEAD + ROWS]
    parts_ptr,  # f32[splits, tokens, PROJECTIONS * RANKS]
    item,
    programs,
    tokens,
    features,
    tiles,
    splits,
    chunk,
    CHUNK: tl.constexpr,  # features per part; 0: `chunk`
    PROJECTIONS: tl.constexpr,  # groups of ranks, each of a program of its own
    RANKS: tl.constexpr,  # in a group
    MAX_RANK: tl.constexpr,  # in a projection
    PADDED_RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    HEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes the parts of the tiles of one program, the `item`-th of `programs`."""
    slot, rank, tokens_of_tile = load_tile(
        tiles_ptr, item // (PROJECTIONS * splits), tiles, ROWS, HEAD
    )
    r = tl.arange(0, PADDED_RANKS)  # [PADDED_RANKS]
    if CHUNK > 0:
        length = CHUNK
    else:
        length = chunk
    while rank > 0:
        first = item % PROJECTIONS * RANKS
        split = item // PROJECTIONS % splits
        item += programs
        next_slot, next_rank, next_tokens = load_tile(
            tiles_ptr, item // (PROJECTIONS * splits), tiles, ROWS, HEAD
        )
        row_mask = tokens_of_tile >= 0
        row = tl.where(row_mask, tokens_of_tile, 0).to(tl.int64)
        has_rank = (r < RANKS) & (r % MAX_RANK < rank)
        a_row = (slot * RANKS * PROJECTIONS + first + r) * features
        if LANES == 1:
            sums = tl.zeros((ROWS, PADDED_RANKS), tl.float32)
            for start in range(0, bound(length), DEPTH):
                k = split * length + start + tl.arange(0, DEPTH)  # [DEPTH]
                inside = k < features
                x = tl.load(
                    x_ptr + row[:, None] * features + k[None, :],
                    mask=row_mask[:, None] & inside[None, :],
                    other=0.0,
                )
                a = tl.load(
                    a_ptr + a_row[None, :] + k[:, None],
                    mask=has_rank[None, :] & inside[:, None],
                    other=0.0,
                )
                if WIDEN:
                    x, a = x.to(tl.float32), a.to(tl.float32)
                sums = tl.dot(x, a, sums)
        else:
            lanes = tl.zeros((LANES, ROWS, PADDED_RANKS), tl.float32)
            lane = tl.arange(0, LANES)[:, None] * DEPTH
            for start in range(0, bound(length), LANES * DEPTH):
                k = split * length + start + lane + tl.arange(0, DEPTH)[None, :]  # [LANES, DEPTH]
                inside = k < features
                a = tl.load(
                    a_ptr + a_row[None, None, :] + k[:, :, None],
                    mask=has_rank[None, None, :] & inside[:, :, None],
                    other=0.0,
                )
                if OVERLAPS:
                    # The kernels before this one have written x; the next one may read y.
                    cuda.gdc_wait()
                    cuda.gdc_launch_dependents()
                x = tl.load(
                    x_ptr + row[None, :, None] * features + k[:, None, :],
                    mask=row_mask[None, :, None] & inside[:, None, :],
                    other=0.0,
                )
                if WIDEN:
                    x, a = x.to(tl.float32), a.to(tl.float32)
                lanes = tl.dot(x, a, lanes)
            sums = tl.sum(lanes, 0)
        target = (split.to(tl.int64) * tokens + row[:, None]) * RANKS * PROJECTIONS + first
        tl.store(
            parts_ptr + target + r[None, :], sums, mask=row_mask[:, None] & (r < RANKS)[None, :]
        )
        slot, rank, tokens_of_tile = next_slot, next_rank, next_tokens


@triton.jit(do_not_specialize=["tokens", "tiles", "splits"])
def _kernel(
    x_ptr,
    a_ptr,
    tiles_ptr,
    parts_ptr,
    tokens,
    features,
    tiles,
    splits,
    chunk,
    CHUNK: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PADDED_RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    HEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    multiply_tiles(
        x_ptr, a_ptr, tiles_ptr, parts_ptr, tl.program_id(0), tl.num_programs(0), tokens, features,
        tiles, splits, chunk, CHUNK, PROJECTIONS, RANKS, MAX_RANK, PADDED_RANKS, ROWS, LANES, DEPTH,
        HEAD, OVERLAPS,
    )  # fmt: skip


def can_overlap(device: torch.device) -> bool:
    """Returns whether a GPU has programmatic dependent launch."""
    return TRITON_MODE == "compiled" and capability(device) >= 90


def parts_of(features: int, config: Config, chunk: int = 0) -> tuple[int, int]:
    """Returns how many features a part has, at least so many, and how many parts there are."""
    step = config.lanes * config.depth
    chunk = max(chunk or config.chunk, cdiv(cdiv(features, step), MAX_SPLITS) * step)
    return chunk, max(1, cdiv(features, chunk))


def launch(
    x: Tensor,
    lora_a: Tensor,
    tiles: Tensor,
    max_rank: int,
    *,
    beside: AbstractContextManager[Any] | None = None,
) -> Tensor:
    """Returns the parts of z, f32[splits, tokens, ranks].

    Args:
        tiles: the table of :class:`batch.Batch` for so many tokens.
        max_rank: the ranks of one projection in ``lora_a``.
        beside: selects another stream for the launch, if another kernel runs at the same time on
            this one. The parts are memory of this one, which is to wait for the other.
    """
    tokens, features = x.shape
    slots, ranks, _ = lora_a.shape
    rows = batch.rows_of_tile(tokens)
    config = LARGE if rows == batch.LARGE else SMALL if beside is None else BESIDE
    most = min(tiles.shape[0], batch.most_tiles(tokens, slots, rows))
    chunk = config.chunk
    if rows == batch.LARGE:
        # As many programs as a large GPU runs at a time; more parts only are more to add.
        chunk = max(chunk, next_power_of_2(cdiv(features * cdiv(tokens, rows), 256)))
    chunk, splits = parts_of(features, config, chunk)
    groups = ranks // max_rank if config.divides else 1
    overlaps = config.overlaps and can_overlap(x.device)
    parts = torch.empty(splits, tokens, ranks, dtype=torch.float32, device=x.device)
    with beside or nullcontext():
        launch_kernel(
            _kernel,
            (min(config.programs, max(1, most) * splits * groups),),
            x,
            lora_a,
            tiles,
            parts,
            tokens,
            features,
            most,
            splits,
            chunk,
            # Of large tiles it follows the tokens, and is not compiled for each number of them.
            CHUNK=chunk if rows == batch.SMALL else 0,
            PROJECTIONS=groups,
            RANKS=ranks // groups,
            MAX_RANK=max_rank,
            PADDED_RANKS=max(16, next_power_of_2(ranks // groups)),
            ROWS=rows,
            LANES=config.lanes,
            DEPTH=config.depth,
            HEAD=batch.HEAD,
            OVERLAPS=overlaps,
            num_warps=config.warps,
            num_stages=config.stages,
            launch_pdl=overlaps,
        )
    return parts
