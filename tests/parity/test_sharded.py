"""The level `sharded`: sound in every layout, and able to fail."""

import jax
import pytest

from parity import sharded
from parity.faults import Fault, Point
from parity.report import Report

FAULT = Fault(
    "norm_of_a_shard",
    "the norm of a kernel's rows that one device has",
    (),
    {"jax": (Point("jax_dora.ops.norm", "NORM", sharded.of_its_own_shard),)},
)


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "sharded.jsonl", "sharded", {})


@pytest.mark.parametrize("name", sharded.LAYOUTS)
def test_a_layout_agrees_with_fp64(report, name):
    # Of rows and a rank that do not divide over the mesh.
    run_last(report, name)
    assert len(report.rows) == 6
    assert report.passed


@pytest.mark.parametrize("name", ["fsdp", "tp row", "fsdp×tp row"])
def test_the_norm_of_a_shard_is_caught(report, name):
    with FAULT.plant("jax"):
        run_last(report, name)
    assert not report.passed
    failed = {row["quantity"] for row in report.rows if not row["ok"]}
    assert {"y", "d_magnitude"} <= failed


def run_last(report, name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        sharded.run(report, sharded.cases(quick=True)[-1], name, "cpu")
