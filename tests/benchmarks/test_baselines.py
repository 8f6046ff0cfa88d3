import jax
import pytest
import torch

from benchmarks import baselines
from benchmarks.check import judge
from benchmarks.work import Expectation
from parity import oracle, tolerances
from parity.cases import Case, layer_inputs


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    case = Case("operator", "float32", n_in=200, n_out=56, rank=12, bias=False)
    drawn = layer_inputs(case, "cpu")
    return drawn.weight, drawn.lora_a, drawn.lora_b, case.scale


@pytest.fixture
def expected(operands) -> dict[str, Expectation]:
    return {"norm": Expectation(oracle.norm(*operands), tolerances.norm(*operands))}


@pytest.mark.parametrize("norm", ["paper_norm", "peft_norm", "torch_dense_norm"])
def test_torch_norms(norm: str, operands, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several chunks, the last of them narrower.
    monkeypatch.setattr(baselines, "PAPER_CHUNK_BYTES", 64 * 4 * 56)
    found = getattr(baselines, norm)(*operands)
    assert judge({"norm": found}, expected, exact=True)["passed"]


def test_dense_norm_in_jax(operands, expected) -> None:
    weight, lora_a, lora_b, scale = operands
    arrays = [jax.numpy.asarray(t.numpy().T) for t in (weight, lora_a, lora_b)]
    found = torch.from_dlpack(baselines.dense_norm(*arrays, scale))
    assert judge({"norm": found}, expected, exact=True)["passed"]
