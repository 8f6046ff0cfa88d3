"""DoRALinearGeneral and DoRAEinsum: against the oracle, one matrix for each batch index."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_dora import DoRAEinsum, DoRALinearGeneral
from parity import oracle, tolerances
from tests.jax_dora.matrices import differentiate, trained
from tests.matrices import Problem, judge, within
from tests.tables import thinned

RANK, ALPHA = 3, 4.0


def general(in_features, out_features, dtype=jnp.float32, **settings):
    options = settings.pop("options", {})
    base = nnx.LinearGeneral(
        in_features, out_features, param_dtype=dtype, rngs=nnx.Rngs(0), **settings
    )
    return base, DoRALinearGeneral(base, rank=RANK, alpha=ALPHA, rngs=nnx.Rngs(1), **options)


def einsum(equation, kernel_shape, bias_shape=None, dtype=jnp.float32, **options):
    base = nnx.Einsum(equation, kernel_shape, bias_shape, param_dtype=dtype, rngs=nnx.Rngs(0))
    return base, DoRAEinsum(base, rank=RANK, alpha=ALPHA, rngs=nnx.Rngs(1), **options)


# layer, shape of x, and einsums from x, kernel, bias and y to [n, rows or in, in or out].
CASES = {
    "split heads": (
        lambda dtype: general(10, (2, 3), dtype),
        (4, 5, 10),
        ("bti->bti", "ihd->ihd", "hd->hd", "bthd->bthd"),
        (1, (20, 10), (10, 6), 6),
    ),
    "join heads": (
        lambda dtype: general((2, 5), 8, dtype, axis=(-2, -1)),
        (4, 3, 2, 5),
        ("bthd->bthd", "hdo->hdo", "o->o", "bto->bto"),
        (1, (12, 10), (10, 8), 8),
    ),
    "batch axis": (
        lambda dtype: general(5, (2, 4), dtype, axis=1, batch_axis={0: 3}),
        (3, 5, 6),
        ("nit->nti", "nihd->nihd", "nhd->nhd", "nthd->nthd"),
        (3, (6, 5), (5, 8), 8),
    ),
    "axes from both ends": (
        lambda dtype: general((5, 2), 8, dtype, axis=(1, -1)),
        (4, 5, 3, 2),
        ("bhtd->bthd", "hdo->hdo", "o->o", "bto->bto"),
        (1, (12, 10), (10, 8), 8),
    ),
    "batch axis and one from the end": (
        lambda dtype: general(5, (2, 4), dtype, axis=-2, batch_axis={0: 3}),
        (3, 5, 6),
        ("nit->nti", "nihd->nihd", "nhd->nhd", "nthd->nthd"),
        (3, (6, 5), (5, 8), 8),
    ),
    "einsum": (
        lambda dtype: einsum("...td,sndh->s...nth", (3, 2, 10, 3), (3, 1, 2, 1, 3), dtype),
        (4, 5, 10),
        ("btd->btd", "sndh->dsnh", "sxnyh->sxnyh", "sbnth->btsnh"),
        (1, (20, 10), (10, 18), 18),
    ),
    "einsum, experts": (
        lambda dtype: einsum("ced,fed->cef", (7, 3, 5), None, dtype),
        (6, 3, 5),
        ("ced->ecd", "fed->edf", None, "cef->ecf"),
        (3, (6, 5), (5, 7), 7),
    ),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    thinned(
        itertools.product(CASES, [jnp.float32, jnp.bfloat16]),
        [
            ("join heads", jnp.float32),
            ("axes from both ends", jnp.float32),
            ("batch axis and one from the end", jnp.float32),
            ("einsum, experts", jnp.float32),
        ],
        [("split heads", jnp.float32), ("batch axis", jnp.bfloat16)],
    ),
)
def test_agrees_with_the_oracle(case, dtype):
    make, shape, (of_x, of_kernel, of_bias, of_y), (n, rows, matrix, out) = CASES[case]
    _, layer = make(dtype)
    trained(layer)
    x = jnp.asarray(np.random.default_rng(2).normal(size=shape), dtype)
    y, dy, grads, dx = differentiate(layer, x)
    assert y.dtype == dtype

    def cut(equation, array, *sizes):
        return np.einsum(equation, oracle.fp64(array)).reshape(n, *sizes)

    xs, ys, dys = cut(of_x, x, *rows), cut(of_y, y, rows[0], out), cut(of_y, dy, rows[0], out)
    dxs = cut(of_x, dx, *rows)
    kernels = cut(of_kernel, layer.kernel[...], *matrix)
    for one in range(n):
        bias = None if layer.bias is None else cut(of_bias, layer.bias[...], out)[one]

        def adapter(name, rows, columns, state, one=one):
            return oracle.fp64(state[name][...]).reshape(n, rows, columns)[one]

        problem = Problem(
            x=xs[one],
            dy=dys[one],
            kernel=kernels[one],
            lora_a=adapter("lora_a", matrix[0], RANK, nnx.state(layer)),
            lora_b=adapter("lora_b", RANK, out, nnx.state(layer)),
            magnitude=adapter("magnitude", 1, out, nnx.state(layer))[0],
            bias=bias,
            y=ys[one],
            d_lora_a=adapter("lora_a", matrix[0], RANK, grads),
            d_lora_b=adapter("lora_b", RANK, out, grads),
            d_magnitude=adapter("magnitude", 1, out, grads)[0],
        )
        exact_dx, bound = judge(problem, layer.scale, dtype)
        within(dxs[one], exact_dx, bound)


@pytest.mark.parametrize(
    ("case", "dtype"),
    thinned(
        [
            *itertools.product(CASES, [jnp.float32]),
            ("split heads", jnp.bfloat16),
            ("join heads", jnp.bfloat16),
        ],
        [
            ("einsum", jnp.float32),
            ("split heads", jnp.bfloat16),
        ],
    ),
)
def test_a_fresh_adapter_changes_nothing(case, dtype):
    make, shape, *_ = CASES[case]
    base, layer = make(dtype)
    if base.bias is not None:
        base.bias[...] += jnp.arange(base.bias.size).reshape(base.bias.shape).astype(dtype)
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    call = nnx.jit(lambda layer, x: layer(x))
    found, expected = call(layer, x), call(base, x)
    if case.endswith("heads"):
        assert jnp.array_equal(found, expected)
    else:
        # The kernel is transposed for one plain product, whose sums may run in another order.
        within(found, oracle.fp64(expected), tolerances.caps.OPERATOR_FP32_MAX_ABS)


def test_dropout_reaches_the_adapter_alone():
    """lora_b = 0: by LoRA's convention dropping changes nothing while g = 1."""
    x = jax.random.normal(jax.random.key(0), (4, 10))
    base, layer = general(10, (2, 3), options={"dropout": 0.5})
    assert jnp.array_equal(layer(x), base(x))
    trained(layer)
    assert not jnp.array_equal(layer(x), layer(x))
    layer.eval()
    assert jnp.array_equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("equation", "kernel_shape", "reason"),
    [
        ("td,...h->t...h", (2, 3), "the kernel has an ellipsis"),
        ("...td,dh->th", (2, 3), "the ellipsis is not in both"),
        ("tdd,dh->th", (2, 3), "a letter occurs twice"),
        ("td,dhk->th", (2, 3, 4), "'k'.* is summed"),
        ("td,dt->t", (2, 4), "the kernel has no output axis"),
        ("th,hk->thk", (2, 3), "no axis is contracted"),
    ],
)
def test_an_equation_that_is_no_projection_is_refused(equation, kernel_shape, reason):
    with pytest.raises(NotImplementedError, match=reason):
        einsum(equation, kernel_shape)


def test_an_equation_given_by_the_call_is_refused():
    _, layer = einsum("td,dh->th", (4, 3))
    with pytest.raises(ValueError, match="einsum_str is 'td,dh->th'; expected None"):
        layer(jnp.ones((2, 4)), "td,dh->th")
    assert layer(jnp.ones((2, 4)), out_sharding=jax.P()).shape == (2, 3)
