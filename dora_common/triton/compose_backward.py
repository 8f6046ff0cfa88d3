"""Compose backward: the cotangents of base, lora and g in one pass over dy and inner.

    d_base = g·dy  ((g-1)·dy for ΔY)     d_lora = g·(s·dy)     d_g = Σ_rows dy·inner

dy, inner, d_base, d_lora: [rows, out], fp16, bf16 or fp32; g: f32[out]; d_g: f32[out].

d_g is reduced in two stages. A program loops over a strip of rows of one block of columns and
writes one partial sum per column, [strips, out] in fp32; ``column_sums`` adds these in a fixed
order. With n strips, a strip is every n-th tile of rows: the strips that run at the same time then
read neighbouring memory.

Traffic: 2 reads of rows·out, and 1 write per requested cotangent; at 4.2 TB/s and bf16, 24 µs for
one cotangent at 4096×4096. The partial sums add 8/(rows of a strip) of one operand's bytes.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.jit import cdiv, jit, next_power_of_2, number


@dataclasses.dataclass(frozen=True)
class Config:
    """A program computes ``columns`` columns of a strip of rows, ``rows`` rows at a time.

    Attributes:
        columns: 1024, that is 2 KiB of a bf16 row, 16 bytes per thread. On an H200, with the second
            stage, 47.6 µs for 4096 × 8192; 512, with twice as many programs, take 54.0.
        stages: this many rows are in flight; 3 take 51.0 µs.
        programs: the least number of programs: enough strips that every multiprocessor of a large
            GPU has several programs, few enough that the partial sums stay small.
        most_strips: limits the partial sums that the second stage keeps in registers.
    """

    rows: int = 1
    columns: int = 1024
    warps: int = 4
    stages: int = 4
    programs: int = 132 * 2
    most_strips: int = 512


CONFIG = Config()


@jit
def kernel(
    dy_ptr,  # [rows, out]
    inner_ptr,  # [rows, out], not read unless WITH_G
    g_ptr,  # [out]
    d_base_ptr,  # [rows, out], not written unless WITH_BASE
    d_lora_ptr,  # [rows, out], not written unless WITH_LORA
    partial_ptr,  # f32[strips, out], not written unless WITH_G
    rows,
    features,
    strips,
    scale,  # a number or its address
    DELTA: tl.constexpr,
    WITH_BASE: tl.constexpr,
    WITH_LORA: tl.constexpr,
    WITH_G: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column_tiles = tl.cdiv(features, COLUMNS)
    strip = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    column_mask = column < features
    g = tl.load(g_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    base_factor = g
    if DELTA:
        base_factor = g - 1.0

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        row = (step * strips + strip) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        mask = (row < rows)[:, None] & column_mask[None, :]
        # rows·out may exceed 2³¹.
        offset = row.to(tl.int64)[:, None] * features + column[None, :]  # [ROWS, COLUMNS]
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if WITH_BASE:
            d_base = base_factor * dy
            tl.store(d_base_ptr + offset, d_base.to(d_base_ptr.dtype.element_ty), mask=mask)
        if WITH_LORA:
            d_lora = g * (number(scale) * dy)
            tl.store(d_lora_ptr + offset, d_lora.to(d_lora_ptr.dtype.element_ty), mask=mask)
        if WITH_G:
            total += dy * tl.load(inner_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if WITH_G:
        at = strip.to(tl.int64) * features + column
        tl.store(partial_ptr + at, tl.sum(total, axis=0), mask=column_mask)


def strips_of(config: Config, rows: int, features: int) -> tuple[int, int, dict[str, int]]:
    """Returns the number of strips, that of programs, and the constants of a kernel by strips."""
    height = strip_height(config, rows, features)
    strips = cdiv(rows, height)
    constants = {
        "STEPS": height // config.rows,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "STAGES": config.stages,
    }
    return strips, strips * cdiv(features, config.columns), constants


def strip_height(config: Config, rows: int, features: int) -> int:
    """Returns the rows of a strip: a power of two, so that many row counts share a compiled
    kernel."""
    column_tiles = cdiv(features, config.columns)
    strips = min(config.most_strips, cdiv(config.programs, column_tiles))
    height = max(config.rows, next_power_of_2(cdiv(rows, strips)))
    # Rounding up to a power of two may leave too few strips; half the height doubles them.
    fewer = cdiv(rows, height) < strips and height > config.rows
    if fewer and cdiv(rows, height // 2) <= config.most_strips:
        height //= 2
    return height
