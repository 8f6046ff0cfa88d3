import contextlib
import importlib.metadata
import importlib.util
import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

import jax_dora
from jax_dora.ops import compose, dora_linear, factored_norm, identity
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dispatch.choose import Choice, Target
from jax_dora.ops.mosaic.hopper import launch
from jax_dora.ops.mosaic.norm import one_pass_norm
from jax_dora.ops.mosaic.projection import (
    dropout_shrink,
    dropout_shrink_back,
    expand_compose,
    matmul_tiling,
    project,
    project_back,
)
from jax_dora.ops.mosaic.rows import compose_backward, elementwise, swiglu_backward
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import thinned

PACKAGE = Path(jax_dora.__file__).parent
HOPPER = Target("gpu", "9.0")
BF16, F32 = jnp.bfloat16, jnp.float32


def kernel(refusal: str | None = None, wins: bool = True, package: str = "mosaic") -> Any:
    return SimpleNamespace(
        __name__=f"jax_dora.ops.{package}.kernel",
        refuses=lambda size: refusal,
        wins=lambda size: wins,
        config=lambda *call: "for " + " and ".join(map(str, call)),
    )


def picks(*kernels: Any, implementation: str | None = None, **options: Any) -> Choice | None:
    return choose.choose("op", implementation, *((one, (3,)) for one in kernels), **options)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(choose, "target", lambda: HOPPER)


def test_an_unnamed_call_uses_the_first_supported_kernel_that_wins(on_hopper):
    good, loses, unable = kernel(), kernel(wins=False), kernel("odd")
    assert picks(good) == (good, "for 3", choose.HOPPER_SM_COUNT, None)
    assert picks(loses) is picks(unable) is picks(unable, loses) is None
    assert picks(unable, loses, good).kernel is good


def test_a_named_implementation_runs_or_raises(on_hopper):
    loses, unable = kernel(wins=False), kernel("odd")
    assert picks(unable, loses, implementation="mosaic").kernel is loses
    assert picks(loses, implementation="xla") is None
    assert picks(unable, implementation="mosaic", optional=True) is None
    with pytest.raises(NotImplementedError, match=r"op: .*'mosaic' does not .*: odd"):
        picks(unable, implementation="mosaic")
    with pytest.raises(NotImplementedError, match=r"op: .*'triton' does not .*: it has no triton"):
        picks(loses, implementation="triton")
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected None"):
        picks(loses, implementation="cuda")


@pytest.mark.parametrize(
    ("target", "chosen", "named", "capability"),
    [
        (HOPPER, "mosaic", ("mosaic", "triton"), 90),
        (Target("gpu", "8.6"), "triton", ("triton",), 86),
        (Target("gpu", "8.7"), "triton", ("triton",), 86),
        (Target("gpu", "10.3"), "triton", ("triton",), 89),
        (Target("gpu", "12.0"), "triton", ("triton",), 120),
        (Target("gpu", "12.1"), "triton", ("triton",), 89),
        (Target("gpu", "7.5"), None, (), 75),
        (Target("gpu", "gfx942"), None, (), 80),
        (Target("gpu", "9.0", x64=True), "triton", ("triton",), 90),
        (Target("gpu", "9.0", partitioned=True), "mosaic", ("mosaic", "triton"), 90),
        (Target("cpu"), None, ("mosaic", "triton"), 80),
        (Target("cpu", interpreted=True), None, ("mosaic", "triton"), 80),
        (Target("tpu"), None, ("mosaic", "triton"), 80),
    ],
)
def test_the_target_decides(target, chosen, named, capability, monkeypatch):
    monkeypatch.setattr(choose, "target", lambda: target)
    kernels = {package: kernel(package=package) for package in choose.KERNELS}
    found = picks(*kernels.values())
    assert (found and found.kernel) is (chosen and kernels[chosen])
    for package, one in kernels.items():
        if package in named:
            assert picks(*kernels.values(), implementation=package).kernel is one
        else:
            with pytest.raises(NotImplementedError, match=f"'{package}' does not support"):
                picks(*kernels.values(), implementation=package)
    assert target.capability == capability
    if chosen == "triton":
        config = f"for {capability} and 3"
        assert found == (kernels["triton"], config, target.sm_count, capability)


