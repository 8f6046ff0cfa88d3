"""A layer's whole result for few tokens, in one kernel:

    y = g[slot] ∘ (x Wᵀ) + bias + z B[slot],  z = x A[slot]ᵀ

x: [tokens, in] and W: [out, in]; A, B, z, g and the bias as in :mod:`torch_dora.vllm.shrink` and
:mod:`torch_dora.vllm.expand`, all but z and g fp16 or bf16. A token without an adapter has x Wᵀ +
bias.

The first programs compute z as `shrink` does. The others multiply W, which takes longer, and read z
near the end. A GPU starts programs in the order of their numbers, so z is computed meanwhile.

cuBLAS sums the products of a result in the order of the inputs, in fp32, and so does this kernel;
for up to 16 tokens in segments, too, where cuBLAS does (:mod:`torch_dora.vllm.segments`).

Traffic: W once; x once for every block of outputs; A once for every tile of its slot; B and g once
for every slot of the batch; the parts of z once for every block of outputs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dora_common.triton.jit import WIDEN, bound, cdiv, jit, next_power_of_2
from torch_dora.ops.triton.jit import capability, launch_kernel
from torch_dora.vllm import batch, shrink

MOST_TOKENS = 64
MOST_RANKS = 64  # of a projection
COLUMNS = 64  # outputs of a program
PROGRAMS = 64  # that compute z, if no multiprocessors are left over for them
LOOK = 0.75  # of the inputs; z is read then


@dataclasses.dataclass(frozen=True)
class Config:
    """A program multiplies ``depth`` inputs at a time, and has begun to read ``stages`` times as
    many."""

    depth: int
    stages: int
    warps: int = 4


# By the rows of x, what fills the shared memory of a multiprocessor; SHARED fills half of it, for
# more programs than multiprocessors.
ALONE = {16: Config(128, 10), 64: Config(128, 6)}
SHARED = {16: Config(64, 10), 64: Config(128, 3)}


@jit
def _entry(used_ptr, number, used):
    """Returns a slot of the batch and its rank; -2 if there is no such."""
    entry = used_ptr + 2 * number + 2
    return (
        tl.load(entry, mask=number < used, other=-2),
        tl.load(entry + 1, mask=number < used, other=0),
    )


@jit
def _of_slot(
    entry, b_ptr, g_ptr, column, features, MAX_RANK: tl.constexpr, PADDED_RANK: tl.constexpr
):
    """Returns a slot, its B [COLUMNS, PADDED_RANK] and its g [COLUMNS]."""
    slot, rank = entry
    r = tl.arange(0, PADDED_RANK)[None, :]
    output = slot.to(tl.int64) * features + column  # [COLUMNS]
    has_rank = (r < MAX_RANK) & (r // 16 * 16 < rank)
    b = tl.load(b_ptr + output[:, None] * MAX_RANK + r, mask=has_rank, other=0.0)
    return slot, b, tl.load(g_ptr + output, mask=slot >= 0, other=1.0)


@jit
def load_slots(
    b_ptr, g_ptr, used_ptr, number, used, column, features,
    MAX_RANK: tl.constexpr, PADDED_RANK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Returns one slot, or four, whose reads are begun together."""
    first = _entry(used_ptr, number, used)
    if SLOTS == 4:
        second = _entry(used_ptr, number + 1, used)
        third = _entry(used_ptr, number + 2, used)
        fourth = _entry(used_ptr, number + 3, used)
    else:
        second, third, fourth = first, first, first
    return (
        _of_slot(first, b_ptr, g_ptr, column, features, MAX_RANK, PADDED_RANK),
        _of_slot(second, b_ptr, g_ptr, column, features, MAX_RANK, PADDED_RANK),
        _of_slot(third, b_ptr, g_ptr, column, features, MAX_RANK, PADDED_RANK),
        _of_slot(fourth, b_ptr, g_ptr, column, features, MAX_RANK, PADDED_RANK),
    )


@jit
def _with_slot(y, total, z, slot, given):
    """Returns y, but for the tokens of a slot the result from the base's `total`. A number of an
    adapter that is not finite does no harm to others."""
    of, b, g = given
    if WIDEN:
        b, z = b.to(tl.float32), z.to(tl.float32)
    return tl.where(slot == of, tl.dot(b, z, g[:, None] * total), y)


@jit
def with_slots(y, total, z, slot, number, used, given, SLOTS: tl.constexpr):
    first, second, third, fourth = given
    y = _with_slot(y, total, z, slot, first)
    if SLOTS == 4:
        if number + 1 < used:
            y = _with_slot(y, total, z, slot, second)
            y = _with_slot(y, total, z, slot, third)
            y = _with_slot(y, total, z, slot, fourth)
    return y


