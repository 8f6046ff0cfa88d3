"""The loss of a model in FP8 multiplies by its head in FP8, and its gradient is in 16 bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora.lm.models import coded_head, next_token_loss
from jax_dora.quantisation import multiply_forward
from tests.jax_dora.lm.models.test_coded_rows import FP8, TOKENS, base
from tests.jax_dora.programs import equations

E5M2 = "float8_e5m2"


def rounded(rows):
    """Returns rows in fp64 that are rounded to FP8, with one scale each."""
    rows = np.asarray(rows, np.float64)
    scale = np.abs(rows).max(1, keepdims=True) / 448
    return (rows / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def heads():
    """Returns random rows, a kernel, and the codes of a model's head with this kernel."""
    rng = np.random.default_rng(4)
    model = nnx.clone(base(FP8, E5M2))
    size = model.lm_head.kernel.shape
    kernel = rng.normal(size=size) * np.exp(2 * rng.normal(size=(1, size[1])))
    model.lm_head.kernel[...] = jnp.asarray(kernel, jnp.float32)
    hidden = rng.normal(size=(7, size[0])) * np.exp(2 * rng.normal(size=(7, 1)))
    return jnp.asarray(hidden, jnp.float32), model.lm_head.kernel[...], coded_head.codes_of(model)


@pytest.mark.ci
def test_logits_are_those_of_the_codes():
    """Each row and each token has its own scale. In fp32, sums are exact to about 1e-6."""
    hidden, kernel, coded = heads()
    expected = rounded(hidden) @ rounded(kernel.T).T
    size = np.abs(rounded(hidden)) @ np.abs(rounded(kernel.T)).T
    error = np.abs(np.float64(multiply_forward(hidden, kernel, coded)) - expected)
    # A quotient halfway between two codes may be rounded to the other: 2**-4 of one of 48 terms.
    assert np.mean(error < 1e-5 * size) > 0.9
    assert np.all(error < 2.0**-4 * size)


@pytest.mark.ci
def test_the_gradient_is_that_of_the_head_as_it_is():
    hidden, kernel, coded = heads()
    cotangent = np.random.default_rng(5).normal(size=(7, kernel.shape[1])).astype(np.float32)
    _, backward = jax.vjp(lambda hidden: multiply_forward(hidden, kernel, coded), hidden)
    expected = np.float64(cotangent) @ np.float64(kernel).T
    size = np.abs(np.float64(cotangent)) @ np.abs(np.float64(kernel)).T
    assert np.all(np.abs(backward(jnp.asarray(cotangent))[0] - expected) < 1e-5 * size)


def loss_of(model, *, trained=nnx.LoRAParam):
    """Returns a loss of some parameters, and these parameters."""
    graphdef, parameters, rest = nnx.split(model, trained, ...)
    tokens, targets = jnp.asarray(TOKENS[:, :-1]), jnp.asarray(TOKENS[:, 1:])
    weights = jnp.ones(targets.shape, jnp.float32)

    def loss(parameters):
        model = nnx.merge(graphdef, parameters, rest)
        return next_token_loss(model, tokens, targets, weights, chunk=7).total

    return loss, parameters


def adapted(bwd_qtype=E5M2):
    rule = jax_dora.DoRARule(".*(q|v|up)_proj", 3, 4.0)
    return jax_dora.apply_dora(base(FP8, bwd_qtype), rule, rngs=nnx.Rngs(1))


def widths_in_fp8(function, *operands):
    """Returns the numbers of features of the results of products in FP8."""
    products = [
        one for one in equations(function, *operands) if one.primitive.name == "dot_general"
    ]
    return {
        one.outvars[0].aval.shape[-1]
        for one in products
        if str(one.invars[1].aval.dtype).startswith("float8")
    }


@pytest.mark.ci
def test_the_loss_is_near_that_of_the_head_in_16_bits(monkeypatch):
    loss, adapters = loss_of(adapted())
    found = jax.jit(jax.value_and_grad(loss))(adapters)
    vocabulary = base().lm_head.kernel.shape[1]
    assert vocabulary in widths_in_fp8(jax.grad(loss), adapters)
    monkeypatch.setattr(coded_head, "is_coded", lambda model: False)
    loss, adapters = loss_of(adapted())
    exact = jax.jit(jax.value_and_grad(loss))(adapters)
    assert vocabulary not in widths_in_fp8(jax.grad(loss), adapters)
    assert 0 < abs(found[0] - exact[0]) < 1e-3 * exact[0]
    a, b = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(one[1])]) for one in (found, exact))
    assert jnp.vdot(a, b) > 0.99 * jnp.linalg.norm(a) * jnp.linalg.norm(b)


@pytest.mark.parametrize("what", ["forward only", "trained", "with a bias", "tied"])
@pytest.mark.ci
def test_heads_that_stay_in_16_bits(what):
    model = adapted(None if what == "forward only" else E5M2)
    head = model.lm_head
    if what == "trained":
        head.kernel = nnx.LoRAParam(head.kernel[...])
    elif what == "with a bias":
        head.bias = nnx.Param(jnp.zeros(head.kernel.shape[1]))
    elif what == "tied":
        model.lm_head = None
    assert coded_head.codes_of(model) is None


@pytest.mark.ci
def test_a_head_that_is_differentiated_is_not_coded():
    """Its gradient would be missing."""
    loss, parameters = loss_of(adapted(), trained=lambda path, _: "lm_head" in path)
    [gradient] = jax.tree.leaves(jax.grad(loss)(parameters))
    assert np.abs(gradient).max() > 0
