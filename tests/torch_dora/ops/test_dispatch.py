import pytest
import torch

from torch_dora.ops import compose, dispatch
from torch_dora.ops.compose import choose_compose
from torch_dora.ops.dispatch import Call, Candidate

CALL = Call(4096, 8192, 0, (torch.bfloat16, torch.bfloat16, torch.float32), "cuda", True)


def yes(call):
    return None


def no(call):
    return "it is blue"


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(dispatch, "TRITON_MODE", "compiled")


def test_takes_the_first_that_neither_refuses_nor_loses():
    refusing, losing, good = (
        Candidate("a", no, yes),
        Candidate("b", yes, no),
        Candidate("c", yes, yes),
    )
    assert dispatch.choose([refusing, losing, good], CALL, None) == "c"


def test_a_named_one_runs_although_it_loses():
    candidates = [Candidate("triton", yes, no), Candidate("eager", yes, yes)]
    assert dispatch.choose(candidates, CALL, "triton") == "triton"


def test_a_named_one_that_refuses_raises_its_reason():
    candidates = [Candidate("triton", no, yes), Candidate("eager", yes, yes)]
    with pytest.raises(NotImplementedError, match="'triton': it is blue"):
        dispatch.choose(candidates, CALL, "triton")


@pytest.mark.parametrize("name", ["mosaic", "xla", "cuda", ""])
def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(name):
    with pytest.raises(ValueError, match=r"implementation=.*'triton', 'eager'"):
        dispatch.choose([], CALL, name)


def test_triton_refuses_what_it_cannot_compute(compiled):
    assert dispatch.triton_refuses(CALL) is None
    assert "CUDA" in (dispatch.triton_refuses(CALL._replace(device="cpu")) or "")
    assert "float64" in (dispatch.triton_refuses(CALL._replace(dtypes=(torch.float64,))) or "")


def test_triton_refuses_everything_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(dispatch, "TRITON_MODE", None)
    assert "not installed" in (dispatch.triton_refuses(CALL) or "")


@pytest.mark.parametrize(
    ("rows", "out", "chosen"),
    [
        (4096, 4096, "triton"),
        (6144, 2048, "triton"),
        (6143, 2048, "eager"),
        (2**20, 2047, "eager"),
        (1, 4096, "eager"),
    ],
)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_the_crossover_decides_between_the_tiers(compiled, monkeypatch, rows, out, chosen, grad):
    like = torch.empty(rows, out, device="meta", dtype=torch.bfloat16)
    g = torch.empty(out, device="meta")
    accepted = dispatch.triton_refuses
    # A meta tensor stands for a CUDA tensor of its size.
    monkeypatch.setattr(
        dispatch, "triton_refuses", lambda call: accepted(call._replace(device="cuda"))
    )
    monkeypatch.setattr(
        dispatch, "triton_loses", lambda call: None if call.device == "meta" else "not here"
    )
    with torch.set_grad_enabled(grad):
        assert choose_compose(like, like, g, None) == chosen
        assert choose_compose(like, like, g, "triton") == "triton"


def test_on_a_cpu_the_best_is_eager():
    like, g = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(4096)
    assert choose_compose(like, like, g, None) == "eager"


def test_mixed_dtypes_are_for_eager():
    base, lora, g = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(4, 8), torch.ones(8)
    assert compose(base, lora, g, 1.0).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="share a dtype"):
        compose(base, lora, g, 1.0, implementation="triton")


def test_fp64_is_for_eager():
    base, g = torch.randn(4, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    assert compose(base, base, g, 1.0).dtype == torch.float64
    with pytest.raises(NotImplementedError, match="float64"):
        compose(base, base, g, 1.0, implementation="triton")
