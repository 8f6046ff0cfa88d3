"""Operators are called as functions, and by torch.library where somebody records them."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dora.ops.operator import Operator, operator

CALLS: list[tuple[int, ...]] = []


@operator("torch_dora_test::double")
def double(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(tuple(x.shape))
    return x + x


@double.fake
def _(x):
    return x.new_empty(x.shape)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def x(monkeypatch):
    CALLS.clear()
    return torch.randn(3, 2)


def test_nobody_waits_for_torch_library(x, monkeypatch):
    monkeypatch.setattr(Operator, "op", None, raising=False)
    monkeypatch.delattr(double, "op")
    assert torch.equal(double(x), 2 * x)
    assert torch.equal(double(torch.nn.Parameter(x).detach()), 2 * x)


def test_a_dispatch_mode_sees_one_operator(x):
    with Recorder() as recorder:
        double(x)
    assert recorder.names[0] == "torch_dora_test.double.default"


def test_fake_tensors_run_nothing(x):
    with FakeTensorMode() as mode:
        assert double(mode.from_tensor(x)).shape == (3, 2)
    assert double(x.to("meta")).is_meta
    assert not CALLS


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("record", [torch.compile, torch.jit.trace])
def test_a_recorded_program_holds_the_operator(x, record):
    if record is torch.compile:
        graphs: list[torch.fx.GraphModule] = []
        backend = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
        program = torch.compile(lambda x: double(x), backend=backend, fullgraph=True)
        program(x)
        assert "torch_dora_test.double" in graphs[0].code
    else:
        program = torch.jit.trace(lambda x: double(x), x)
        assert "torch_dora_test::double" in str(program.inlined_graph)
    assert torch.equal(program(x), 2 * x)


def test_a_gradient_that_is_not_there_is_an_error(x):
    y = double(x.requires_grad_())
    with pytest.raises(RuntimeError, match=r"torch_dora_test.*double"):
        y.sum().backward()


class OnSecondGpu(torch.Tensor):
    """A tensor that claims to be on the second GPU."""

    is_cuda = True
    device = torch.device("cuda:1")

    def get_device(self):
        return 1


@pytest.mark.parametrize(("current", "entered"), [(0, ["cuda:1"]), (1, [])])
def test_kernels_are_launched_on_the_tensors_gpu(x, monkeypatch, current, entered):
    def enter(device):
        found.append(str(device))
        return contextlib.nullcontext()

    found: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", enter)
    double.function(x.as_subclass(OnSecondGpu))
    assert found == entered
