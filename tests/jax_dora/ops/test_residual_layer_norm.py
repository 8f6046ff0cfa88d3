"""Layer norm of a residual sum against its equation in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_common.triton.residual_norm_rows import Config
from jax_dora import ops
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dropout import keep_mask, kept_share
from jax_dora.ops.residual_layer_norm import _is_fused
from jax_dora.ops.triton import triton_residual_norm_backward as kernel_backward
from parity import tolerances

EPSILON, SEED = 1e-3, jnp.array([5, 6], jnp.uint32)
NAMES = ("z", "y", "x", "scale", "bias")


def drawn(features: int, dtype: str = "float32") -> list[np.ndarray]:
    """y, x, scale, bias and the cotangent; the rows have a mean far from 0."""
    rng = np.random.default_rng(features)
    shapes = [(3, 5, features)] * 2 + [(features,)] * 2 + [(3, 5, features)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    arrays[1] += 3 * rng.standard_normal((3, 5, 1))
    dtypes = [np.float32 if one.ndim == 1 else dtype for one in arrays]
    return [np.asarray(jnp.asarray(*one)) for one in zip(arrays, dtypes, strict=True)]


def oracle(arrays: list[np.ndarray], rate: float) -> list[np.ndarray]:
    """The result, and the gradients of y, x, scale and bias, in fp64."""
    y, x, scale, bias, dz = (np.float64(array) for array in arrays)
    kept = np.asarray(keep_mask(SEED, y.shape, rate)) / kept_share(rate)
    t = y * kept + x
    inverse = 1 / np.sqrt(t.var(-1, keepdims=True) + EPSILON)
    n = (t - t.mean(-1, keepdims=True)) * inverse
    # The rows of the Jacobian of n are those of the projection that removes means and n.
    dn = dz * scale
    dx = np.einsum("...f,...fg->...g", dn, _projection(n, inverse))
    return [n * scale + bias, dx * kept, dx, (dz * n).sum((0, 1)), dz.sum((0, 1))]


def _projection(n: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    features = n.shape[-1]
    identity = np.eye(features) - 1 / features
    return inverse[..., None] * (identity - n[..., :, None] * n[..., None, :] / features)


def ours(arrays: list[np.ndarray], rate: float, implementation: str) -> list[jax.Array]:
    *operands, dz = map(jnp.asarray, arrays)
    options = {"dropout": ops.Dropout(SEED, rate), "implementation": implementation}

    @jax.jit
    def run(operands, dz):
        z, pullback = jax.vjp(
            lambda *a: ops.residual_layer_norm(*a, epsilon=EPSILON, **options), *operands
        )
        return [z, *pullback(dz)]

    return run(operands, dz)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize(("features", "rate"), [(16, 0.0), (21, 0.3), (600, 0.3)])
def test_fp32(features, rate, implementation):
    assert_near(drawn(features), rate, implementation)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_programs_of_several_tiles_of_rows(rate, monkeypatch):
    """15 rows are four tiles for each of two programs; the last of them has one row."""
    several = Config(rows=2, programs=2, stages=2)
    monkeypatch.setattr(kernel_backward, "config", lambda *_: several)
    assert_near(drawn(70), rate, "triton")


def assert_near(arrays: list[np.ndarray], rate: float, implementation: str) -> None:
    found = ours(arrays, rate, implementation)
    for name, value, exact in zip(NAMES, found, oracle(arrays, rate), strict=True):
        bound = tolerances.caps.OPERATOR_FP32_MAX_ABS * max(1, np.abs(exact).max())
        assert np.abs(np.float64(value) - exact).max() <= bound, name


def assert_as_near_as_plain(features: int, dtype: str) -> None:
    """As near to fp64 as the same computation in plain operations, by flash-attention's rule."""
    arrays = drawn(features, dtype)
    exact, plain = oracle(arrays, 0.3), ours(arrays, 0.3, "xla")
    found = ours(arrays, 0.3, "triton")
    assert [one.dtype for one in found] == [dtype] * 3 + [jnp.float32] * 2
    for name, value, plainly, wanted in zip(NAMES, found, plain, exact, strict=True):
        error, theirs = (np.abs(np.float64(one) - wanted).max() for one in (value, plainly))
        assert error <= tolerances.flash_rule(theirs, np.abs(wanted).max(), dtype), name


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("features", [21, 600])
def test_fp16(features):
    assert_as_near_as_plain(features, "float16")


@pytest.mark.gpu
@pytest.mark.parametrize("features", [512, 1536])
def test_bf16_at_full_size(features):
    assert_as_near_as_plain(features, "bfloat16")


def test_bad_shapes():
    y, x, scale, bias, _ = map(jnp.asarray, drawn(16))
    for change, message in (
        ({"x": x[:1]}, "expected one type"),
        ({"x": x.astype("float16")}, "expected one type"),
        ({"scale": scale[:1]}, r"scale and bias have shapes \(1,\), \(16,\); expected \(16,\)"),
    ):
        operands = {"y": y, "x": x, "scale": scale, "bias": bias} | change
        with pytest.raises(ValueError, match=message):
            ops.residual_layer_norm(**operands, epsilon=EPSILON)


def test_the_kernels_are_chosen_where_they_were_measured(monkeypatch):
    """On Hopper, though Mosaic is preferred there if it has a kernel; not over several devices."""
    for change, expected in (
        ({}, True),
        ({"shape": (2, 512, 1536)}, False),
        ({"shape": (20, 512, 256)}, False),
        ({"dtype": jnp.float32}, False),
        ({"partitioned": True}, False),
        ({"compute_capability": "10.0"}, False),
        ({"platform": "cpu", "compute_capability": ""}, False),
    ):
        of_y = {"shape": (20, 512, 1536), "dtype": jnp.bfloat16} | change
        y = jax.ShapeDtypeStruct(of_y["shape"], of_y["dtype"])
        of_card = {"platform": "gpu", "compute_capability": "9.0", "partitioned": False} | change
        fields = ("platform", "compute_capability", "partitioned")
        card = choose.Target(**{name: of_card[name] for name in fields})
        monkeypatch.setattr(choose, "target", lambda card=card: card)
        assert _is_fused(y, None) is expected, change
        assert not _is_fused(y, "xla")
    with pytest.raises(NotImplementedError, match="a row has 5000 features"):
        _is_fused(y.update(shape=(2, 5000)), "triton")