def test_a_triton_without_knobs_is_too_old(monkeypatch):
    is_installed = choose.kernel_call.is_installed.__wrapped__
    assert is_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    assert not is_installed()


def test_triton_may_come_in_a_package_of_another_name(monkeypatch):
    def version(package):
        if package == "triton":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = pytest.importorskip("triton").__version__
    assert f" 1 {found} " in identity._source.__wrapped__()


def test_without_triton_its_kernels_are_refused(monkeypatch):
    monkeypatch.setattr(choose, "target", lambda: Target("gpu", "8.0"))
    monkeypatch.setattr(choose.kernel_call, "is_installed", lambda: False)
    assert picks(kernel(package="triton")) is None
    with pytest.raises(NotImplementedError, match="pip install triton"):
        picks(kernel(package="triton"), implementation="triton")


@pytest.mark.parametrize(
    ("kernel", "call", "wins"),
    [
        (compose_backward, (4096, 4096, BF16), True),
        (compose_backward, (724, 4096, BF16), False),
        (compose_backward, (1024, 768, BF16), False),
        (compose_backward, (4096, 4096, F32), False),
        (compose_backward, (4096, 4104, BF16), False),
        (swiglu_backward, (4096, 12288, BF16), True),
        (swiglu_backward, (511, 12288, BF16), False),
        (expand_compose, (4096, 384, 4096, BF16), True),
        (expand_compose, (4096, 769, 4096, BF16), False),
        (expand_compose, (1000, 16, 4096, BF16), False),
        (one_pass_norm, (4096, 384, 4096, BF16, F32), True),
        (one_pass_norm, (767, 384, 4096, BF16, F32), False),
        (project, (4096, 4096, 4096, BF16), True),
        (project, (4096, 768, 768, BF16), True),
        (project_back, (4096, 2048, 4096, BF16), True),
        (project_back, (2048, 2048, 4096, BF16), False),
        (dropout_shrink, (2048, 4096, 64, BF16), True),
        (dropout_shrink_back, (2048, 4096, 64, BF16), False),
    ],
)
def test_the_crossovers(kernel, call, wins):
    assert kernel.wins(*call) == wins


@pytest.mark.parametrize(
    ("found", "usual"),
    [
        (compose_backward.config(1024, 4096, BF16), compose_backward.config(4096, 4096, BF16)),
        (expand_compose.config(4096, 64, 2048, BF16), expand_compose.config(4096, 64, 8192, BF16)),
        (
            one_pass_norm.config(4096, 64, 4096, BF16, BF16),
            one_pass_norm.config(4096, 64, 8192, BF16, BF16),
        ),
        (
            matmul_tiling.config(4096, 4096, 2048, BF16),
            matmul_tiling.config(4096, 4096, 4096, BF16),
        ),
        (project.config(12608, 768, 768, BF16), project.config(12608, 768, 3072, BF16)),
        (project_back.config(12608, 768, 3072, BF16), project.config(12608, 768, 3072, BF16)),
    ],
)
def test_some_sizes_have_their_own_config(found, usual):
    assert found != usual


@pytest.mark.parametrize(("is_lowered", "most"), [(False, 8), (True, 11)])
def test_a_layer_reaches_its_kernel_in_few_frames(monkeypatch, is_lowered, most):
    """Without the two of the thread in which a kernel is traced for a program for a GPU."""
    real, depths = plgpu.kernel, []

    def counted(*arguments, **options):
        frames = inspect.stack(context=0)
        depths.append(sum(Path(frame.filename).is_relative_to(PACKAGE) for frame in frames))
        return real(*arguments, **options)

    monkeypatch.setattr(plgpu, "kernel", counted)
    monkeypatch.setattr(launch, "_in_thread", lambda function: function())
    # Sizes of no other test, whose kernels are not traced again.
    layer = jax_dora.DoRALinear(
        192, 128, rank=8, alpha=8, implementation="mosaic", param_dtype=BF16, rngs=nnx.Rngs(0)
    )
    mode = contextlib.nullcontext() if is_lowered else plgpu.force_gpu_interpret_mode()
    with mode:
        jax.eval_shape(layer, jax.ShapeDtypeStruct((16, 192), BF16))
    assert 0 < max(depths) <= most


