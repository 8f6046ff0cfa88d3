"""Attention of one new token per row to a KV cache of FP8 codes, over parts of its slots.

    K = codes∘σ    V = codes∘τ    s_t = c·q·K_t    p_t = exp2(s_t - most)
    part = Σ p_t V_t / Σ p_t      log_sum = most + log2 Σ p_t      c = log2(e) / sqrt(head_dim)

q: f32[batch, heads, size]; codes: e4m3 as bytes [layers, batch, kv_heads, capacity, size]; σ and τ:
f32[layers, batch, kv_heads, capacity]. part: [splits, batch, heads, size] and log_sum: f32[splits,
batch, heads], of the slots of each split that the token attends to. Split 0 also has the new token,
whose key and value [batch, kv_heads, size] have no codes. Where splits begin depends on the
capacity alone, so that a row's result does not depend on other rows.

Both products are of fp16, which holds all codes: q divided by its largest number, and p_t τ_t. The
softmax is in fp32. `most` is the maximum of s_t + log2(τ_t), so that p_t τ_t is at most 1.

Traffic: the codes and scales of the slots in use once, for all heads of a group. FLOPs: 4·16·size a
slot and kv head, since tensor cores multiply at least 16 rows; 30 a byte, bound by memory.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.jit import WIDEN, bound, jit, next_power_of_2

# Tensor cores multiply at least 16 rows.
MIN_ROWS = 16
# Cards from this compute capability on convert e4m3 by an instruction.
CONVERTS = 89


@dataclasses.dataclass(frozen=True)
class Config:
    """A program computes a split of ``chunk`` slots, ``tokens`` at a time.

    With 64 rows of 8,192 tokens in 8 kv heads of 128, this config takes 316 µs on an H200, and 410
    without stages. One warp of 32 tokens took 282, but its results were not checked on a GPU.
    """

    chunk: int = 512
    tokens: int = 64
    warps: int = 4
    stages: int = 3


CONFIG = Config()


def padded_rows(group: int) -> int:
    """Returns ROWS for a group of heads."""
    return max(MIN_ROWS, next_power_of_2(group))


@jit
def kernel(
    q_ptr,  # f32[batch, heads, size]
    key_ptr,  # f32[batch, kv_heads, size]
    value_ptr,  # [batch, kv_heads, size]
    keys_ptr,  # u8[layers, batch, kv_heads, capacity, size]
    key_scales_ptr,  # f32[layers, batch, kv_heads, capacity]
    values_ptr,  # u8[layers, batch, kv_heads, capacity, size]
    value_scales_ptr,  # f32[layers, batch, kv_heads, capacity]
    lengths_ptr,  # i32[batch]
    layer_ptr,  # i32[1]
    part_ptr,  # [splits, batch, heads, size]
    log_sum_ptr,  # f32[splits, batch, heads]
    batch,
    kv_heads,
    capacity,
    splits,
    scale,  # c
    WINDOW: tl.constexpr,  # the number of latest tokens to attend to; 0 for all
    GROUP: tl.constexpr,  # heads that share a key
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # SIZE, as a power of two
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    CONVERTS: tl.constexpr,  # whether the card converts e4m3
):
    split = tl.program_id(0) % splits
    row = tl.program_id(0) // splits  # of batch·kv_heads
    g = tl.arange(0, ROWS)  # [ROWS]
    d = tl.arange(0, PADDED)  # [PADDED]
    # Four channels of a value are one word: single bytes would be read one by one.
    word = tl.arange(0, PADDED // 4)  # [PADDED / 4]
    at = (row * GROUP + g[:, None]) * SIZE
    q_mask = (g < GROUP)[:, None]
    q = tl.load(q_ptr + at + d[None, :], mask=q_mask & (d < SIZE)[None, :], other=0.0)
    unit = tl.maximum(tl.max(tl.abs(q), axis=1), 1e-30)
    half = (q / unit[:, None]).to(tl.float16)  # [ROWS, PADDED]
    unit *= scale

    length = tl.load(lengths_ptr + row // kv_heads)
    base = (tl.load(layer_ptr).to(tl.int64) * batch * kv_heads + row) * capacity
    keys_ptr += base * SIZE
    key_scales_ptr += base
    value_words_ptr = (values_ptr + base * SIZE).to(tl.pointer_type(tl.uint32))
    value_scales_ptr += base
    first, begin = 0, split * CHUNK
    end = tl.minimum(tl.minimum(begin + CHUNK, length), capacity)
    if WINDOW:
        first = length - WINDOW + 1
        begin = tl.maximum(begin, first // TOKENS * TOKENS)
        end = tl.where(first < length, end, 0)

    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sum0 = tl.zeros((ROWS, PADDED // 4), tl.float32)
    sum1 = tl.zeros((ROWS, PADDED // 4), tl.float32)
    sum2 = tl.zeros((ROWS, PADDED // 4), tl.float32)
    sum3 = tl.zeros((ROWS, PADDED // 4), tl.float32)
    if split == 0:
        key = tl.load(key_ptr + row * SIZE + d, mask=d < SIZE, other=0.0)
        value_ptr += row * SIZE
        value = tl.load(value_ptr + d, mask=d < SIZE, other=0.0).to(tl.float32)
        # The scale that the value's codes would have.
        tau = tl.maximum(tl.max(tl.abs(value)), 1e-30) / 448.0
        most = tl.sum(q * key[None, :], axis=1) * scale + tl.log2(tau)
        total += 1.0 / tau
        sum0 += _channels(value_ptr, word, 0, SIZE) / tau
        sum1 += _channels(value_ptr, word, 1, SIZE) / tau
        sum2 += _channels(value_ptr, word, 2, SIZE) / tau
        sum3 += _channels(value_ptr, word, 3, SIZE) / tau

    for start in tl.range(bound(begin), bound(end), TOKENS, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        t = start + tl.arange(0, TOKENS)  # [TOKENS]
        seen = t < end
        if WINDOW:
            seen = seen & (t >= first)
        sigma = tl.load(key_scales_ptr + t)
        tau = tl.where(seen, tl.load(value_scales_ptr + t), 1.0)
        k = _read(keys_ptr + t[None, :] * SIZE + d[:, None], (d < SIZE)[:, None], SIZE == PADDED)
        v = _read(
            value_words_ptr + t[:, None] * (SIZE // 4) + word[None, :],
            (word < SIZE // 4)[None, :],
            SIZE == PADDED,
        )
        s = _dot(half, _wide(k, CONVERTS), None)  # [ROWS, TOKENS]
        s = tl.where(seen[None, :], s * (unit[:, None] * sigma[None, :]), float("-inf"))
        new_most = tl.maximum(most, tl.max(s + tl.log2(tau)[None, :], axis=1))
        p = tl.exp2(s - new_most[:, None])
        old = tl.exp2(most - new_most)
        most = new_most
        total = total * old + tl.sum(p, axis=1)
        p = (p * tau[None, :]).to(tl.float16)
        sum0 = _dot(p, _wide(v.to(tl.uint8), CONVERTS), sum0 * old[:, None])
        sum1 = _dot(p, _wide((v >> 8).to(tl.uint8), CONVERTS), sum1 * old[:, None])
        sum2 = _dot(p, _wide((v >> 16).to(tl.uint8), CONVERTS), sum2 * old[:, None])
        sum3 = _dot(p, _wide((v >> 24).to(tl.uint8), CONVERTS), sum3 * old[:, None])

    # A split without slots has no weight, and its part is 0.
    total = tl.where(total > 0, total, 1.0)
    part = split * batch * kv_heads + row
    head = part * GROUP + g
    tl.store(log_sum_ptr + head, most + tl.log2(total), mask=g < GROUP)
    part_ptr += part.to(tl.int64) * GROUP * SIZE
    at = g[:, None] * SIZE + 4 * word[None, :]
    mask = q_mask & (word < SIZE // 4)[None, :]
    dtype = part_ptr.dtype.element_ty
    tl.store(part_ptr + at, (sum0 / total[:, None]).to(dtype), mask=mask)
    tl.store(part_ptr + at + 1, (sum1 / total[:, None]).to(dtype), mask=mask)
    tl.store(part_ptr + at + 2, (sum2 / total[:, None]).to(dtype), mask=mask)
    tl.store(part_ptr + at + 3, (sum3 / total[:, None]).to(dtype), mask=mask)


@jit
def _channels(ptr, word, J: tl.constexpr, SIZE: tl.constexpr):
    """Returns every fourth number of a vector from J on: f32[1, PADDED / 4]."""
    return tl.load(ptr + 4 * word + J, mask=word < SIZE // 4, other=0.0).to(tl.float32)[None, :]


@jit
def _read(ptr, mask, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0)


@jit
def _wide(codes, CONVERTS: tl.constexpr):
    """Returns e4m3 codes, as bytes, in fp16."""
    if CONVERTS:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Exponents of fp16 have another bias: 15 instead of 7.
        bits = codes.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@jit
def _dot(a, b, to):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, to)
