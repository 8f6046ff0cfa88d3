"""Linen layers in scans of any length, in scans of scans, and in ensembles."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util

from jax_dora import DoRARule
from jax_dora.linen import apply_dora, coverage, merge_dora, split_adapters
from parity import oracle
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.linen.linen_models import train
from tests.tables import ci

RULE = DoRARule("all-linear", 2, 3.0)
X = jax.random.normal(jax.random.key(0), (3, 4))


class Own(nn.Module):
    """A class of a user's own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.param("w", nn.initializers.normal(0.5), (4, 5))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(4, name="dense")(jnp.tanh(Own(name="own")(x))), None


class Stacks(nn.Module):
    """Layers in scans of these lengths, outermost first, each along an axis of every parameter."""

    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> Any:
        inner = nn.remat(Layer)() if len(self.axes) == 1 else Stacks(self.axes[1:], self.sizes[1:])

        def step(module: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return module(x, None)

        run = nn.scan(
            step,
            variable_axes={"params": self.axes[0]},
            split_rngs={"params": True},
            length=self.sizes[0],
        )
        return run(inner, x, None)


class Ensemble(nn.Module):
    """Members with one input."""

    size: int
    axis: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = {"variable_axes": {"params": self.axis}, "split_rngs": {"params": True}}
        return nn.vmap(Own, in_axes=None, axis_size=self.size, **options)(name="members")(x)


def trained(model: nn.Module) -> tuple[Any, Any]:
    adapted = apply_dora(model, RULE, example=(X,))
    return adapted, train(jax.jit(adapted.init)(jax.random.key(1), X))


def effective(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """W' [in, out] of one layer, in fp64."""
    kernel, lora_a, lora_b, magnitude = arrays.values()
    operands = oracle.from_flax(kernel, lora_a, lora_b)
    return oracle.merged_weight(*operands, magnitude, RULE.scale).T


CASES = [((1,), (1,)), ci((1, 1), (2, 3))]
SLOW_CASES = [
    ((0,), (1,)),
    ((-1,), (1,)),
    ((0,), (3,)),
    *((axes, (2, 3)) for axes in [(0, 0), (0, 1), (1, 0), (-1, 0)]),
    ((0, 0), (1, 1)),
    ((1, 1), (2, 1)),
    ((0, 1, 0), (2, 1, 2)),
]


@pytest.mark.parametrize(
    ("axes", "sizes"), CASES + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_CASES]
)
@pytest.mark.ci
def test_a_scan_computes_what_its_layers_compute(axes, sizes):
    model = Stacks(axes, sizes)
    told = {one.path.rpartition("Layer_0/")[2]: one.how for one in coverage(model, X).weights}
    assert told["dense/kernel"] == "linen.Dense"
    assert told["own"].startswith("read by a product")
    adapted, variables = trained(model)
    flat = traverse_util.flatten_dict(variables["params"])
    [dense] = [path[:-1] for path in flat if path[-2:] == ("dense", "kernel")]
    own = (*dense[:-1], "own")
    # The adapter of a class of a user's own has its stack axes first, as they lie in w.
    order = np.argsort(positions(axes))
    y = oracle.fp64(X)
    for indices in np.ndindex(*sizes):

        def taken(path, indices=indices):
            array = np.asarray(flat[path])
            for index, axis in zip(indices, axes, strict=True):
                array = np.take(array, index, axis)
            return array

        def leading(path, indices=indices):
            array = np.asarray(flat[path])
            return array[tuple(indices[number] for number in order)]

        names = ("lora_a", "lora_b", "magnitude")
        first = {"w": taken((*own, "w"))} | {n: leading((*own, f"w_{n}")) for n in names}
        second = {n: taken((*dense, n)) for n in ("kernel", *names)}
        h = np.tanh(y @ effective(first))
        y = y + h @ effective(second) + taken((*dense, "bias"))
    with jax.default_matmul_precision("highest"):
        found, _ = jax.jit(adapted.apply)(variables, X)
        merged, _ = jax.jit(model.apply)(merge_dora(adapted, variables, X), X)
        plain, _ = jax.jit(model.apply)({"params": split_adapters(variables["params"])[1]}, X)
    np.testing.assert_allclose(found, y, 0, OPERATOR_FP32_MAX_ABS)
    np.testing.assert_allclose(merged, y, 0, OPERATOR_FP32_MAX_ABS)
    assert np.max(np.abs(found - plain)) > 0.05


def positions(axes: tuple[int, ...]) -> list[int]:
    """Where the stack axes lie in a matrix that is stacked along them, outermost first."""
    names = ["in", "out"]
    for number, axis in reversed(list(enumerate(axes))):
        names.insert(axis if axis >= 0 else len(names), str(number))
    return [names.index(str(number)) for number in range(len(axes))]


@pytest.mark.parametrize(
    ("size", "axis"), [(1, 0), (3, 1), pytest.param(5, 1, marks=pytest.mark.slow)]
)
@pytest.mark.ci
def test_each_member_of_an_ensemble_has_an_adapter(size, axis):
    model = Ensemble(size, axis)
    adapted, variables = trained(model)
    flat = {name: np.asarray(leaf) for name, leaf in variables["params"]["members"].items()}
    assert flat["w_lora_a"].shape == (size, 4, 2)
    assert flat["w_magnitude"].shape == (size, 5)
    found = adapted.apply(variables, X)
    for number in range(size):
        adapter = {name: flat[f"w_{name}"][number] for name in ("lora_a", "lora_b", "magnitude")}
        kernel = np.take(flat["w"], number, axis)
        expected = oracle.fp64(X) @ effective({"w": kernel} | adapter)
        np.testing.assert_allclose(found[number], expected, 0, OPERATOR_FP32_MAX_ABS)