@pytest.mark.parametrize(
    ("rows", "out", "dtype", "reason"),
    [
        (4, 16, jnp.float32, None),
        (4, 12, jnp.float32, "out = 12 is not a multiple of 8"),
        (0, 16, jnp.float32, "no rows"),
        (4, 16, jnp.float64, "dtype float64"),
    ],
)
def test_the_kernels_say_why_they_refuse(rows, out, dtype, reason):
    got = elementwise.refuses(rows, out, dtype)
    assert got is None if reason is None else reason in got


def test_a_named_mosaic_raises_for_unsupported_calls():
    x = jnp.ones((3, 12))
    with (
        plgpu.force_gpu_interpret_mode(),
        pytest.raises(NotImplementedError, match="out = 12 is not a multiple of 8"),
    ):
        compose(x, x, jnp.ones(12), 1.0, implementation="mosaic")


def test_under_x64_mosaic_raises_and_an_unnamed_call_uses_xla(monkeypatch):
    with jax.enable_x64(True):
        assert choose.target().x64
        monkeypatch.setattr(choose, "target", lambda: Target("gpu", "9.0", x64=True))
        x, g = jnp.ones((8, 16), jnp.bfloat16), jnp.ones(16, jnp.float32)
        assert compose(x, x, g, 1.0).dtype == jnp.bfloat16
        with pytest.raises(NotImplementedError, match="jax_enable_x64 is set"):
            compose(x, x, g, 1.0, implementation="mosaic")


def test_unnamed_calls_of_any_shape_run():
    x = jnp.ones((3, 12))
    assert compose(x, x, jnp.ones(12), 1.0).shape == x.shape


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f))],
    ids=["eager", "jit", "vmap"],
)
def test_mosaic_on_a_cpu_is_refused_with_its_reason(transform):
    x = jnp.ones((2, 3, 16))
    with pytest.raises(NotImplementedError, match="runs on a Hopper"):
        transform(lambda x: compose(x, x, jnp.ones(16), 1.0, implementation="mosaic"))(x)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    thinned(
        itertools.product(
            [(1, 512), (4097, 8192), (8192, 28672), (512, 2056), (33, 8)],
            [jnp.bfloat16, jnp.float16, jnp.float32],
        ),
        [
            ((1, 512), jnp.float32),
            ((4097, 8192), jnp.float16),
            ((8192, 28672), jnp.bfloat16),
            ((512, 2056), jnp.float32),
            ((33, 8), jnp.bfloat16),
        ],
    ),
)
def test_mosaic_lowers_for_cuda_without_a_gpu(shape, dtype):
    x, g = aval(*shape, dtype=dtype), aval(shape[1], dtype=jnp.float32)

    def forward_and_backward(base, lora, g, dy):
        y, vjp = jax.vjp(lambda *a: compose(*a, 0.7, implementation="mosaic"), base, lora, g)
        return y, vjp(dy)

    text = for_cuda(forward_and_backward, x, x, g, x)
    assert "dora_compose_backward" in text
    assert text.count("custom_call @mosaic_gpu") == 2


def test_every_kernel_is_launched_with_its_config(monkeypatch):
    used = []

    def recorded(module):
        launch = module.launch

        def run(*arguments, config, **options):
            used.append((module, config))
            return launch(*arguments, config=config, **options)

        monkeypatch.setattr(module, "launch", run)

    for module in (one_pass_norm, project, project_back, compose_backward):
        recorded(module)
    x, w = jnp.ones((128, 64), BF16), jnp.ones((64, 128), BF16)
    a, b, m = jnp.ones((64, 16), BF16), jnp.ones((16, 128), BF16), jnp.ones(128)

    def run(x, w, a, b, m):
        kept = factored_norm(w, a, b, 0.5, implementation="mosaic")
        y = dora_linear(x, w, a, b, m, 0.5, norm=kept, implementation="mosaic")
        return y.astype(jnp.float32).sum()

    with plgpu.force_gpu_interpret_mode():
        jax.eval_shape(jax.grad(run, (0, 4)), x, w, a, b, m)
    projection = matmul_tiling.config(128, 64, 128, BF16)
    # The projection is traced with and without a gradient.
    assert list(dict.fromkeys(used)) == [
        (one_pass_norm, one_pass_norm.config(64, 16, 128, BF16, BF16)),
        (project, projection),
        (compose_backward, compose_backward.config(128, 128, BF16)),
        (project_back, projection),
    ]
