"""A kept launch passes what Triton would, and asks Triton whenever another kernel may be needed."""

from types import SimpleNamespace

import pytest
import torch
from triton.knobs import runtime

from torch_dora.ops.triton import jit


class Kernel:
    """Stands for a kernel of Triton, and notes how it is launched."""

    arg_names = ("x_ptr", "y_ptr", "rows", "SIZE")

    def __init__(self):
        self.asked, self.launched = 0, []

    def __getitem__(self, grid):
        def call(*arguments, **options):
            assert (len(arguments), options) == (3, {"SIZE": 4, "num_warps": 2})
            self.asked += 1
            return SimpleNamespace(
                function="f", packed_metadata=(), run=lambda *a: self.launched.append(a)
            )

        return call


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(jit, "TRITON_MODE", "compiled")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    return Kernel()


def test_a_kept_launch_asks_triton_once_for_each_kernel(kernel):
    launch = jit.Launch(kernel, (3, 2), (10,), SIZE=4, num_warps=2)
    x, y = torch.zeros(16), torch.zeros(16)
    launch(x, y)
    assert (kernel.asked, kernel.launched) == (1, [])
    launch(y, x)
    expected = (3, 2, 1, 77, "f", (), None, None, None, y.data_ptr(), x.data_ptr(), 10, 4)
    assert (kernel.asked, kernel.launched) == (1, [expected])
    launch(x, None)
    launch(x.half(), y)
    assert kernel.asked == 3
    for _ in range(2):  # Another alignment is another kernel, which is not kept.
        launch(x, y[1:])
    assert kernel.asked == 5
    launch(x, None)
    assert kernel.launched[1:] == [(*expected[:9], x.data_ptr(), 0, 10, 4)]


def test_a_profilers_hooks_see_each_launch(kernel, monkeypatch):
    launch = jit.Launch(kernel, (1,), (10,), SIZE=4, num_warps=2)
    x = torch.zeros(16)
    launch(x, x)
    monkeypatch.setattr(runtime.launch_enter_hook, "calls", [print])
    launch(x, x)
    monkeypatch.setattr(runtime, "launch_enter_hook", None)
    launch(x, x)
    assert (kernel.asked, len(kernel.launched)) == (2, 1)


def test_a_same_launch_looks_nothing_up(kernel, monkeypatch):
    launch = jit.SameLaunch(jit.Launch(kernel, (3, 2), (10,), SIZE=4, num_warps=2))
    x, y = torch.zeros(16), torch.zeros(16)
    launch(x, y)
    assert (kernel.asked, kernel.launched) == (1, [])
    launch(y, None)
    expected = (3, 2, 1, 77, "f", (), None, None, None, y.data_ptr(), 0, 10, 4)
    assert (kernel.asked, kernel.launched) == (1, [expected])
    launch(x, y[1:])  # Another alignment is another kernel.
    monkeypatch.setattr(runtime.launch_exit_hook, "calls", [print])
    launch(x, y)
    assert (kernel.asked, kernel.launched) == (3, [expected])


def test_a_same_launch_passes_by_the_python_of_triton_3_6(kernel, monkeypatch):
    class CudaLauncher:
        launch = print
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = False, True

    compiled = SimpleNamespace(function="f", packed_metadata="m", run=CudaLauncher())
    as_run = ("f", "m", None, None, None), compiled.run
    for version in ("3.6.0", "3.6.1"):
        monkeypatch.setattr(jit.triton, "__version__", version)
        options = "f", False, True, None, None, "m", None, None, None
        assert jit._run_of(compiled) == (options, print)
    monkeypatch.setattr(CudaLauncher, "profile_scratch_size", 1)
    assert jit._run_of(compiled) == as_run
    monkeypatch.setattr(CudaLauncher, "profile_scratch_size", 0)
    monkeypatch.setattr(jit.triton, "__version__", "3.7.0")
    assert jit._run_of(compiled) == as_run
