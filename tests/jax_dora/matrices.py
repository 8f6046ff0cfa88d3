"""Judging a layer that is a linear map in disguise: its rows and matrices against the oracle."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity import oracle, tolerances


class Problem(NamedTuple):
    """One matrix product, by rows, in Flax layout.

    x [rows, in] and dy [rows, out]; kernel, lora_a, lora_b, magnitude as matrices; y, and the
    gradients with respect to lora_a, lora_b and magnitude, as found.
    """

    x: Any
    dy: Any
    kernel: Any
    lora_a: Any
    lora_b: Any
    magnitude: Any
    y: Any
    d_lora_a: Any
    d_lora_b: Any
    d_magnitude: Any
    bias: Any = None


def judge(problem: Problem, scale: float, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Asserts that what was found lies within the derived bounds; returns what d_x [rows, in] is,
    and its bound."""
    weights = oracle.from_flax(problem.kernel, problem.lora_a, problem.lora_b)
    arguments = (np.asarray(problem.x, np.float64), *weights, problem.magnitude, scale)
    exact = oracle.dora_linear(*arguments, bias=problem.bias, dtype=dtype)
    grads = oracle.dora_linear_grads(problem.dy, *arguments, dtype=dtype)
    bounds = tolerances.dora_linear(problem.dy, *arguments, dtype, bias=problem.bias)
    y_bound = bounds.y
    if problem.bias is not None:
        # The bias is added to a result that was rounded before.
        y_bound = y_bound + tolerances.rounding(exact - oracle.fp64(problem.bias), dtype)
    within(problem.y, exact, y_bound)
    within(problem.d_lora_a, grads.d_lora_a.T, bounds.d_lora_a.T)
    within(problem.d_lora_b, grads.d_lora_b.T, bounds.d_lora_b.T)
    within(problem.d_magnitude, grads.d_magnitude, bounds.d_magnitude)
    return grads.d_x, bounds.d_x


def within(found: Any, exact: np.ndarray, bound: Any) -> None:
    excess = np.abs(oracle.fp64(found) - exact) - bound
    assert excess.max() <= 0, f"exceeds its bound by {excess.max()}"


def trained(layer: Any, seed: int = 0) -> Any:
    """`layer`, changed in place to look trained: lora_a, lora_b random, the magnitude off its norm,
    and a bias."""
    rng = np.random.default_rng(seed)
    for variable, scale in ((layer.lora_a, 0.3), (layer.lora_b, 0.4)):
        value = scale * rng.normal(size=variable.shape)
        variable.set_value(jnp.asarray(value, variable.dtype))
    norm = layer.norm()
    layer.magnitude.set_value(norm * jnp.asarray(1 + 0.1 * rng.normal(size=norm.shape), norm.dtype))
    if getattr(layer, "bias", None) is not None:
        layer.bias.set_value(jnp.asarray(rng.normal(size=layer.bias.shape), layer.bias.dtype))
    return layer


def differentiate(layer: Any, x: jax.Array, seed: int = 1) -> tuple[Any, ...]:
    """(y, dy, gradients by name, dx or None for integer x) for a random cotangent dy."""
    inexact = jnp.issubdtype(x.dtype, jnp.floating)
    wrt = nnx.DiffState(0, nnx.LoRAParam)

    def objective(layer, x, dy):
        return jnp.vdot(layer(x).astype(jnp.float32), dy.astype(jnp.float32))

    @nnx.jit
    def both(layer, x, dy):
        if inexact:
            return nnx.grad(objective, argnums=(wrt, 1))(layer, x, dy)
        return nnx.grad(objective, argnums=wrt)(layer, x, dy), None

    with jax.default_matmul_precision("highest"):
        y = nnx.jit(lambda layer, x: layer(x))(layer, x)
        dy = jnp.asarray(np.random.default_rng(seed).normal(size=y.shape), y.dtype)
        return y, dy, *both(layer, x, dy)
