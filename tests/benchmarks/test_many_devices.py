"""A user's decoder, a Python list of layers, on more devices than there are: its programs are
compiled for CPU devices that XLA only counts."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import jax
import pytest

from benchmarks.collectives import collectives
from benchmarks.model.placed import LAYOUTS, Placed, placed
from benchmarks.model.protocol import QUICK, Protocol
from benchmarks.scale import lowered, operands_of, program
from jax_dora.ops.dispatch import partitions
from tests.jax_dora.programs import operations

# Every axis is a multiple of 64, on tp with 64 devices too.
SIZES = Protocol(256, 512, 64, 64, 8, 512, rank=8, alpha=8**0.5, layers=1, tokens=32, last=8)
MESHES = ("dp", "fsdp", "tp", "fsdp-tp")
COUNTS = (4, 8, 64)


def model_of(kind: str, layout: str, devices: int, sizes: Protocol) -> tuple[Placed, Any]:
    mesh = LAYOUTS[layout].mesh("auto", devices)
    return placed(kind, LAYOUTS[layout], mesh, sizes, "cpu", scanned=False), mesh


def in_a_layer(kind: str, task: str) -> float:
    """Returns the number of operations that a further layer of a list adds to a program for a mesh,
    without those inside of operators, of which a program has one copy for all layers."""
    counts = []
    for layers in (1, 2):
        model, mesh = model_of(kind, "fsdp", 2, dataclasses.replace(QUICK, layers=layers))
        with jax.set_mesh(mesh):
            traced = program(task, model, QUICK.last).trace(*operands_of(task, model))
        counts.append(operations(traced.lower().as_text()))
    return counts[1] - counts[0]


@pytest.mark.ci
def test_a_layer_adds_few_operations():
    """XLA's time grows with them. 245 of a step's are the optimizer's for seven magnitudes."""
    assert in_a_layer("DoRA", "step") <= 1.32 * in_a_layer("LoRA", "step")
    assert in_a_layer("DoRA", "inference") <= 1.3 * in_a_layer("LoRA", "inference")


def lowered_shards(kind: str, layout: str, devices: int, sizes: Protocol) -> tuple[str, int]:
    """Returns the compiled step, and how many shards of operators were lowered for it."""
    before = partitions._lowered.cache_info().misses
    model, mesh = model_of(kind, layout, devices, sizes)
    text = lowered("step", model, mesh, sizes.last).compile().as_text()
    return text, partitions._lowered.cache_info().misses - before


@pytest.mark.slow
def test_shards_are_lowered_once_for_all_layers():
    two, four = (dataclasses.replace(QUICK, layers=layers, rank=12) for layers in (2, 4))
    assert lowered_shards("DoRA", "fsdp", 2, two)[1] > 5
    assert lowered_shards("DoRA", "fsdp", 2, four)[1] == 0


def found_on(devices: int) -> dict[str, dict[str, list[int]]]:
    """Returns the bytes that a device sends in a step, the most in one collective, and the number
    of shards of operators, by layout and kind."""
    found: dict[str, dict[str, list[int]]] = {}
    for layout in MESHES:
        found[layout] = {}
        for kind in ("LoRA", "DoRA"):
            text, shards = lowered_shards(kind, layout, devices, SIZES)
            sent = [one.bytes for one in collectives(text)]
            found[layout][kind] = [sum(sent), max(sent), shards]
    return found


def in_a_process(devices: int) -> dict[str, dict[str, list[int]]]:
    """Returns `found_on` of a process that has so many devices."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    code = "import json; from tests.benchmarks.test_many_devices import found_on; "
    code += f"print(json.dumps(found_on({devices})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_many_devices():
    """Only vectors travel beyond what LoRA sends: the magnitudes' gradients, and the sums of the
    norms. Nothing depends on the number of devices, as `benchmarks.scaling` assumes."""
    vectors = 4 * sum(n_out for _, n_out in SIZES.projections().values())
    first, *others = map(in_a_process, COUNTS)
    for layout, (lora, dora) in ((name, kinds.values()) for name, kinds in first.items()):
        # Each is summed in parts, which are then gathered.
        assert dora[0] <= lora[0] + 2 * 2 * vectors, layout
        assert dora[1] <= lora[1] + vectors, layout
        assert dora[2] > 5, layout
        for kind, (sent, _, shards) in first[layout].items():
            for other in (found[layout][kind] for found in others):
                assert other[0] == pytest.approx(sent, rel=0.01), (layout, kind)
                assert other[2] == shards, (layout, kind)
