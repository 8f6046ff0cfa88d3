"""The oracle against torch's autograd in fp64, finite differences, and its own conventions."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity import oracle

SCALE = 0.7


@pytest.fixture
def layer():
    rng = np.random.default_rng(0)
    rows, n_in, n_out, rank = 5, 7, 4, 3
    return {
        "x": rng.normal(size=(rows, n_in)),
        "weight": rng.normal(size=(n_out, n_in)),
        "lora_a": rng.normal(size=(rank, n_in)),
        "lora_b": rng.normal(size=(n_out, rank)),
        "magnitude": rng.normal(size=n_out) + 3,
        "bias": rng.normal(size=n_out),
        "dy": rng.normal(size=(rows, n_out)),
    }


def test_layer_agrees_with_autograd_through_the_dense_weight(layer):
    t = {name: torch.tensor(value, requires_grad=True) for name, value in layer.items()}
    v = t["weight"] + SCALE * t["lora_b"] @ t["lora_a"]
    merged = t["magnitude"][:, None] * v / torch.linalg.vector_norm(v, dim=1).detach()[:, None]
    y = torch.nn.functional.linear(t["x"], merged, t["bias"])
    y.backward(t["dy"].detach())

    names = ("x", "weight", "lora_a", "lora_b", "magnitude")
    operands = [layer[name] for name in names]
    got = oracle.dora_linear(*operands, SCALE, bias=layer["bias"])
    np.testing.assert_allclose(got, y.detach().numpy(), rtol=1e-13)
    grads = oracle.dora_linear_grads(layer["dy"], *operands, SCALE)
    for name in (*names, "bias"):
        gradient = t[name].grad
        assert gradient is not None
        np.testing.assert_allclose(
            getattr(grads, f"d_{name}"), gradient.numpy(), rtol=1e-11, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(oracle.compose, oracle.compose_grads), (oracle.compose_delta, oracle.compose_delta_grads)],
)
def test_compose_gradients_agree_with_central_differences(forward, backward):
    rng = np.random.default_rng(1)
    operands = {
        "base": rng.normal(size=(3, 4)),
        "lora": rng.normal(size=(3, 4)),
        "g": 1 + 0.1 * rng.normal(size=4),
    }
    dy = rng.normal(size=(3, 4))
    grads = backward(dy, *operands.values(), SCALE)
    for name, value in operands.items():
        step = rng.normal(size=value.shape) * 1e-3
        up, down = operands | {name: value + step}, operands | {name: value - step}
        # Both are linear in each operand: central differences are exact but for rounding.
        change = forward(**up, scale=SCALE) - forward(**down, scale=SCALE)
        predicted = 2 * (getattr(grads, f"d_{name}") * step).sum()
        np.testing.assert_allclose((dy * change).sum(), predicted, rtol=1e-9)


def test_torch_tensors_stay_tensors_and_give_the_same(layer):
    names = ("x", "weight", "lora_a", "lora_b", "magnitude")
    tensors = [torch.tensor(layer[name]) for name in names]
    y = oracle.dora_linear(*tensors, SCALE)
    assert isinstance(y, torch.Tensor)
    expected = oracle.dora_linear(*(layer[name] for name in names), SCALE)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-13)


def test_flax_layout_and_jax_arrays(layer):
    weight, lora_a, lora_b = (layer[name] for name in ("weight", "lora_a", "lora_b"))
    flax = oracle.from_flax(*(jnp.asarray(v.T, jnp.float32) for v in (weight, lora_a, lora_b)))
    stored = [v.astype(np.float32) for v in (weight, lora_a, lora_b)]
    expected = oracle.norm(*stored, SCALE)
    np.testing.assert_array_equal(oracle.norm(*flax, SCALE), expected)


def test_bf16_is_read_exactly():
    value = torch.tensor([1.0, 1 + 2**-7], dtype=torch.bfloat16)
    np.testing.assert_array_equal(oracle.fp64(value).numpy(), [1.0, 1 + 2**-7])
    np.testing.assert_array_equal(oracle.fp64(jnp.array([3.0], jnp.bfloat16)), [3.0])


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, jnp.bfloat16], ids=str)
def test_dtype_names(dtype):
    assert oracle.dtype_name(dtype) == "bfloat16"


def test_leading_axes_of_activations_are_kept(layer):
    names = ("weight", "lora_a", "lora_b", "magnitude")
    operands = [layer[name] for name in names]
    x, dy = layer["x"][:4].reshape(2, 2, 7), layer["dy"][:4].reshape(2, 2, 4)
    assert oracle.dora_linear(x, *operands, SCALE).shape == (2, 2, 4)
    assert oracle.dora_linear_grads(dy, x, *operands, SCALE).d_x.shape == (2, 2, 7)


def test_a_zero_row_is_divided_by_eps():
    zero, vector = np.zeros((1, 3)), np.zeros((1, 2))
    norm = oracle.norm(zero, np.ones((2, 3)), vector, SCALE)
    assert norm == 0
    assert oracle.magnitude_scale([2e-6], norm, "bfloat16") == pytest.approx(2.0)
    assert oracle.magnitude_scale([2e-12], norm, "float32") == pytest.approx(2.0)