@jit
def _load_z(
    z_ptr, projection, slot, is_ready,
    RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Returns z [PADDED_RANK, ROWS] of the tokens with an adapter."""
    r = tl.arange(0, PADDED_RANK)[:, None]
    source = z_ptr + projection * MAX_RANK + tl.arange(0, ROWS)[None, :] * RANKS + r
    return tl.load(source, mask=(r < MAX_RANK) & (slot >= 0) & is_ready, other=0.0)


@triton.jit(do_not_specialize=["tokens", "tiles", "shrinking", "segment", "look"])
def _kernel(
    weight,  # [out, in], in blocks [COLUMNS, DEPTH]
    x,  # [tokens, in], in blocks [ROWS, DEPTH]
    x_ptr,
    a_ptr,  # [slots, RANKS, in]
    b_ptr,  # [slots, out, MAX_RANK]
    g_ptr,  # f32[slots + 1, out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    y_ptr,  # [tokens, out]
    z_ptr,  # f32[tokens, RANKS]
    tiles_ptr,  # i32[tiles, HEAD + TILE]
    slots_ptr,  # i32[tokens]
    used_ptr,  # i32[1 + slots, 2]: how many the batch has; then they and their ranks
    blocks_ptr,  # i32[out / COLUMNS], the projection of each block
    counts_ptr,  # i32[2], zeros
    tokens,
    inputs,
    features,
    tiles,
    segment,  # inputs whose sum is taken at once
    shrinking,  # programs that compute z
    look,  # where z is read
    PROJECTIONS: tl.constexpr,
    RANKS: tl.constexpr,  # of all projections
    MAX_RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    LANE_DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,  # whose B is read at a time
):
    program = tl.program_id(0)
    if program < shrinking:
        shrink.multiply_tiles(
            x_ptr, a_ptr, tiles_ptr, z_ptr, program, shrinking, tokens, inputs, tiles, 1,
            inputs, 0, PROJECTIONS, RANKS // PROJECTIONS, MAX_RANK, PADDED_RANK, TILE, LANES,
            LANE_DEPTH, HEAD, False,
        )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_add(counts_ptr, 1, sem="release")
    else:
        block = program - shrinking
        blocks = tl.num_programs(0) - shrinking
        column = block * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
        token = tl.arange(0, ROWS)  # [ROWS]
        row_mask = token < tokens
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        z = tl.zeros((PADDED_RANK, ROWS), tl.float32)
        end = segment
        # What the loop reads beside W and x. W's first blocks are on their way then.
        slot = tl.full((1, ROWS), -1, tl.int32)
        projection = 0
        used = 0
        given = load_slots(
            b_ptr, g_ptr, used_ptr, 0, 0, column, features, MAX_RANK, PADDED_RANK, SLOTS
        )
        ready = 0
        for k in tl.range(0, bound(inputs), DEPTH, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            w = weight.load([block * COLUMNS, k])
            inner = x.load([0, k])
            if WIDEN:
                w, inner = w.to(tl.float32), inner.to(tl.float32)
            if k == 0:
                slot = tl.load(slots_ptr + token, mask=row_mask, other=-1)[None, :]
                projection = tl.load(blocks_ptr + block)
                used = tl.load(used_ptr)
                given = load_slots(
                    b_ptr, g_ptr, used_ptr, 0, used, column, features, MAX_RANK, PADDED_RANK, SLOTS
                )
            sums = tl.dot(w, inner.T, sums)
            if HAS_SEGMENTS:
                if k + DEPTH == end:
                    total += sums
                    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
                    end += segment
            if k == look:
                # Mostly z has been computed, and is read while the weight is.
                ready = tl.atomic_add(counts_ptr, 0, sem="acquire")
                z = _load_z(
                    z_ptr, projection, slot, ready >= shrinking, RANKS, MAX_RANK, PADDED_RANK, ROWS
                )
        total += sums
        if ready < shrinking:
            while tl.atomic_add(counts_ptr, 0, sem="acquire") < shrinking:
                pass
            z = _load_z(z_ptr, projection, slot, True, RANKS, MAX_RANK, PADDED_RANK, ROWS)
        others = tl.atomic_add(counts_ptr + 1, 1, sem="acq_rel")
        z = z.to(b_ptr.dtype.element_ty)
        y = total
        for number in tl.range(0, bound(used), SLOTS, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            more = load_slots(
                b_ptr, g_ptr, used_ptr, number + SLOTS, used, column, features, MAX_RANK,
                PADDED_RANK, SLOTS,
            )  # fmt: skip
            y = with_slots(y, total, z, slot, number, used, given, SLOTS)
            given = more
        if HAS_BIAS:
            y += tl.load(bias_ptr + column).to(tl.float32)[:, None]
        tl.store(
            y_ptr + (token[None, :].to(tl.int64) * features + column[:, None]),
            y.to(y_ptr.dtype.element_ty),
            mask=row_mask[None, :],
        )
        if others == blocks - 1:
            # All have read z. The last of them leaves zeros for the next call.
            tl.store(counts_ptr, 0)
            tl.store(counts_ptr + 1, 0)


def blocks_of(sizes: Sequence[int], device: torch.device | str, columns: int = COLUMNS) -> Tensor:
    """Returns i32[out / columns]: the projection of each block of outputs; nothing if a block would
    have outputs of two."""
    if any(size % columns for size in sizes):
        return torch.zeros(0, dtype=torch.int32, device=device)
    found = [i for i, size in enumerate(sizes) for _ in range(size // columns)]
    return torch.tensor(found, dtype=torch.int32, device=device)


def refuses(x: Tensor, weight: Tensor, blocks: Tensor, max_rank: int) -> str | None:
    """Returns why the kernel does not compute a layer, or None."""
    if len(x) > MOST_TOKENS:
        return f"it is slower for more than {MOST_TOKENS} tokens"
    if max_rank > MOST_RANKS:
        return f"for ranks above {MOST_RANKS}, A does not fit into shared memory"
    return refuses_operands(x, weight, blocks)


def refuses_operands(x: Tensor, weight: Tensor, blocks: Tensor) -> str | None:
    """Returns why a kernel with descriptors does not multiply a weight, or None."""
    if not blocks.numel() or x.shape[1] % 64 or not weight.is_contiguous():
        return "its blocks would be cut"
    if any(one.data_ptr() % 16 or one.stride(0) % 8 for one in (x, weight)):
        return "rows of a descriptor begin at a multiple of 16 bytes"
    if x.device.type != "cuda" or capability(x.device) != 90:
        return "it was measured on Hopper only"
    return None


class Adapters(NamedTuple):
    """The adapters of a layer, and the tables of :class:`batch.Batch`.

    Attributes:
        blocks: of :func:`blocks_of`.
        counts: i32[2], zeros between calls.
    """

    lora_a: Tensor
    lora_b: Tensor
    g: Tensor
    blocks: Tensor
    counts: Tensor
    tiles: Tensor
    slots: Tensor
    used: Tensor


def segment_of(inputs: int, segments: int) -> int:
    """Returns the inputs of a segment."""
    return cdiv(cdiv(inputs, segments), 64) * 64


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: int, adapters: Adapters
) -> Tensor:
    """Returns y, whose products are summed in so many segments."""
    tokens, inputs = x.shape
    features = len(weight)
    y = x.new_empty(tokens, features)
    blocks = features // COLUMNS
    rows = 16 if tokens <= 16 else 64
    count = processors(x.device)
    config = (SHARED if blocks > count else ALONE)[rows]
    segment = segment_of(inputs, segments)
    constants: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "TILE": batch.SMALL,
        "HEAD": batch.HEAD,
        "LANES": shrink.BESIDE.lanes,
        "LANE_DEPTH": shrink.BESIDE.depth,
        "ROWS": rows,
        "COLUMNS": COLUMNS,
        "DEPTH": config.depth,
        "STAGES": config.stages,
        "HAS_SEGMENTS": segments > 1,
        "num_warps": config.warps,
    }
    descriptors = (
        TensorDescriptor.from_tensor(weight, [COLUMNS, config.depth]),
        TensorDescriptor.from_tensor(x, [rows, config.depth]),
    )
    slots, ranks, _ = adapters.lora_a.shape
    max_rank = adapters.lora_b.shape[2]
    tiles = min(len(adapters.tiles), batch.most_tiles(tokens, slots, batch.SMALL))
    projections = ranks // max_rank
    free = max(PROGRAMS // 2, count - blocks) if blocks <= count else PROGRAMS
    shrinking = max(1, min(tiles * projections, free))
    z = torch.empty(tokens, ranks, dtype=torch.float32, device=x.device)
    tensors = (
        *(x, adapters.lora_a, adapters.lora_b, adapters.g, y if bias is None else bias, y, z),
        *(adapters.tiles, adapters.slots, adapters.used, adapters.blocks, adapters.counts),
    )
    look = int(LOOK * inputs) // config.depth * config.depth
    numbers = (tokens, inputs, features, tiles, segment, shrinking, look)
    launch_kernel(
        _kernel,
        (shrinking + blocks,),
        *descriptors,
        *tensors,
        *numbers,
        PROJECTIONS=projections,
        RANKS=ranks,
        MAX_RANK=max_rank,
        PADDED_RANK=max(16, next_power_of_2(max_rank)),
        SLOTS=4 if max_rank <= 16 else 1,
        num_stages=shrink_stages(max_rank),
        **constants,
    )
    return y


def shrink_stages(max_rank: int) -> int:
    """Returns the stages of the loop that computes z: two programs must fit, at most."""
    return 3 if max_rank <= 32 else 2


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
