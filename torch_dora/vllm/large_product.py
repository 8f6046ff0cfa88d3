"""A layer's whole result for many tokens, in one kernel after the one that computes z:

    y = g[slot] ∘ (x Wᵀ) + bias + z B[slot]

x: [tokens, in] and W: [out, in]; the others as in :mod:`torch_dora.vllm.shrink` and
:mod:`torch_dora.vllm.expand`, all but z and g fp16 or bf16. A token without an adapter has x Wᵀ +
bias, summed in the order of the inputs, in fp32.

A program multiplies a tile of tokens by a block of outputs, and then adds the part of each adapter
that the tile has. So results are not read and written again, as :mod:`torch_dora.vllm.expand` does.

Traffic: that of the product x Wᵀ; B and g once for every tile of tokens and slot in it; the parts
of z once for every block of outputs.
"""

import dataclasses

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dora_common.triton.jit import WIDEN, bound, cdiv, jit, next_power_of_2
from torch_dora.ops.triton.jit import launch_kernel
from torch_dora.vllm import batch, product

LEAST_TOKENS = batch.LARGE_BATCH
MOST_RANKS = 32  # of a projection
MOST_OUTPUTS = 16384  # of a layer
COLUMNS = 256  # outputs of a program
GROUP = 8  # tiles of tokens that are multiplied by one block of outputs after another


@dataclasses.dataclass(frozen=True)
class Config:
    """A program multiplies ``depth`` inputs at a time, and has begun to read ``stages`` times as
    many."""

    columns: int = COLUMNS
    depth: int = 64
    stages: int = 4
    warps: int = 8


CONFIG = Config()


@jit
def _add_adapters(
    y, first_row, first_column, projection, parts_ptr, b_ptr, g_ptr, slots_ptr, ranges_ptr,
    members_ptr, tile, tokens, features, splits,
    RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PADDED_RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the result [ROWS, COLUMNS] of the base's y. A number of an adapter that is not finite
    does no harm to others' rows: it becomes a g that is not a number."""
    row = first_row + tl.arange(0, ROWS)  # [ROWS]
    column = first_column + tl.arange(0, COLUMNS)  # [COLUMNS]
    r = tl.arange(0, PADDED_RANK)  # [PADDED_RANK]
    begin = tl.load(ranges_ptr + tile)
    end = tl.load(ranges_ptr + tile + 1)
    if begin < end:
        slot = tl.load(slots_ptr + row, mask=row < tokens, other=-1)
        source = parts_ptr + row[:, None].to(tl.int64) * RANKS + projection * MAX_RANK + r[None, :]
        has_rank = r < MAX_RANK
        z = tl.zeros((ROWS, PADDED_RANK), tl.float32)
        for split in range(bound(splits)):
            z += tl.load(
                source + split * (tokens * RANKS),
                mask=(slot >= 0)[:, None] & has_rank[None, :],
                other=0.0,
            )
        z = z.to(b_ptr.dtype.element_ty)
        for number in tl.range(bound(begin), bound(end), num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            of = tl.load(members_ptr + 2 * number)
            rank = tl.load(members_ptr + 2 * number + 1)
            output = of.to(tl.int64) * features + column
            b = tl.load(
                b_ptr + output[None, :] * MAX_RANK + r[:, None],
                mask=(has_rank & (r // 16 * 16 < rank))[:, None],
                other=0.0,
            )
            zero = b.to(tl.float32) * 0.0
            g = tl.load(g_ptr + output) + tl.sum(zero, 0)
            b = tl.where(zero == 0.0, b, 0.0).to(b.dtype)
            is_own = (slot == of)[:, None]
            own = tl.where(is_own, z, 0.0).to(z.dtype)
            if WIDEN:
                own, b = own.to(tl.float32), b.to(tl.float32)
            y = tl.dot(own, b, y * tl.where(is_own, g[None, :], 1.0))
    return y


@triton.jit(do_not_specialize=["tokens", "splits"])
def _kernel(
    x,  # [tokens, in], in blocks [ROWS, DEPTH]
    weight,  # [out, in], in blocks [COLUMNS, DEPTH]
    y,  # [tokens, out], in blocks [ROWS, COLUMNS]
    parts_ptr,  # f32[splits, tokens, RANKS]
    b_ptr,  # [slots, out, MAX_RANK]
    g_ptr,  # f32[slots + 1, out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    slots_ptr,  # i32[tokens]
    ranges_ptr,  # i32[tiles + 1], where the members of each tile begin
    members_ptr,  # i32[members, 2]: slots, and their ranks
    blocks_ptr,  # i32[out / COLUMNS], the projection of each block
    tokens,
    features,
    inputs,
    splits,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    program, blocks, tiles = tl.program_id(0), features // COLUMNS, tl.cdiv(tokens, ROWS)
    group = program // (GROUP * blocks) * GROUP
    size = tl.minimum(tiles - group, GROUP)
    tile = group + program % (GROUP * blocks) % size
    block = program % (GROUP * blocks) // size
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(0, bound(inputs), DEPTH, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        inner = x.load([tile * ROWS, k])
        w = weight.load([block * COLUMNS, k])
        if WIDEN:
            inner, w = inner.to(tl.float32), w.to(tl.float32)
        total = tl.dot(inner, w.T, total)
    total = _add_adapters(
        total, tile * ROWS, block * COLUMNS, tl.load(blocks_ptr + block), parts_ptr, b_ptr, g_ptr,
        slots_ptr, ranges_ptr, members_ptr, tile, tokens, features, splits, RANKS, MAX_RANK,
        PADDED_RANK, ROWS, COLUMNS,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + block * COLUMNS + tl.arange(0, COLUMNS)).to(tl.float32)[None, :]
    y.store([tile * ROWS, block * COLUMNS], total.to(b_ptr.dtype.element_ty))


def refuses(x: Tensor, weight: Tensor, blocks: Tensor, max_rank: int) -> str | None:
    """Returns why the kernel does not compute a layer, or None."""
    if len(x) < LEAST_TOKENS:
        return f"it was not measured for fewer than {LEAST_TOKENS} tokens"
    if len(weight) > MOST_OUTPUTS:
        return f"layers of more than {MOST_OUTPUTS} outputs gain nothing"
    if max_rank > MOST_RANKS:
        return f"for ranks above {MOST_RANKS}, z does not fit into registers"
    return product.refuses_operands(x, weight, blocks)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parts: Tensor,
    lora_b: Tensor,
    g: Tensor,
    blocks: Tensor,
    tables: batch.Batch,
    config: Config | None = None,
) -> Tensor:
    """Returns y.

    Args:
        parts: those of `shrink`.
        blocks: of :func:`product.blocks_of`, for the configuration's columns.
    """
    config = config or CONFIG
    tokens, inputs = x.shape
    features = len(weight)
    y = x.new_empty(tokens, features)
    splits, _, ranks = parts.shape
    max_rank = lora_b.shape[2]
    rows = batch.MANY
    launch_kernel(
        _kernel,
        (cdiv(tokens, rows) * (features // config.columns),),
        TensorDescriptor.from_tensor(x, [rows, config.depth]),
        TensorDescriptor.from_tensor(weight, [config.columns, config.depth]),
        TensorDescriptor.from_tensor(y, [rows, config.columns]),
        *(parts, lora_b, g, y if bias is None else bias),
        *(tables.slots, tables.ranges, tables.members, blocks, tokens, features, inputs, splits),
        RANKS=ranks,
        MAX_RANK=max_rank,
        PADDED_RANK=max(16, next_power_of_2(max_rank)),
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        STAGES=config.stages,
        GROUP=GROUP,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return y
