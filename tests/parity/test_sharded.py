"""The level `sharded`: sound in every layout, and able to fail."""

import dataclasses

import pytest

from parity import sharded
from parity.cases import layer
from parity.faults import Fault
from parity.sides.torch import sharded as torch_sharded
from tests.tables import thinned
from torch_dora.ops import shards


def of_its_own_shard(norm):
    """Returns the operator of the norm, spoilt: the norm of the rows that a device has, as some
    row-parallel layers take it. At initialisation, where the magnitude is such a norm, no result
    tells."""

    def spoilt(static, shard, operands):
        return norm.run(static, dataclasses.replace(shard, summed=()), operands)

    return norm._replace(run=spoilt)


def of_its_own_part(norm):
    """Returns the same of torch's."""

    def spoilt(compute_local, root, weight, lora_a, lora_b):
        if not shards.is_sharded(weight):
            return compute_local(weight, lora_a, lora_b)
        found = compute_local(*shards.local_matrices(weight, lora_a, lora_b))
        return shards.from_local(
            found, weight, shards.placements_along(weight, 0), weight.shape[:1]
        )

    return spoilt


FAULT = Fault(
    "norm_of_a_shard",
    "the norm of a kernel's rows that one device has",
    (),
    {
        "jax_dora.ops.norm.NORM": of_its_own_shard,
        "torch_dora.ops.sharded.norm": of_its_own_part,
    },
)


# Of torch it is planted in the processes that compute.
def spoilt_layer(*arguments):
    with FAULT.plant("torch"):
        return torch_sharded.layer(*arguments)


def spoilt_losses(*arguments):
    with FAULT.plant("torch"):
        return torch_sharded.losses(*arguments)


ONE_AXIS = ("dp", "fsdp", "tp column", "tp row")


@pytest.mark.parametrize("name", thinned(sharded.LAYOUTS, ["tp row", "fsdp×tp column"]))
@pytest.mark.ci
def test_a_layout_agrees_with_fp64(report, name):
    # Of rows and a rank that do not divide over the mesh.
    run_last(report, name)
    assert len(report.rows) == 6
    assert report.passed


@pytest.mark.parametrize("name", thinned(["fsdp", "tp row", "fsdp×tp row"], ["tp row"]))
def test_the_norm_of_a_shard_is_caught(report, name):
    with FAULT.plant("jax"):
        run_last(report, name)
    assert not report.passed
    failed = {row["quantity"] for row in report.rows if not row["ok"]}
    assert {"y", "d_magnitude"} <= failed


# Of torch, whose processes take longer to start than to compute: all layouts in one run. With four
# processes 33 rows and a rank of 7 do not divide; of 3 outputs and 2 inputs some have none.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "processes", "names"),
    [
        (sharded.layers(quick=True)[-1], 2, ONE_AXIS),
        (sharded.layers(quick=True)[-1], 4, sharded.LAYOUTS),
        (layer("float32", 5, 2, 3, 1), 4, sharded.LAYOUTS),
    ],
)
def test_torch_agrees_with_fp64(report, case, processes, names):
    sharded.run(report, "torch", case, names, "cpu", processes=processes)
    assert len(report.rows) == 6 * len(names)
    assert report.passed


@pytest.mark.slow
def test_the_norm_of_a_shard_is_caught_in_torch(report, monkeypatch):
    monkeypatch.setattr(torch_sharded, "layer", spoilt_layer)
    names = ("tp row", "fsdp×tp row")
    sharded.run(report, "torch", sharded.layers(quick=True)[-1], names, "cpu")
    failed = {(row["case"].split(":")[0], row["quantity"]) for row in report.rows if not row["ok"]}
    assert {(name, quantity) for name in names for quantity in ("y", "d_magnitude")} <= failed


@pytest.mark.gpus
def test_torch_on_two_gpus_agrees_with_fp64(report):
    for case in sharded.layers(quick=True):
        sharded.run(report, "torch", case, ONE_AXIS, "cuda", processes=2)
    assert report.passed


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(sharded.LAYOUTS, ["tp row"]))
def test_a_layout_trains_as_one_device(report, name):
    sharded.train(report, "jax", (name,), "cpu")
    assert report.passed, report.rows


@pytest.mark.slow
def test_the_norm_of_a_shard_is_right_at_first(report):
    """And wrong as soon as the adapter has moved."""
    with FAULT.plant("jax"):
        sharded.train(report, "jax", ("tp row",), "cpu")
    assert [row["ok"] for row in report.rows] == [True, False]


@pytest.mark.slow
def test_torch_trains_as_one_device(report):
    sharded.train(report, "torch", sharded.LAYOUTS, "cpu")
    assert report.passed, report.rows


@pytest.mark.slow
def test_the_norm_of_a_shard_is_right_at_first_in_torch(report, monkeypatch):
    monkeypatch.setattr(torch_sharded, "losses", spoilt_losses)
    sharded.train(report, "torch", ("tp row",), "cpu")
    assert [row["ok"] for row in report.rows] == [True, False]


def run_last(report, name):
    sharded.run(report, "jax", sharded.layers(quick=True)[-1], (name,), "cpu")
