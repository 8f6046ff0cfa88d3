"""Training runs: both frameworks step alike, verdicts can fail, reports hold what was found."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from parity.faults import FAULTS
from parity.model.sizes import PROJECTIONS
from parity.report import Report, read
from parity.sides import SIDES
from parity.sides.jax import training as jax_training
from parity.sides.torch import training as torch_training
from parity.training import adapter as adapters
from parity.training import quick, variants
from parity.training.difference import FULL_PRECISION, PAPER, Run, compare
from parity.training.settings import Settings
from parity.training.variants import EAGER, MOSAIC, TRITON, XLA, XLA_OFF

SMALL = Settings.tiny(layers=1, rank=4, steps=20)


@pytest.mark.slow
def test_quick_check_passes_and_really_trains():
    found = quick.difference({side: quick.train(side) for side in SIDES})
    assert found.within(FULL_PRECISION)
    assert found.travelled > 0.1
    assert found.drift < 1e-3 * found.travelled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "backend"), [("norm_attached", "jax"), ("cross_term_dropped", "torch")]
)
def test_quick_check_notices(fault, backend):
    with FAULTS[fault].plant(backend):
        runs = {side: quick.train(side) for side in SIDES}
    assert not quick.difference(runs).within(FULL_PRECISION)


@pytest.mark.slow
def test_peft_takes_the_same_steps():
    settings = dataclasses.replace(quick.SETTINGS, steps=8)
    base = quick.base()
    start = adapters.initial(settings, base, 1)
    ours = torch_training.train(settings, base, start, 1, "eager")
    theirs = torch_training.train(settings, base, start, 1, "peft")
    assert compare(ours, theirs, start).within(FULL_PRECISION)


@pytest.mark.slow
def test_bf16_runs_stay_within_the_papers_figures():
    # Evaluated on enough bytes for the rounding of single ones to average out.
    settings = dataclasses.replace(quick.SETTINGS, dtype="bfloat16", steps=12, eval_rows=256)
    base = quick.base()
    start = adapters.initial(settings, base, 3)
    ours = jax_training.train(settings, base, start, 3, "xla")
    theirs = torch_training.train(settings, base, start, 3, "eager")
    found = compare(ours, theirs, start)
    assert found.within(PAPER)
    # Two programs that round alike by accident would prove nothing.
    assert found.figures.mean > 1e-7


def test_every_kernel_takes_the_models_sizes():
    from jax_dora.ops.mosaic.norm import one_pass_norm
    from jax_dora.ops.mosaic.projection import project

    settings = Settings()
    assert settings.rows * settings.length >= 4096
    for name in PROJECTIONS:
        n_out, n_in = settings.shapes()[name]
        rows = settings.rows * settings.length
        assert project.refuses(rows, n_in, n_out, jnp.bfloat16) is None
        assert one_pass_norm.refuses(n_in, settings.rank, n_out, jnp.bfloat16, jnp.float32) is None


def _adapter(seed):
    rng = np.random.default_rng(seed)
    shapes = {"lora_a": (1, 4, 64), "lora_b": (1, 64, 4), "magnitude": (1, 64)}
    return {
        p: {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        for p in PROJECTIONS
    }


def _run(difference=0.0, eval_after=2.5, steps=20):
    losses = np.linspace(3, 2, steps)
    losses[7] += difference
    return Run(losses, np.ones(steps), 3.0, eval_after, _adapter(2), 1.0)


def _report(tmp_path, runs):
    report = Report(tmp_path / "training.jsonl", "training", {})
    for variant, run in runs.items():
        variants.write_run(report, (1, variant), run, curve=True)
    variants.write_pairs(report, SMALL, 1, runs, _adapter(1))
    return report


def test_a_report_judges_across_frameworks_and_not_the_floor(tmp_path):
    report = _report(tmp_path, {XLA: _run(), EAGER: _run(1e-3), XLA_OFF: _run(1.0)})
    assert report.passed
    rows = read(tmp_path / "training.jsonl")[1]
    judged = [row for row in rows if row["ok"] is not None]
    assert [row["quantity"] for row in judged] == list(variants.QUANTITIES)
    assert {row["side"] for row in judged} == {"jax xla, torch eager"}
    assert [row["error"] for row in judged] == pytest.approx([1e-3 / 20, 1e-3, 0])
    assert judged[0]["worst_step"] == 8
    assert len([row for row in rows if row.get("kind") == "rounding floor"]) == 3
    assert len(next(row for row in rows if row["quantity"] == "run")["curve"]["loss"]) == 2


@pytest.mark.parametrize(
    "other",
    [_run(1.2e-2), _run(eval_after=2.5002), _run(float("nan"))],
    ids=["worst step", "evaluation", "NaN"],
)
def test_a_report_fails(other, tmp_path):
    assert not _report(tmp_path, {MOSAIC: _run(), TRITON: other}).passed


def test_a_perturbed_adapter_is_one_ulp_off():
    start = _adapter(1)
    off = adapters.one_ulp_off(start, 1)
    for name in PROJECTIONS:
        a, b = start[name]["lora_a"], off[name]["lora_a"]
        assert (np.abs(a - b) == np.spacing(np.minimum(np.abs(a), np.abs(b)))).all()
        assert (start[name]["magnitude"] == off[name]["magnitude"]).all()
