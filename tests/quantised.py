"""Random quantised kernels, their values in fp64 by NumPy, and operands of DoRA projections."""

from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix

from jax_dora.ops import dora_linear

SCALE, RANK = 0.7, 5
NAMES = ("x", "lora_a", "lora_b", "magnitude", "bias")

# The least and the greatest qvalue of each format.
RANGES = {"nf4": (0, 15), "int4": (-8, 7), "int8": (-128, 127), "float8_e4m3fn": (-448, 448)}
_STORED = {"nf4": jnp.uint4, "int4": jnp.int4, "int8": jnp.int8}


def nf4_codebook() -> np.ndarray:
    """Returns the 16 values of NF4, quantiles of the normal distribution (arXiv 2305.14314)."""

    def quantiles(count: int) -> list[float]:
        offset = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
        return [NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, count)[:-1]]

    values = np.array([*quantiles(9), 0.0, *(-one for one in quantiles(8))])
    return np.sort(values / values.max())


def draw(
    qtype: str,
    shape: tuple[int, ...],
    tiles: tuple[int, ...],
    *,
    seed: int = 0,
    scale_dtype: Any = jnp.float32,
    zero_point: bool = False,
    exact: bool = False,
) -> qwix.QArray:
    """Returns a kernel whose scales have the shape `tiles`, and are powers of two if `exact`."""
    rng = np.random.default_rng(seed)
    low, high = RANGES[qtype]
    dtype = _STORED.get(qtype, jnp.float8_e4m3fn)
    if qtype == "float8_e4m3fn":
        # A few of the drawn numbers exceed the range.
        qvalue = jnp.nan_to_num(jnp.asarray(rng.normal(size=shape) * 100, dtype))
    else:
        qvalue = jnp.asarray(rng.integers(low, high + 1, size=shape), dtype)
    top = 1 if qtype == "nf4" else high
    scale = (0.5 + rng.random(size=tiles)) * 2 / (top * shape[-2] ** 0.5)
    if exact:
        scale = 2.0 ** np.round(np.log2(scale))
    points = jnp.asarray(rng.integers(-3, 4, size=tiles), dtype) if zero_point else None
    return qwix.QArray(
        qvalue, jnp.asarray(scale, scale_dtype), points, qtype if qtype == "nf4" else dtype
    )


def meant(kernel: qwix.QArray) -> np.ndarray:
    """Returns the values of a quantised kernel in fp64."""
    stored = np.asarray(kernel.qvalue)
    values = stored.astype(np.float64)
    if kernel.qtype == "nf4":
        codebook = nf4_codebook().astype(np.float32).astype(np.float64)
        values = codebook[stored.astype(np.int64)]

    def spread(tiles: Any) -> np.ndarray:
        tiles = np.asarray(tiles).astype(np.float64)
        for axis, size in enumerate(stored.shape):
            tiles = np.repeat(tiles, size // tiles.shape[axis], axis)
        return tiles

    if kernel.zero_point is not None:
        values = values - spread(kernel.zero_point)
    return values * spread(kernel.scale)


def operands(kernel, seed=3, dtype=jnp.float32, rows=(2, 7)):
    """Returns (x, lora_a, lora_b, magnitude, bias) for a kernel, as after training, and dy."""
    rng = np.random.default_rng(seed)
    n_in, n_out = kernel.shape
    a, b = rng.normal(size=(n_in, RANK)) / n_in**0.5, rng.normal(size=(RANK, n_out)) / RANK**0.5
    norm = np.linalg.norm(meant(kernel) + SCALE * a @ b, axis=0)
    magnitude = norm * (1 + 0.1 * rng.normal(size=n_out))
    drawn = (rng.normal(size=(*rows, n_in)), a, b, magnitude, rng.normal(size=n_out))
    x, a, b, magnitude, bias = (jnp.asarray(one, jnp.float32) for one in drawn)
    dy = jnp.asarray(rng.normal(size=(*rows, n_out)), dtype)
    return (x.astype(dtype), a, b, magnitude, bias.astype(dtype)), dy


def both(kernel, arrays, dy, **options):
    """Returns the result, and the gradients of all operands but the kernel."""

    def call(kernel, x, a, b, magnitude, bias):
        return dora_linear(x, kernel, a, b, magnitude, SCALE, bias=bias, **options)

    @jax.jit
    def run(kernel, arrays, dy):
        y, pull = jax.vjp(lambda *arrays: call(kernel, *arrays), *arrays)
        return y, pull(dy)

    with jax.default_matmul_precision("highest"):
        return run(kernel, arrays, dy)


def plain(kernel):
    return jnp.asarray(meant(kernel), jnp.float32)


def near(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * np.abs(other).max())
