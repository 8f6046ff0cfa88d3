"""The benchmark of several devices."""

import jax
import pytest

from benchmarks import scale
from benchmarks.model.placed import LAYOUTS, placed
from benchmarks.model.protocol import QUICK
from tests.tables import thinned


@pytest.mark.slow
@pytest.mark.parametrize("kind", thinned(["LoRA", "DoRA"], ["DoRA"]))
@pytest.mark.parametrize("layout", thinned(["tp", "fsdp"], ["tp"]))
def test_a_step_on_explicit_axes_is_typed(layout: str, kind: str) -> None:
    """Its results lie as what they replace."""
    sizes = QUICK
    mesh = LAYOUTS[layout].mesh("explicit", 2)
    model = placed(kind, LAYOUTS[layout], mesh, sizes, "cpu")
    # JAX's own attention does not promote strictly.
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        traced = scale.program("step", model, sizes.last).trace(*model[1:])
    _, trained, state = traced.out_info
    for found, given in ((trained, model.trained), (state, model.state)):
        places = zip(jax.tree.leaves(found), jax.tree.leaves(given), strict=True)
        assert all(one.sharding == other.sharding for one, other in places)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["auto", "explicit"])
def test_a_layout_is_measured(axes: str) -> None:
    settings = scale.TINY._replace(layouts=("tp",), axes=(axes,), devices=2)
    with jax.numpy_dtype_promotion("standard"):
        rows = list(scale.measure(settings, "cpu"))
    assert [(row["kind"], row["task"]) for row in rows] == [
        ("base", "inference"),
        ("LoRA", "inference"),
        ("LoRA", "step"),
        ("DoRA", "inference"),
        ("DoRA", "step"),
    ]
    assert all(row["ms"] > 0 and row["sent_bytes"] > 0 for row in rows)
