"""Whole models: the fp64 reference is the published model, the command runs, and it can fail."""

import copy
import dataclasses

import pytest
import torch

from jax_dora.lm.models import rope
from parity.__main__ import main
from parity.model import reference
from parity.model.checks import FP64, PEFT, judge
from parity.model.measure import compare, compare_logits
from parity.model.sizes import ADAPTER, PROJECTIONS, QWEN3_8B, TINY, Run, runs
from parity.model.systems import execute, systems
from parity.model.weights import Result, draw, rope_frequencies
from parity.report import Report, read
from parity.sides.torch import decoder as torch_decoder

RUN = Run(TINY, "float32", layers=2, tokens=20, last=12)


@pytest.fixture(scope="module")
def weights():
    return draw(RUN, "cpu")


@pytest.fixture(scope="module")
def results(weights):
    report = Report(None, "model", {})
    results = execute(report, RUN, weights, systems(RUN))
    assert not [row for row in report.rows if row["ok"] is False]
    return results


def _published(weights, merged):
    """transformers' model in fp64, of base weights or of merged ones."""
    model = torch_decoder._model(RUN, weights).double()
    with torch.no_grad():
        for path, adapter in (weights.adapter if merged else {}).items():
            for layer, a, b, m in zip(model.model.layers, *adapter.values(), strict=True):
                linear = layer.get_submodule(path)
                direction = linear.weight + TINY.scale * (b.double() @ a.double())
                norm = torch.linalg.vector_norm(direction, dim=1)
                linear.weight = torch.nn.Parameter((m / norm)[:, None] * direction)
        return model(input_ids=weights.tokens[:, :-1], logits_to_keep=RUN.last).logits[0]


