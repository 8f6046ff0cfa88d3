import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops import compose, device, dispatch
from jax_dora.ops.dispatch import Option, choose
from jax_dora.ops.mosaic import rowwise


def test_an_unnamed_call_takes_the_first_that_is_able_and_not_slower():
    xla = Option("xla")
    assert choose("op", None, (Option("mosaic"), xla)) == "mosaic"
    assert choose("op", None, (Option("mosaic", slower="small"), xla)) == "xla"
    assert choose("op", None, (Option("mosaic", refusal="odd"), xla)) == "xla"


def test_a_named_implementation_runs_or_raises():
    xla = Option("xla")
    assert choose("op", "mosaic", (Option("mosaic", slower="small"), xla)) == "mosaic"
    with pytest.raises(NotImplementedError, match=r"op: .*'mosaic' cannot .*: odd"):
        choose("op", "mosaic", (Option("mosaic", refusal="odd"), xla))
    with pytest.raises(ValueError, match="implementation is 'eager'; expected None"):
        choose("op", "eager", (xla,))


@pytest.mark.parametrize(
    ("target", "refused", "slower"),
    [
        (device.Target("gpu", "9.0", "NVIDIA H200"), False, False),
        (device.Target("gpu", "8.0", "NVIDIA A100"), True, False),
        (device.Target("gpu", "9.0", "NVIDIA H200", partitioned=True), False, True),
        (device.Target("cpu"), False, True),
        (device.Target("cpu", interpreted=True), False, True),
    ],
)
def test_what_the_target_alone_decides(target, refused, slower):
    option = dispatch.runs_mosaic(target)
    assert (bool(option.refusal), bool(option.slower)) == (refused, slower)


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
    got = rowwise.refuses(rows, out, dtype)
    assert got is None if reason is None else reason in got


def test_a_named_mosaic_refuses_what_the_kernel_cannot_take():
    x = jnp.ones((3, 12))
    with (
        plgpu.force_gpu_interpret_mode(),
        pytest.raises(NotImplementedError, match="out = 12 is not a multiple of 8"),
    ):
        compose(x, x, jnp.ones(12), 1.0, implementation="mosaic")


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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    ("rows", "out"), [(1, 512), (4097, 8192), (8192, 28672), (512, 2056), (33, 8)]
)
def test_mosaic_lowers_for_cuda_without_a_gpu(rows, out, dtype):
    x = jax.ShapeDtypeStruct((rows, out), dtype)
    g = jax.ShapeDtypeStruct((out,), jnp.float32)

    def forward_and_backward(base, lora, g, dy):
        y, vjp = jax.vjp(lambda *a: compose(*a, 0.7, implementation="mosaic"), base, lora, g)
        return y, vjp(dy)

    traced = jax.jit(forward_and_backward).trace(x, x, g, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "dora_compose_backward" in text
    assert text.count("custom_call @mosaic_gpu") == 2
