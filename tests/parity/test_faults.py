"""Parity must be able to fail: errors planted in each package are caught, on the side at fault."""

import importlib
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch

import torch_dora.ops
from parity.__main__ import main


class Fault(NamedTuple):
    """`spoil` maps the function `name` of a module to a wrong one; `case` must then fail."""

    side: str
    module: str
    name: str
    spoil: Callable
    case: str
    quantity: str


def _without_cross_jax(correction):
    return lambda a, gram, scale, kernel, b: correction(a, gram, scale, 0 * kernel, b)


def _without_cross_torch(terms):
    def spoilt(*arguments):
        cross, ba_sq = terms(*arguments)
        return torch.zeros_like(cross), ba_sq

    return spoilt


def _eps_in_the_root_jax(assemble):
    return lambda *arguments: jnp.sqrt(assemble(*arguments) ** 2 + 1e-6)


def _eps_in_the_root_torch(sqrt):
    return lambda square: sqrt(square + 1e-6)


def _eps_added_jax(magnitude_scale):
    return lambda magnitude, norm, dtype: magnitude / (norm + 1e-6)


def _rounded_g_jax(op):
    def spoilt(base, lora, g, *rest, **options):
        return op(base, lora, g.astype(jnp.bfloat16).astype(g.dtype), *rest, **options)

    return spoilt


def _rounded_g_torch(op):
    def spoilt(base, lora, g, *rest, **options):
        return op(base, lora, g.bfloat16().to(g.dtype), *rest, **options)

    return spoilt


def _attached_norm_jax(factored_norm):
    def spoilt(kernel, lora_a, lora_b, scale, **options):
        norm = factored_norm(kernel, lora_a, lora_b, scale, **options)
        dense = kernel.astype(jnp.float32) + scale * (lora_a @ lora_b)
        return (
            norm
            + jnp.linalg.norm(dense, axis=0)
            - jax.lax.stop_gradient(jnp.linalg.norm(dense, axis=0))
        )

    return spoilt


def _attached_g_jax(magnitude_scale):
    return lambda magnitude, norm, dtype: magnitude / jnp.maximum(norm, 1e-6)


def _attached_norm_torch(factored_norm):
    def spoilt(weight, lora_a, lora_b, scale, **options):
        dense = torch.linalg.vector_norm(weight.float() + scale * (lora_b @ lora_a), dim=1)
        return factored_norm(weight, lora_a, lora_b, scale, **options) + dense - dense.detach()

    return spoilt


def _attached_g_torch(magnitude_scale):
    return lambda magnitude, norm, dtype: magnitude / norm.clamp(min=1e-6)


norm_case, near_unity = "^norm 96x64 r64 float32", "^compose 7x72 bfloat16 near unity"
zero_rows, layer = "^norm 192x128 r16 float32 zero rows", "^layer 33x96x64 r16 float32$"
FAULTS = {
    "jax: no cross term": [
        Fault("jax", "jax_dora.ops.norm", "_correction", _without_cross_jax, norm_case, "norm")
    ],
    "jax: eps in the root": [
        Fault("jax", "jax_dora.ops.norm", "_assemble", _eps_in_the_root_jax, zero_rows, "norm")
    ],
    "jax: eps added to the norm": [
        Fault("jax", "jax_dora.ops", "magnitude_scale", _eps_added_jax, norm_case, "g")
    ],
    "jax: g in bf16": [
        Fault(
            "jax", "jax_dora.ops.compose", "define", _rounded_g_jax, near_unity, "compose_delta y"
        )
    ],
    "jax: g in bf16, mosaic alone": [
        Fault(
            "jax",
            "jax_dora.ops.mosaic.compose",
            "compose",
            _rounded_g_jax,
            near_unity,
            "compose_delta y",
        )
    ],
    "jax: gradient through the norm": [
        Fault("jax", "jax_dora.ops.linear", "factored_norm", _attached_norm_jax, layer, "d_lora_b"),
        Fault("jax", "jax_dora.ops.linear", "magnitude_scale", _attached_g_jax, layer, "d_lora_b"),
    ],
    "torch: no cross term": [
        Fault(
            "torch",
            "torch_dora.ops.norm",
            "_adapter_terms",
            _without_cross_torch,
            norm_case,
            "norm",
        )
    ],
    "torch: eps in the root": [
        Fault("torch", "torch_dora.ops.norm", "_sqrt", _eps_in_the_root_torch, zero_rows, "norm")
    ],
    "torch: g in bf16": [
        Fault(
            "torch", "torch_dora.ops.compose", "forward", _rounded_g_torch, near_unity, "compose y"
        )
    ],
    "torch: g in bf16, triton alone": [
        Fault(
            "torch",
            "torch_dora.ops.triton.compose_forward",
            "compose_with_inner",
            _rounded_g_torch,
            near_unity,
            "compose_delta y",
        )
    ],
    "torch: gradient through the norm": [
        Fault(
            "torch",
            "torch_dora.ops.linear",
            "factored_norm",
            _attached_norm_torch,
            layer,
            "d_lora_b",
        ),
        Fault(
            "torch",
            "torch_dora.ops.linear",
            "magnitude_scale",
            _attached_g_torch,
            layer,
            "d_lora_b",
        ),
    ],
}


@pytest.fixture(autouse=True)
def fresh_traces():
    """Functions traced before a fault was planted would run on without it, and after it, with."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_error_is_caught(faults, monkeypatch, tmp_path):
    for fault in faults:
        module = importlib.import_module(fault.module)
        monkeypatch.setattr(module, fault.name, fault.spoil(getattr(module, fault.name)))
    first = faults[0]
    code = main(["--device", "cpu", "--case", first.case, "--out", str(tmp_path)])
    assert code == 1
    report = json.loads((tmp_path / "parity.json").read_text())
    assert not report["passed"]
    failed = [row for row in report["rows"] if not row["passed"]]
    assert first.quantity in {row["quantity"] for row in failed}
    other = "torch" if first.side == "jax" else "jax"
    for row in failed:
        assert not row["failure"]
        assert row[other]["error"] <= row[other]["tolerance"]
        assert row[other]["of_bound"] <= 1
    assert "SOME CHECKS FAILED" in (tmp_path / "parity.md").read_text()


def test_a_crash_is_a_failure(monkeypatch, tmp_path):
    def crash(*_, **__):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(torch_dora.ops, "compose", crash)
    code = main(["--device", "cpu", "--case", "^compose 5x43 float32", "--out", str(tmp_path)])
    assert code == 1
    rows = json.loads((tmp_path / "parity.json").read_text())["rows"]
    assert any("RuntimeError: no such luck" in row["failure"] for row in rows)
