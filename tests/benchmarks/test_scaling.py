"""The formula for more GPUs, compared with the measurements on two."""

import pytest

from benchmarks.scaling import Measured, share


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_steps_of_two_gpus_are_predicted(kind, layout):
    """Within 10 %, from inference and from the step under data parallelism."""
    measured = Measured.read()
    found, wanted = measured.predicted(kind, layout, 2), measured.ms(kind, layout, "step")
    assert abs(found / wanted - 1) < 0.1


def test_the_link_is_nvlinks():
    # NVLink moves 450 GB/s in each direction; a measurement may be off by a fifth.
    assert 0.8 < Measured.read().link / 450 < 1.2


def test_shares_of_a_ring():
    assert (share("fsdp", 2), share("dp", 2), share("dp", 8)) == (0.5, 1.0, 1.75)
