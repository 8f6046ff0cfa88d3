"""Kernels are compiled for a GPU that is not there, at the same time, and are not launched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json
from types import SimpleNamespace
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from torch_dora.ops.triton import jit
from torch_dora.vllm import batch, product, segments

@triton.jit
def fails(pointer):
    tl.static_assert(False, "as it is meant to")

triton.runtime.driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
jit.TRITON_MODE = "compiled"
tables = batch.Batch(64, 4, "cpu")
half = torch.bfloat16
adapters = product.Adapters(
    torch.zeros(4, 16, 256, dtype=half), torch.zeros(4, 64, 16, dtype=half), torch.ones(5, 64),
    product.blocks_of([64], "cpu"), torch.zeros(2, dtype=torch.int32),
    tables.small, tables.slots, tables.used,
)
weight = torch.zeros(64, 256, dtype=half)

def launches():
    jit.launch_kernel(fails, (1,), weight)
    segments.launch_some(weight, None, adapters, 64)

jit.compile_ahead(launches)
try:
    fails.warmup(weight, grid=(1,)).result()  # as a launch does
except triton.CompilationError as error:
    told = str(error)
kernels = product._kernel, segments._sum_kernel
found = [[*kernel.device_caches[0][0].values()] for kernel in kernels]
print(json.dumps({
    "cubins": [[len(one.asm["cubin"]) for one in some] for some in found],
    "compiled": all(type(one) is triton.compiler.CompiledKernel for some in found for one in some),
    "launched": len(jit._COMPILED),
    "told": told,
}))
"""


def test_kernels_are_compiled_ahead_and_errors_are_told_at_the_launch(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    # For up to 16 tokens, in one segment and in more; and for up to 64.
    products, sums = found["cubins"]
    assert (len(products), len(sums)) == (3, 1)
    assert all(size > 0 for size in (*products, *sums))
    assert found["compiled"]  # after another kernel's error, too
    assert found["launched"] == 0
    assert "as it is meant to" in found["told"]
