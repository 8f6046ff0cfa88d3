"""Runs every GPU kernel of both packages once under NVIDIA's compute-sanitizer.

    python tools/sanitize.py --out FILE [--tool memcheck --tool racecheck] [--kernel NAME]

The command starts this file again under `compute-sanitizer` for each kernel and tool. It writes a
JSON line for each: the number of errors (null if the tool could not run) and the seconds. Shapes
are small, because the tools slow a kernel down a thousandfold, and ragged. Planted faults show that
the tools see our kernels.

The exit status is 1 if a tool found any other error, missed a planted fault, or could not run. If
compute-sanitizer is missing, or no kernel has the given name, nothing is written.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

ROWS, IN, RANK, OUT = 200, 192, 72, 328
SCALE = 0.7
JOBS = 4
SIZES = {"rows": ROWS, "in": IN, "rank": RANK, "out": OUT}
ALIGNED = SIZES | {"out": 320}
# A scale of 4-bit codes belongs to 64 rows, and TMA reads rows of at least 16 bytes.
TILED = ALIGNED | {"tiles": IN // 64, "rows": 7, "out": 512}
# The threads of a thread block share a row evenly, or a kernel takes whole tiles only.
WHOLE = SIZES | {"in": 256, "out": 384}
# FP8 codes are read in slices of 128, beside an adapter of at most 16 ranks.
CODED = WHOLE | {"out": 320, "rank": 16}
# With a bank, the tokens of a row fill whole tiles, and ranks are multiples of 8.
GROUPED = ALIGNED | {"groups": 3, "layers": 2, "slots": 4, "time": 128, "rank": 72}
# The kernels for few rows of a bank take small ranks.
FEW = GROUPED | {"rows": 7, "rank": 24}
# The faults that each tool must find.
PLANTED = {
    "memcheck": ("jax/planted overrun", "torch/planted overrun"),
    "racecheck": ("jax/planted race",),
}


@triton.jit
def _overrunning_kernel(pointer):
    tl.store(pointer + 1_000_000 + tl.arange(0, 32), 1.0)


def jax_kernels() -> dict[str, Callable[[], object]]:
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from benchmarks.kernels import KERNELS as TABLE
    from jax_dora import ops

    def planted(body):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
            scratch_types=[plgpu.SMEM((128,), jnp.float32)],
            num_threads=2,
            thread_name="warpgroup",
            kernel_name="dora_planted",
        )()

    def race(out_gmem, smem):
        """Plants a race: one warpgroup reads what another one writes, without waiting for it."""

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _write():
            smem[...] = jnp.ones(smem.shape, jnp.float32)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _read():
            out_gmem[...] = smem[...]

    def overrun(out_gmem, smem):
        """Plants an overrun: both warpgroups write a million elements past the end."""
        past = 1_000_000 * (1 + lax.axis_index("warpgroup"))
        out_gmem[pl.ds(past, 128)] = jnp.ones(smem.shape, jnp.float32)

    def norm_of_fp32_adapters():
        kernel, a, b = TABLE["one_pass_norm"].draw(SIZES)
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return ops.factored_norm(kernel, a, b, SCALE, implementation="mosaic")

    def layer():
        """Runs a layer in training: with a bias, and with residuals for the gradient."""
        x, kernel, _, b, g = TABLE["project"].draw(ALIGNED)
        _, a, _ = TABLE["one_pass_norm"].draw(ALIGNED)

        def summed(a, b, g):
            options = {"bias": g.astype(x.dtype), "implementation": "mosaic"}
            return ops.dora_linear(x, kernel, a, b, g, SCALE, **options).sum()

        return jax.grad(summed, (0, 1, 2))(a, b, g)

    def launched(name):
        kernel, sizes = TABLE[name], SIZES
        if name == "transposing_norm":
            sizes = WHOLE | {"tiles": 1, "out": 512}  # a multiple of its four consumers' columns
        elif "tiles" in kernel.operands:
            sizes = TILED | ({"rows": ROWS} if name == "decode_quantised" else {})
        elif name.startswith(("project", "shrink", "decode_project", "decode_finish")):
            sizes = ALIGNED  # The tiles of the tensor cores have no ragged columns.
        elif name.startswith("bank"):
            sizes = FEW if name == "bank_decode" else GROUPED
        elif name == "coded_matmul":
            sizes = CODED
        elif name in ("row_codes", "stationary_norm", "swiglu_codes"):
            sizes = WHOLE
        return lambda: kernel.launch(*kernel.draw(sizes))

    return {
        "planted race": lambda: planted(race),
        "planted overrun": lambda: planted(overrun),
        **{name: launched(name) for name in TABLE},
        "norm fp32 adapters": norm_of_fp32_adapters,
        "layer": layer,
    }


DEVICE = "cuda"  # of torch's kernels


def torch_kernels() -> dict[str, Callable[[], object]]:
    import torch

    from torch_dora.ops.triton import (
        bank_expand,
        bank_shrink,
        compose_backward,
        compose_forward,
        expand_compose,
        norm_assembly,
        one_pass_norm,
    )

    torch.manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    rows, g, bias = draw(ROWS, OUT), draw(OUT, dtype=torch.float32), draw(OUT)
    z, a, b, weight = draw(ROWS, RANK), draw(RANK, IN), draw(OUT, RANK), draw(OUT, IN)
    squares = draw(OUT, dtype=torch.float32).abs()
    slots = draw(2, RANK, IN), draw(2, RANK, OUT), draw(2, OUT, dtype=torch.float32), squares[:2]
    ranks = torch.full((2,), RANK - 1, dtype=torch.int32, device=DEVICE)
    ids = torch.arange(-1, 2, device=DEVICE)
    groups = bank_shrink.group_rows(ids.cpu()).to(DEVICE)
    return {
        "planted overrun": lambda: _overrunning_kernel[(1,)](squares),
        "bank": lambda: bank_expand.bank_linear(
            rows[:198].view(3, 66, OUT), draw(3, 66, IN), *slots, ranks, ids, None, bias
        ),
        "bank, one token a row": lambda: bank_expand.bank_linear(
            rows[:3, None], draw(3, 1, IN), *slots, ranks, ids, groups, bias
        ),
        "compose": lambda: compose_forward.compose(rows, rows, g, bias, SCALE, False, True),
        "compose_backward": lambda: compose_backward.compose_backward(
            rows, rows, g, SCALE, False, True, True
        ),
        "expand_compose": lambda: expand_compose.expand_compose(rows, z, b, g, bias, SCALE, True),
        "norm_assembly": lambda: norm_assembly.launch(squares, squares, squares, SCALE),
        "one_pass_norm": lambda: one_pass_norm.launch(weight, a, b, SCALE),
        "one_pass_norm, fp32 adapters": lambda: one_pass_norm.launch(
            weight, a.float(), b.float(), SCALE
        ),
    }


KERNELS = {"jax": jax_kernels, "torch": torch_kernels}


def run_one(name: str) -> None:
    framework, _, kernel = name.partition("/")
    result = KERNELS[framework]()[kernel]()
    if framework == "jax":
        import jax

        jax.block_until_ready(result)
    else:
        import torch

        torch.cuda.synchronize()


def sanitize(tool: str, name: str) -> dict[str, Any]:
    """Runs `tool` on the kernel `name`; returns errors, seconds and the last lines of output."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    # Our own kernels alone: the frameworks' need no check, and each one takes time.
    ours = "dora" if name.startswith("jax") else "kernel"
    command += ["--kernel-name", f"kernel_substring={ours}"]
    environment = os.environ | {
        # Each array is an allocation of its own, so that memcheck knows where it ends.
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    start = time.perf_counter()
    done = subprocess.run(
        [*command, sys.executable, __file__, "--one", name],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    errors = errors_of(done.stdout, done.returncode)
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    shown = lines[:12] if errors else lines[-1:] if errors == 0 else done.stdout.splitlines()[-12:]
    return {
        "errors": errors,
        "seconds": round(time.perf_counter() - start, 1),
        "last": "\n".join(shown),
    }


def errors_of(output: str, code: int) -> int | None:
    """Returns the number of errors that a tool has found, or None if it could not run."""
    # "ERROR SUMMARY: 3 errors", or racecheck's "RACECHECK SUMMARY: 1 hazard displayed (…)".
    # Past 100, memcheck adds a second: "ERROR SUMMARY: 4 errors were not printed. …".
    errors = max(map(int, re.findall(r"SUMMARY: (\d+)", output)), default=None)
    # A process that failed without an error of the tool has not run the whole kernel.
    return None if code and not errors else errors


def as_expected(name: str, errors: int | None) -> bool:
    """Returns whether a tool has found errors if they are planted, and none otherwise."""
    return bool(errors) if "planted" in name else errors == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="the file of results to write")
    parser.add_argument("--tool", action="append", choices=("memcheck", "racecheck"))
    parser.add_argument("--kernel", default="", help="run only kernels whose name contains this")
    parser.add_argument("--commit", help="commit to record, if this is not a git checkout")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.one)
        return 0

    from benchmarks.results import Writer
    from parity.environment import environment

    if not shutil.which("compute-sanitizer"):
        sys.exit("compute-sanitizer is not on PATH; the CUDA toolkit brings it")
    names = [f"{framework}/{name}" for framework in KERNELS for name in KERNELS[framework]()]
    chosen = [
        (tool, name)
        for tool in options.tool or ["memcheck", "racecheck"]
        for name in names
        if options.kernel in name and ("planted" not in name or name in PLANTED[tool])
    ]
    if not chosen:
        sys.exit(f"--kernel {options.kernel!r} chooses none of: {', '.join(names)}")
    with ThreadPoolExecutor(JOBS) as pool:
        runs = {(tool, name): pool.submit(sanitize, tool, name) for tool, name in chosen}
    facts = environment("cuda", options.commit)
    header = {"kind": "sanitizer", "level": "sanitize", "environment": facts}
    writer = Writer(options.out, header) if options.out else None
    clean = True
    for (tool, name), run in runs.items():
        result = run.result()
        last = result.pop("last")
        print(f"{tool:10s} {name:26s} {result['errors']} errors, {result['seconds']} s", flush=True)
        if not as_expected(name, result["errors"]):
            print(last)
            clean = False
        if writer:
            writer.add({"tool": tool, "kernel": name} | result)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
