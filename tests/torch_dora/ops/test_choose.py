from types import SimpleNamespace

import pytest
import torch

from torch_dora.ops import choose, compose
from torch_dora.ops.choose import Call
from torch_dora.ops.compose import choose_compose

CALL = Call(4096, 8192, (torch.bfloat16, torch.bfloat16, torch.float32), "cuda")


def kernel(reason=None, wins=True):
    return SimpleNamespace(refuses=lambda call: reason, wins=lambda call: wins)


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(choose, "TRITON_MODE", "compiled")


@pytest.mark.parametrize(
    ("kernel", "chosen"),
    [
        (None, "triton"),
        (kernel(), "triton"),
        (kernel(wins=False), "eager"),
        (kernel("it is blue"), "eager"),
    ],
)
def test_the_best_is_the_kernel_where_it_neither_refuses_nor_loses(compiled, kernel, chosen):
    assert choose.choose(CALL, None, kernel) == chosen
    assert choose.choose(CALL, "eager", kernel) == "eager"


def test_a_named_kernel_runs_although_it_loses_or_raises_its_reason(compiled):
    assert choose.choose(CALL, "triton", kernel(wins=False)) == "triton"
    with pytest.raises(NotImplementedError, match="'triton' cannot run this call: it is blue"):
        choose.choose(CALL, "triton", kernel("it is blue"))


@pytest.mark.parametrize("name", ["mosaic", "xla", "cuda", ""])
def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(name):
    with pytest.raises(ValueError, match=r"implementation=.*'triton', 'eager'"):
        choose.choose(CALL, name, None)


def test_triton_refuses_what_it_cannot_compute(compiled):
    assert choose.triton_refuses(CALL) is None
    assert "CUDA" in (choose.triton_refuses(CALL._replace(device="cpu")) or "")
    assert "float64" in (choose.triton_refuses(CALL._replace(dtypes=(torch.float64,))) or "")


def test_triton_refuses_everything_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(choose, "TRITON_MODE", None)
    assert "not installed" in (choose.triton_refuses(CALL) or "")


@pytest.mark.parametrize(
    ("rows", "out", "compiled_for"),
    [
        (4096, 4096, "triton"),
        (6144, 2048, "triton"),
        (6143, 2048, "eager"),
        (2**20, 2047, "eager"),
        (1, 4096, "eager"),
    ],
)
def test_the_crossover_decides_where_torch_compile_could_fuse(
    compiled, monkeypatch, rows, out, compiled_for
):
    like = torch.empty(rows, out, device="meta", dtype=torch.bfloat16)
    g = torch.empty(out, device="meta")
    # A meta tensor stands for a CUDA tensor of its size.
    for name in ("triton_refuses", "triton_wins"):
        judge = getattr(choose, name)
        on_cuda = lambda call, judge=judge: judge(call._replace(device="cuda"))  # noqa: E731
        monkeypatch.setattr(choose, name, on_cuda)
    assert choose_compose(like, like, g, None) == "triton"
    assert choose_compose(like, like, g, None, want_inner=True) == "triton"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose_compose(like, like, g, None) == compiled_for
    assert choose_compose(like, like, g, "triton") == "triton"
    assert choose_compose(like, like, g, None, want_inner=True) == "eager"
    assert choose_compose(like, like, g, "triton", want_inner=True) == "triton"


@pytest.mark.parametrize("mode", ["interpreted", "compiled", None])
def test_on_a_cpu_the_best_is_eager(monkeypatch, mode):
    monkeypatch.setattr(choose, "TRITON_MODE", mode)
    like, g = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(4096)
    assert choose_compose(like, like, g, None) == "eager"


@pytest.mark.parametrize(
    ("base", "lora", "reason"),
    [
        (torch.bfloat16, torch.float32, "share a dtype"),
        (torch.float64, torch.float64, "float64"),
    ],
)
def test_mixed_dtypes_and_fp64_are_for_eager(base, lora, reason):
    operands = torch.randn(4, 8, dtype=base), torch.randn(4, 8, dtype=lora), torch.ones(8)
    assert compose(*operands, 1.0).dtype == base
    with pytest.raises(NotImplementedError, match=reason):
        compose(*operands, 1.0, implementation="triton")
