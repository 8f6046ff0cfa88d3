"""The same operands give the same bits, run after run: outputs and gradients, in both packages.

No reduction of a kernel of ours uses atomics; the order of its sums is that of its grid.
"""

import importlib

import numpy as np
import pytest
import torch

from parity import cases
from parity.sides import SIDES

GPU_RUNS, CPU_RUNS = 100, 4
# rows, in, out, rank: one that every kernel takes, the whole projection included, and one that no
# tile divides.
SHAPES = {"even": (512, 2048, 2048, 384), "ragged": (37, 208, 328, 24)}
SMALL = (37, 48, 72, 8)
EVERY = [(name, one) for name, side in SIDES.items() for one in (side.plain, side.kernels)]


def bits(found):
    """Returns the results of a computation in fp32's bits: bf16 keeps its own there, NaN equals NaN
    and 0 differs from -0."""
    found = found if isinstance(found, dict) else {"norm": found}
    return {name: one.float().cpu().numpy().view(np.uint32) for name, one in found.items()}


def check(side, implementation, shape, runs, device):
    rows, _, n_out, _ = shape
    layer = cases.layer("bfloat16", *shape, bias=False)
    compose = cases.compose("bfloat16", rows, n_out)
    drawn = cases.layer_inputs(layer, device), cases.compose_inputs(compose, device)
    operators = SIDES[side].operators
    # Mosaic's kernel of the norm takes sizes of its own.
    of_norm = None if implementation == "mosaic" else implementation
    for computation, count in (
        (operators.norm(drawn[0], layer.scale, of_norm), 1),
        (operators.compose(drawn[1], compose.scale, implementation, frozen=False), 2 * 4),
        (operators.layer(drawn[0], layer.scale, implementation, frozen=False), 5),
    ):
        first = bits(computation())
        assert len(first) == count
        for run in range(1, runs):
            for name, found in bits(computation()).items():
                assert (found == first[name]).all(), f"{name} differs in run {run + 1}"


@pytest.mark.parametrize("side", SIDES)
def test_a_side_repeats_itself(side):
    check(side, SIDES[side].plain, SMALL, CPU_RUNS, "cpu")


def test_a_sum_in_another_order_is_noticed(monkeypatch):
    linear = importlib.import_module("torch_dora.ops.linear")
    right, calls = linear._scaled_mm, iter(range(1000))

    def wanders(a, b, scale, dtype):
        order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(next(calls)))
        return right(a[:, order].float(), b[order].float(), scale, dtype)

    monkeypatch.setattr(linear, "_scaled_mm", wanders)
    with pytest.raises(AssertionError, match="differs in run"):
        check("torch", "eager", SMALL, CPU_RUNS, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("side", "implementation"), EVERY)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_side_repeats_itself_on_a_gpu(side, implementation, shape):
    check(side, implementation, shape, GPU_RUNS, "cuda")