def test_all_rotate_by_the_same_frequencies(weights):
    model = torch_decoder._model(RUN, weights)
    expected = rope_frequencies(TINY, torch.device("cpu"))
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)
    ours = rope.frequencies(rope.Rope(theta=TINY.rope_theta), TINY.head_dim)
    torch.testing.assert_close(torch.from_numpy(ours), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_reference_is_the_published_model(weights, adapted):
    expected = _published(weights, merged=adapted)
    found = reference.compute(RUN, weights, adapted=adapted)
    # transformers rotates and normalises in fp32 even in an fp64 model.
    assert compare_logits(found.logits, expected).relative < 1e-6


def test_the_references_gradients_are_those_of_finite_differences(weights):
    gradients = reference.compute(RUN, weights).gradients
    generator = torch.Generator().manual_seed(3)
    for kind in ("self_attn.q_proj.lora_a", "mlp.down_proj.lora_b", "self_attn.v_proj.magnitude"):
        path, _, field = kind.rpartition(".")
        first = {name: every[0].double() for name, every in weights.adapter[path].items()}
        direction = torch.randn(first[field].shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()

        def loss(step, path=path, field=field, first=first, direction=direction):
            moved = first | {field: first[field] + step * direction}
            if field != "magnitude":
                # The norm is held constant, so the magnitude follows it.
                base = weights.base[f"model.layers.0.{path}.weight"].double()
                moved["magnitude"] = first["magnitude"] * _norm(base, moved) / _norm(base, first)
            of = {name: [moved[name], *every[1:]] for name, every in weights.adapter[path].items()}
            model = dataclasses.replace(weights, adapter=weights.adapter | {path: of})
            return reference.compute(RUN, model).loss

        step = 1e-4
        slope = (loss(step) - loss(-step)) / (2 * step)
        assert slope == pytest.approx((gradients[kind][0] * direction).sum().item(), rel=1e-5)


def _norm(weight, adapter):
    product = adapter["lora_b"] @ adapter["lora_a"]
    return torch.linalg.vector_norm(weight + TINY.scale * product, dim=1)


def failed(results):
    """Returns the checks of these results that fail, some of which there are."""
    report = Report(None, "model", {})
    judge(report, RUN, results)
    judged = [row for row in report.rows if row["ok"] is not None]
    assert judged
    return [row for row in judged if not row["ok"]]


@pytest.mark.slow
def test_sound_systems_pass(results):
    assert not failed(results)
    kinds = {f"{name}.{kind}" for name in PROJECTIONS for kind in ADAPTER}
    assert results["jax"].gradients.keys() == results[PEFT].gradients.keys() == kinds
    for kind in kinds:
        assert [g.shape for g in results["jax"].gradients[kind]] == [
            g.shape for g in results[FP64].gradients[kind]
        ]
        assert all(g.abs().max() > 0 for g in results["jax"].gradients[kind])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["logits", "gradients"])
def test_a_wrong_logit_or_gradient_fails(results, part):
    wrong = copy.deepcopy(results["torch"])
    if part == "logits":
        wrong.logits[3] += 0.01 * wrong.logits[4]
    else:
        wrong.gradients["self_attn.k_proj.magnitude"][1] *= 1.001
    found = failed(results | {"torch": wrong})
    assert found
    assert all("torch" in row["side"] for row in found)


@pytest.mark.slow
def test_nan_fails(results):
    nan = {kind: [g * float("nan") for g in gs] for kind, gs in results["jax"].gradients.items()}
    logits = results["jax"].logits.clone()
    logits[0, 0] = float("nan")
    wrong = results | {"jax": Result(logits, 0.0, nan)}
    found = {row["quantity"] for row in failed(wrong)}
    assert {"logits, 1 - cosine", "logits, relative", "adapter's gradient, relative"} <= found


def test_measures():
    a = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    b = torch.tensor([[4.0, 3.0], [0.0, 1.0]])
    found = compare_logits(a, b)
    assert found.cosine == pytest.approx(1 - 25 / 26)
    assert found.relative == pytest.approx((2 / 26) ** 0.5)
    assert found.peak == 1
    assert found.top1 == 0.5
    p, q = torch.softmax(b[0].double(), 0), torch.softmax(a[0].double(), 0)
    assert found.kl_max == pytest.approx((p * (p / q).log()).sum().item())
    assert found.kl_mean == pytest.approx(found.kl_max / 2)
    one = Result(a, 1.0, {"x": [a, b], "y": [b]})
    pair = compare(one, Result(b, 0.5, {"x": [b, b], "y": [b]}))
    assert pair.gradients["y"].relative == 0
    assert pair.gradients["x"].relative == pytest.approx((2 / 52) ** 0.5)
    assert pair.adapter.relative == pytest.approx((2 / 78) ** 0.5)


@pytest.mark.slow
def test_one_broken_system_does_not_stop_the_others(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(torch_decoder, "get_peft_model", broken)
    arguments = ["model", "--device", "cpu", "--dtype", "bf16", "--layers", "1"]
    code = main([*arguments, "--sequence", "16", "--out", str(tmp_path), "--commit", "abc"])
    assert code == 1
    header, rows = read(tmp_path / "model.jsonl")
    assert header["environment"]["commit"] == "abc"
    (failed,) = [row for row in rows if row["quantity"] == "result"]
    assert (failed["side"], failed["ok"]) == ("torch peft", False)
    assert failed["note"] == "RuntimeError: out of memory, say"
    losses = {row["side"]: row["run"] for row in rows if row["quantity"] == "loss"}
    assert {"torch", "jax", "fp64"} <= losses.keys()
    assert losses["torch"]["layers"] == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_implementation_is_run(device):
    named = {name for run in runs(device, ("bfloat16", "float32")) for name in systems(run)}
    of_jax = {"jax", "jax base", "jax mosaic", "jax xla"}
    of_torch = {"torch", "torch base", "torch peft", "torch triton", "torch eager"}
    assert named == {FP64, "fp64 base"} | of_jax | of_torch


def test_the_full_run_is_qwen3_8b():
    full = runs("cuda", ("bfloat16",))[0]
    assert full.sizes is QWEN3_8B
    assert (full.layers, full.tokens, full.last) == (36, 4096, 1024)
    assert QWEN3_8B.scale == pytest.approx(192 / 384**0.5)
    parameters = 36 * sum(a * b for a, b in QWEN3_8B.shapes().values())
    assert parameters + 2 * 151_936 * 4096 + 36 * (2 * 4096 + 2 * 128) + 4096 == 8_190_735_360
