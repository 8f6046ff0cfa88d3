"""Every kernel compiles to machine code for a Hopper GPU, on a machine that has none.

In a process of its own: here the kernels are decorated for Triton's interpreter.
"""

import os
import subprocess
import sys

import pytest

PREAMBLE = """
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dora_common.triton import (
    adapter_pieces, bank_expand, bank_shrink, column_sums, compose_backward, compose_forward,
    expand_compose, norm_assembly, one_pass_norm,
)

def lower(kernel, types, constants, warps, **options):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    # What a launch infers: pointers and row lengths that are multiples of 16.
    aligned = [
        (i,) for i, name in enumerate(names)
        if name not in constants and (types[name][0] == "*" or "features" in name)
    ]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={index: [["tt.divisibility", 16]] for index in aligned},
    )
    options |= {"num_warps": warps}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

half, full = "*bf16", "*fp32"
sizes = dict(rows="i32", features="i32", scale="fp32")
"""

FORWARD = """
config = compose_forward.CONFIG
pointers = dict.fromkeys(["base_ptr", "lora_ptr", "bias_ptr", "result_ptr", "inner_ptr"], half)
code = lower(
    compose_forward.kernel,
    pointers | sizes | dict(g_ptr=full),
    dict(DELTA=False, HAS_BIAS=True, WITH_INNER=True, ROWS=config.rows, COLUMNS=config.columns),
    config.warps,
    enable_fp_fusion=True,
)
assert "ld.global.v4" in code and "st.global.v4" in code
"""

BACKWARD = """
config = compose_backward.CONFIG
pointers = dict.fromkeys(["dy_ptr", "inner_ptr", "d_base_ptr", "d_lora_ptr"], half)
code = lower(
    compose_backward.kernel,
    pointers | sizes | dict(g_ptr=full, partial_ptr=full, strips="i32"),
    dict(
        DELTA=False, WITH_BASE=True, WITH_LORA=True, WITH_G=True, STEPS=4,
        ROWS=config.rows, COLUMNS=config.columns, STAGES=config.stages,
    ),
    config.warps,
    enable_fp_fusion=True,
)
assert "st.global.v4" in code
code = lower(
    column_sums.kernel,
    dict(partial_ptr=full, factor_ptr=full, result_ptr=full)
    | dict(parts="i32", features="i32", eps="fp32"),
    dict(THEN="scale", PARTS=64, COLUMNS=64),
    column_sums.WARPS,
    enable_fp_fusion=True,
)
assert "sqrt.rn.f32" in code and "atom" not in code
"""

ASSEMBLY = """
code = lower(
    norm_assembly.kernel,
    dict.fromkeys(["base_sq_ptr", "cross_ptr", "ba_sq_ptr", "norm_ptr"], full)
    | dict(features="i32", twice="fp32", square="fp32"),
    dict(COLUMNS=norm_assembly.COLUMNS),
    norm_assembly.WARPS,
    enable_fp_fusion=False,
)
assert "sqrt.rn.f32" in code and "max.NaN.f32" in code
assert "fma" not in code
"""


EXPAND = """
pointers = dict.fromkeys(
    ["base_ptr", "z_ptr", "lora_b_ptr", "bias_ptr", "y_ptr", "inner_ptr"], half
)
for rank in (16, 384):
    config = expand_compose.config(rank)
    tile = dict(
        RANK=rank, ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth
    )
    code = lower(
        expand_compose.kernel,
        pointers | sizes | dict(g_ptr=full),
        tile | dict(HAS_BIAS=True, WITH_INNER=True),
        config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
    )
    # A tile of fewer than 64 rows is too low for the wide instruction.
    assert ("wgmma.mma_async" if rank == 384 else "mma.sync") in code
    assert "st.global.v4" in code
"""

ONE_PASS = """
floats = dict(weight_ptr=half), dict(levels_ptr=None, scales_ptr=None, RUN=0, GROUP=1)
codes = dict(weight_ptr="*u8", levels_ptr=full, scales_ptr=full), dict(RUN=64, GROUP=64)
others = dict(partial_ptr=full, out_features="i32", in_features="i32", scale="fp32")

def one_pass(rank, is_in_pieces, types, constants):
    config = one_pass_norm.config(rank, is_in_pieces, constants["RUN"] > 0)
    tile = dict(RANK=rank, ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth)
    adapter = dict.fromkeys(["lora_a_ptr", "lora_b_ptr"], "*fp16" if is_in_pieces else half)
    units = dict.fromkeys(["unit_a_ptr", "unit_b_ptr"], full if is_in_pieces else None)
    if is_in_pieces:
        adapter, units = adapter | units, {}
    code = lower(
        one_pass_norm.kernel,
        types | others | adapter,
        tile | constants | units | dict(PIECES=is_in_pieces),
        config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
    )
    assert "atom" not in code
    return code

for rank in (16, 384):
    code = one_pass(rank, False, *floats)
    assert ("wgmma.mma_async" if rank == 384 else "mma.sync") in code
    assert "ld.global.v4" in code
    assert "f16" in one_pass(rank, True, *floats)
for rank in (16, 64, 384):
    assert "bf16" in one_pass(rank, False, *codes)
    assert "f16" in one_pass(rank, True, *codes)
code = lower(
    adapter_pieces.kernel,
    dict.fromkeys(["lora_a_ptr", "lora_b_ptr", "unit_a_ptr", "unit_b_ptr"], full)
    | dict(a_ptr="*fp16", b_ptr="*fp16", cast_a_ptr=half, cast_b_ptr=half)
    | dict(in_features="i32", out_features="i32"),
    dict(RANK=384, DEPTH=512, COUNT=16),
    adapter_pieces.WARPS,
)
assert "st.global.v" in code
# A size of 1 is a constant.
one = dict(in_features=1, out_features=1)
lower(
    adapter_pieces.kernel,
    dict.fromkeys(["lora_a_ptr", "lora_b_ptr", "unit_a_ptr", "unit_b_ptr"], full)
    | dict(a_ptr="*fp16", b_ptr="*fp16", cast_a_ptr=half, cast_b_ptr=half),
    one | dict(RANK=4, DEPTH=4, COUNT=2048),
    adapter_pieces.WARPS,
)
one_pass(16, True, floats[0], floats[1] | one)
"""

BANK = """
config = bank_shrink.CONFIG
counts = dict.fromkeys(["batch", "time", "features", "slots"], "i32")
counts |= dict(ids_ptr="*i64", groups_ptr="*i32", rank_ptr="*i32")
for rows, product in ((16, "mma.sync"), (64, "wgmma.mma_async")):
    sizes = dict(RANKS=64, PADDED_RANKS=64, ROWS=rows, GROUPED=rows == 16)
    code = lower(
        bank_shrink.kernel,
        counts | dict(x_ptr=half, a_ptr=half, parts_ptr=full),
        sizes | dict(DEPTH=config.depth, CHUNK=4 * config.depth),
        config.warps,
        num_stages=config.stages,
    )
    assert product in code and "atom" not in code
    pointers = dict.fromkeys(["base_ptr", "b_ptr", "bias_ptr", "y_ptr"], half)
    code = lower(
        bank_expand.kernel,
        counts | pointers | dict(z_ptr=full, g_ptr=full, scale_ptr=full),
        sizes | dict(HAS_BIAS=True, COLUMNS=bank_expand.CONFIG.columns),
        bank_expand.CONFIG.warps,
    )
    assert product in code
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper():
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "\n".join([PREAMBLE, FORWARD, BACKWARD, ASSEMBLY, EXPAND, ONE_PASS, BANK])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
