"""Products and lookups of a followed weight, against the same program with W' in fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

from jax_dora import DoRARule, apply_dora
from jax_dora.tracing.adapted_products import AdaptedReader
from jax_dora.tracing.trace import weight_trace
from jax_dora.tracing.weight_view import Weight
from parity import tolerances
from tests.matrices import within
from tests.tables import thinned

RANK, RULE = 2, DoRARule("", 2, 3.0)
ROWS = jnp.array([[1, 2], [4, 0]])
MANUAL = functools.partial(
    jax.shard_map,
    mesh=jax.sharding.Mesh(jax.devices()[:1], "device"),
    in_specs=jax.P(),
    out_specs=jax.P(),
)

# The weight's shape, its axes, the operand's shape or the operand, and the program.
CASES = {
    "matrix": ((5, 7), "io", (3, 5), lambda w, x: x @ w),
    "left operand": ((5, 7), "oi", (7, 3), lambda w, x: w @ x),
    "transposed": ((7, 5), "oi", (3, 5), lambda w, x: x @ w.T),
    "vector": ((5, 7), "io", (5,), lambda w, x: x @ w),
    "heads": ((4, 3, 5), "ioo", (2, 6, 4), lambda w, x: jnp.einsum("btd,dnh->btnh", x, w)),
    "heads first": ((3, 4, 5), "oio", (2, 6, 4), lambda w, x: jnp.einsum("btd,ndh->bnth", x, w)),
    "join heads": ((3, 5, 4), "iio", (2, 3, 5), lambda w, x: jnp.einsum("tnh,nhd->td", x, w)),
    "one head": ((4, 1, 5), "ioo", (2, 4), lambda w, x: jnp.einsum("td,dnh->tnh", x, w)),
    "merged axes": ((4, 3, 5), "ioo", (6, 4), lambda w, x: x @ w.reshape(4, 15)),
    "split axes": ((15, 4), "io", (6, 3, 5), lambda w, x: jnp.tensordot(x, w.reshape(3, 5, 4), 2)),
    "swapped pieces": (
        (15, 4),
        "io",
        (6, 5, 3),
        lambda w, x: x.reshape(6, 15) @ w.reshape(3, 5, 4).transpose(1, 0, 2).reshape(15, 4),
    ),
    "batch": ((3, 4, 5), "bio", (6, 3, 4), lambda w, x: jnp.einsum("ted,edf->tef", x, w)),
    "every expert": ((3, 4, 5), "bio", (6, 4), lambda w, x: jnp.einsum("td,edf->etf", x, w)),
    "summed experts": ((3, 4, 5), "bio", (6, 3, 4), lambda w, x: jnp.einsum("ted,edf->tf", x, w)),
    "an expert": ((3, 4, 5), "bio", (6, 4), lambda w, x: x @ w[1]),
    "a chosen expert": ((3, 4, 5), "bio", (6, 4), lambda w, x: x @ w[jnp.int32(x[0, 0] > 0)]),
    "each expert in turn": ((3, 4, 4), "bio", (6, 4), lambda w, x: sum(x @ one for one in w)),
    "ragged": ((3, 4, 5), "bio", (6, 4), lambda w, x: lax.ragged_dot(x, w, jnp.array([1, 0, 4]))),
    "ragged, transposed": (
        (3, 2, 5, 4),
        "booi",
        (6, 4),
        lambda w, x: lax.ragged_dot(
            x, w.transpose(0, 3, 1, 2).reshape(3, 4, 10), jnp.array([3, 3, 0])
        ),
    ),
    "lookup": ((9, 4), "io", ROWS, lambda w, ids: w[ids]),
    "take": ((9, 4), "io", ROWS, lambda w, ids: jnp.take(w, ids, axis=0)),
    "lookup of 5 outside": (
        (9, 4),
        "io",
        ROWS,
        lambda w, ids: w.at[9 * ids].get(mode="fill", fill_value=5),
    ),
    "tied head": ((9, 4), "io", (3, 4), lambda w, x: x @ w.T),
    "scan over layers": (
        (3, 4, 4),
        "bio",
        (6, 4),
        lambda w, x: lax.scan(lambda c, one: (jnp.sin(c @ one), None), x, w)[0],
    ),
    "in a scan": (
        (4, 4),
        "io",
        (2, 6, 4),
        lambda w, x: lax.scan(lambda c, one: (c @ w + one, c), x[0], x, reverse=True)[0],
    ),
    "handed on by a scan": (
        (4, 4),
        "io",
        (2, 6, 4),
        lambda w, x: (lambda out: out[0] @ out[1])(
            lax.scan(lambda c, one: ((c[0] @ c[1] + one, c[1]), None), (x[0], w), x)[0]
        ),
    ),
    "remat": ((4, 4), "io", (6, 4), lambda w, x: jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)(x)),
    "jit": ((4, 4), "io", (6, 4), lambda w, x: jax.jit(lambda x, w: jnp.sin(x @ w) @ w.T)(x, w)),
    "cond": (
        (4, 4),
        "io",
        (6, 4),
        lambda w, x: lax.cond(x[0, 0] > 9, lambda x: x, lambda x: x @ w, x),
    ),
    "vmap": ((3, 4, 5), "bio", (3, 6, 4), lambda w, x: jax.vmap(jnp.matmul)(x, w)),
    "vmap of rows": ((4, 5), "io", (3, 6, 4), lambda w, x: jax.vmap(lambda a: a @ w)(x)),
    "times a number": ((4, 5), "io", (6, 4), lambda w, x: x @ (w * x[0, 0]) / 3),
    "sliced features": ((4, 6), "io", (3, 4), lambda w, x: x @ w[:, 1:5:2]),
    "split features": ((4, 6), "io", (3, 4), lambda w, x: x @ jnp.split(w, 2, -1)[1]),
    "sliced inputs": ((6, 5), "io", (3, 4), lambda w, x: x @ w[2:]),
    "no product": ((4, 5), "io", (6, 4), lambda w, x: x @ jnp.abs(w)),
    "returned": ((4, 5), "io", (6, 4), lambda w, x: w.T),
    "two weights": ((4, 4), "io", (6, 4), lambda w, x: x @ (w @ w)),
    "custom gradient": ((4, 5), "io", (6, 4), lambda w, x: jax.nn.relu(w).sum() * x),
    "manual": ((4, 5), "io", (6, 4), lambda w, x: MANUAL(jnp.matmul)(x, w)),
    "manual, of another array": ((4, 5), "io", (6, 4), lambda w, x: MANUAL(jnp.multiply)(x, x) @ w),
    "manual, closed over": (
        (4, 5),
        "io",
        (6, 4),
        lambda w, x: MANUAL(lambda x, one: one * (x @ w))(x, 2),
    ),
    "gradient inside": (
        (4, 5),
        "io",
        (6, 4),
        lambda w, x: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x),
    ),
}
QUICK = [
    *("transposed", "heads", "join heads", "every expert", "ragged, transposed", "lookup"),
    *("tied head", "scan over layers", "remat", "no product", "manual"),
]
READ_BY_OTHERS = {"no product", "returned", "two weights", "custom gradient"}
READ_BY_OTHERS |= {"lookup of 5 outside", "manual", "manual, closed over"}


@pytest.mark.parametrize("name", thinned(CASES, QUICK, CASES))
def test_a_program_computes_and_differentiates_as_with_the_merged_weight(name):
    shape, axes, x, program = CASES[name]
    rng = np.random.default_rng(len(name))
    if isinstance(x, tuple):
        x = jnp.asarray(rng.normal(size=x), jnp.float32)
    sizes = {role: [n for n, one in zip(shape, axes, strict=True) if one == role] for role in "bio"}
    b, i, o = sizes["b"], sizes["i"], sizes["o"]
    draw = {
        "kernel": rng.normal(size=shape),
        "lora_a": rng.normal(size=(*b, *i, RANK)),
        "lora_b": rng.normal(size=(*b, RANK, *o)),
        "magnitude": 1 + rng.uniform(size=(*b, *o)),
    }
    arrays = {key: jnp.asarray(value, jnp.float32) for key, value in draw.items()}
    norm = _norm({key: np.asarray(value, np.float64) for key, value in arrays.items()}, axes)
    others = []

    class Reader(AdaptedReader):
        def other(self, weight, name):
            others.append(name)
            return super().other(weight, name)

    def followed(arrays, x):
        given = {name: arrays[name] for name in ("kernel", "lora_a", "lora_b")}
        given["g"] = arrays["magnitude"] / jnp.asarray(norm, jnp.float32)
        weight = Weight.of(axes, given, Reader(RULE, None))
        with weight_trace() as trace:
            return trace.array(program(trace.lift(weight.aval, lambda: weight), x))

    def merged(arrays, x):
        return program(_merged(arrays, norm, axes), x)

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, arrays, x):
        y, pullback = jax.vjp(lambda arrays: function(arrays, x), arrays)
        dy = np.random.default_rng(1).normal(size=y.shape)
        return y, pullback(jnp.asarray(dy, y.dtype))[0]

    found = both(followed, arrays, x)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda one: jnp.asarray(one, jnp.float64), arrays)
        expected = both(merged, wide, x if x.dtype == jnp.int32 else jnp.asarray(x, jnp.float64))
        expected = jax.tree.map(np.asarray, expected)
    for one, exact in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jnp.float32
        peak = max(1.0, float(np.abs(exact).max()))
        within(one, exact, tolerances.caps.OPERATOR_FP32_MAX_ABS * peak)
    assert bool(others) == (name in READ_BY_OTHERS)


def test_a_merged_weight_in_bf16_is_rounded_once():
    rng = np.random.default_rng(0)
    draw = {"kernel": (4, 5), "lora_a": (4, RANK), "lora_b": (RANK, 5), "magnitude": (5,)}
    arrays = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in draw.items()}
    arrays["kernel"] = arrays["kernel"].astype(jnp.bfloat16)
    wide = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    norm = _norm(wide, "io")
    given = {name: arrays[name] for name in ("kernel", "lora_a", "lora_b")}
    given["g"] = arrays["magnitude"] / jnp.asarray(norm, jnp.float32)
    weight = Weight.of("io", given, AdaptedReader(RULE, None))
    with weight_trace() as trace:
        found = trace.array(trace.lift(weight.aval, lambda: weight))
    exact = _merged(wide, norm, "io")
    assert found.dtype == jnp.bfloat16
    within(found, exact, 1.01 * tolerances.rounding(exact, jnp.bfloat16))


@pytest.mark.ci
def test_a_product_on_a_mesh_of_which_one_axis_is_explicit():
    class Bare(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jax.random.normal(jax.random.key(0), (8, 4)))

        def __call__(self, x):
            return x @ self.w[...]

    x, rule = jax.random.normal(jax.random.key(1), (2, 8)), DoRARule("", 2, 3.0)
    expected = Bare()(x)
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        base = Bare()
        base.w.set_value(jax.device_put(base.w[...], jax.NamedSharding(mesh, jax.P(None, "tp"))))
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("dp")))
        y = apply_dora(base, rule, rngs=nnx.Rngs(0), example=(x,))(x)
        assert jax.typeof(y) == jax.typeof(base(x))
    within(y, np.asarray(expected), tolerances.caps.OPERATOR_FP32_MAX_ABS)


def test_an_array_that_no_weight_is_in_is_computed_as_ever():
    x = jnp.ones((2, 3))
    with weight_trace():
        y = jax.jit(lambda x: jax.nn.relu(x) @ x.T)(x)
    assert jnp.array_equal(y, x @ x.T)


def _merged(arrays, norm, axes):
    """W' by its definition, with the norm held constant."""
    order = [place for role in "bio" for place, one in enumerate(axes) if one == role]
    n_batch, n_in = axes.count("b"), axes.count("i")
    kernel = arrays["kernel"].transpose(order)
    batch = kernel.shape[:n_batch]
    count = int(np.prod(batch))
    matrices = kernel.reshape(count, int(np.prod(kernel.shape[n_batch : n_batch + n_in])), -1)
    a = arrays["lora_a"].reshape(count, -1, RANK)
    b = arrays["lora_b"].reshape(count, RANK, -1)
    adapted = matrices + RULE.scale * a @ b
    g = arrays["magnitude"].reshape(count, 1, -1) / norm.reshape(count, 1, -1)
    return (g * adapted).reshape(kernel.shape).transpose(np.argsort(order))


def _norm(arrays, axes):
    ones = dict(arrays, magnitude=np.ones_like(arrays["magnitude"]))
    adapted = np.asarray(_merged(ones, np.ones_like(arrays["magnitude"]), axes))
    inputs = tuple(place for place, role in enumerate(axes) if role == "i")
    norm = np.sqrt(np.square(adapted).sum(inputs))
    left = [role for role in axes if role != "i"]
    order = [place for role in "bo" for place, one in enumerate(left) if one == role]
    return norm.transpose(order)
