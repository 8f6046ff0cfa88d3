"""A kept launch passes what Triton would, and asks Triton whenever another kernel may be needed."""

import gc
import weakref
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


class Compiled:
    """Stands for a compiled kernel, which Triton 3.8 unloads when it is freed."""

    function, packed_metadata = "f", ()

    @staticmethod
    def run(*arguments):
        pass


def test_kept_launches_keep_the_compiled_kernel(monkeypatch):
    monkeypatch.setattr(jit, "TRITON_MODE", "compiled")
    compiled = Compiled()
    kept, kernel = weakref.ref(compiled), SimpleNamespace(arg_names=())
    launch = jit.Launch(kernel, (1,), ())
    monkeypatch.setattr(launch, "_ask", lambda *_, once=[compiled]: once.pop())
    same = jit.SameLaunch(launch)
    same(torch.zeros(16))
    del compiled
    gc.collect()
    assert kept() is not None
    launch.same.clear()
    gc.collect()
    assert kept() is not None
    del same
    gc.collect()
    assert kept() is None


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
    as_run = ("f", "m", None, None, None), compiled.run, 0
    for version in ("3.6.0", "3.6.1"):
        monkeypatch.setattr(jit.triton, "__version__", version)
        options = "f", False, True, None, None, "m", None, None, None
        assert jit._run_of(compiled, torch.device("cpu")) == (options, print, 0)
        monkeypatch.setattr(CudaLauncher, "global_scratch_size", 384)
        assert jit._run_of(compiled, torch.device("cpu")) == (options, print, 384)
        monkeypatch.setattr(CudaLauncher, "global_scratch_size", 0)
    monkeypatch.setattr(CudaLauncher, "profile_scratch_size", 1)
    assert jit._run_of(compiled, torch.device("cpu")) == as_run
    monkeypatch.setattr(CudaLauncher, "profile_scratch_size", 0)
    monkeypatch.setattr(jit.triton, "__version__", "3.7.0")
    assert jit._run_of(compiled, torch.device("cpu")) == as_run


class Bytes:
    """Makes memory whose address is its size."""

    def new_empty(self, size):
        return SimpleNamespace(data_ptr=lambda: size)


class Describing(Kernel):
    """A kernel that needs memory for each program, and that Triton launches by `launch`."""

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.asked += 1
            allocate = jit._allocation._allocator.get()
            self.launched.append(([one.data_ptr() for one in arguments[:2]], allocate(96, 128, 77)))
            return SimpleNamespace(function="f", packed_metadata="m", run=self.launcher)

        return call


def test_a_kernel_that_describes_its_tensors_has_memory_in_each_launch(kernel, monkeypatch):
    class CudaLauncher:
        global_scratch_size, profile_scratch_size = 96, 0
        launch_cooperative_grid, launch_pdl = False, True
        launch = print

        def __call__(self, *arguments):
            kernel.launched.append(jit._allocation._allocator.get()(96, 128, 77))

    kernel = Describing()
    kernel.launcher = CudaLauncher()
    before = jit._allocation._allocator.get()
    x, y = torch.zeros(16), torch.zeros(16)
    # Triton 3.6's launcher is called without its Python, which is tested below.
    monkeypatch.setattr(jit.triton, "__version__", "3.8.0")
    launch = jit.DescribingLaunch(kernel, (3, 2), (10,), SIZE=4, num_warps=2)
    launch(x, y)
    assert kernel.launched.pop()[1].nbytes == 96
    launch(x, y)
    assert kernel.launched.pop().nbytes == 96
    launch(x[1:], y)
    (first, second), _ = kernel.launched.pop()
    assert (first % 16, second) == (0, y.data_ptr())
    assert first != x[1:].data_ptr()

    passed = []
    monkeypatch.setattr(jit, "BuiltinFunctionType", type(lambda: None))
    monkeypatch.setattr(CudaLauncher, "launch", staticmethod(lambda *a: passed.append(a)))
    monkeypatch.setattr(jit.triton, "__version__", "3.6.0")
    same = jit.SameLaunch(jit.DescribingLaunch(kernel, (3, 2), (10,), SIZE=4, num_warps=2))
    same(x, y)
    same.bytes = Bytes()
    same(y, x)
    options = "f", False, True, 6 * 96, None, "m", None, None, None
    assert passed == [(3, 2, 1, 77, *options, y.data_ptr(), x.data_ptr(), 10, 4)]
    monkeypatch.setattr(jit.triton, "__version__", "3.8.0")
    same = jit.SameLaunch(jit.DescribingLaunch(kernel, (3, 2), (10,), SIZE=4, num_warps=2))
    same(x, y)
    same(x, y)
    assert (same.scratch, kernel.launched[-1].nbytes) == (0, 96)
    assert jit._allocation._allocator.get() is before
