"""Transposed codes that the norm's kernel makes: a step reads them, and makes them again by a
transpose alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora import DoRARule
from jax_dora.layers.dora_projection import operands_of_call
from jax_dora.ops import norm as norms
from jax_dora.ops.mosaic.norm import transposing_norm
from jax_dora.ops.saved_codes import save_codes
from tests.jax_dora.lm.models.conftest import SMALL
from tests.jax_dora.lm.models.test_coded_rows import TOKENS, base
from tests.jax_dora.programs import equations, gradient_of_logits
from tests.jax_dora.small_models import train
from tests.tables import slow

E5M2 = "float8_e5m2"


@pytest.fixture
def by_norm(monkeypatch):
    """Lets every norm that can make codes make them, by XLA, as in a program for one device."""
    choose, target = norms.choose.choose, norms.choose.target()

    def choose_it(op, implementation, *candidates, optional=False):
        if optional and candidates[0][0] is transposing_norm:
            return True
        return choose(op, implementation, *candidates, optional=optional)

    monkeypatch.setattr(norms.choose, "choose", choose_it)
    single = dataclasses.replace(target, partitioned=False)
    monkeypatch.setattr(norms.choose, "target", lambda: single)


def gradient_of(memory, remat=True):
    """Returns the gradients of a decoder's adapters, and the equations of their program."""
    rule, model = DoRARule(".*_proj", 3, 4.0), base("float8_e4m3fn", E5M2)
    model = train(jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(1)))
    config = dataclasses.replace(SMALL, memory=memory, remat=remat)
    model.model.config = model.config = config
    gradient, trained = gradient_of_logits(model, TOKENS)
    return jax.jit(gradient)(trained), list(equations(gradient, trained))


@pytest.mark.parametrize(("memory", "again"), [(None, 7), slow(1.0, 0)])
def test_a_step_reads_them_and_computes_no_norm_again(by_norm, memory, again):
    found, program = gradient_of(memory)
    names = [one.params["op"].name for one in program if one.primitive.name == "dora"]
    assert names.count("norm") == 7
    saved = [len(one.invars) for one in program if one.primitive.name == "save_dora_codes"]
    assert (saved.count(2), saved.count(1)) == (7, again)
    wanted, _ = gradient_of(None, remat=False)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * np.abs(other).max())


def test_they_are_read(by_norm, monkeypatch):
    """Zeros in their place change the result."""
    wanted, _ = gradient_of(None)
    monkeypatch.setattr(norms, "save_codes", lambda codes, _: jnp.zeros_like(codes))
    found, _ = gradient_of(None)
    one, other = (jnp.concatenate([*map(jnp.ravel, jax.tree.leaves(x))]) for x in (found, wanted))
    assert jnp.linalg.norm(one - other) > 0.1 * jnp.linalg.norm(other)


@pytest.mark.parametrize("in_stack", [False, True])
def test_every_norm_of_a_layer_is_that_of_its_calls(by_norm, monkeypatch, request, in_stack):
    """The kernel sums in another order than that of a norm alone, and a fresh layer's g is 1."""
    options = {"act_qtype": "float8_e4m3fn", "bwd_qtype": E5M2}

    def adapted():
        model = nnx.Sequential(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
        model = jax_dora.quantize(model, "float8_e4m3fn", **options)
        model = base(**options) if in_stack else model
        return jax_dora.apply_dora(model, DoRARule("all-linear", 3, 4.0), rngs=nnx.Rngs(1))

    def other_sums(*arrays):
        made = both(*arrays)
        return made and (3 * made[0], made[1])

    alone, both = jax_dora.norms(adapted()), norms.norm_with_codes
    monkeypatch.setattr(norms, "norm_with_codes", other_sums)
    jax.clear_caches()  # of the programs of stacks
    request.addfinalizer(jax.clear_caches)
    model = adapted()
    found = jax_dora.norms(model)
    with_codes = [path for path in found if "lm_head" not in path]
    assert len(with_codes) == (7 if in_stack else 1)
    for path in with_codes:
        np.testing.assert_array_equal(found[path], 3 * alone[path])
    if not in_stack:
        (layer,) = model.layers
        g = operands_of_call(layer, jnp.ones((1, 64)))["g"]
        np.testing.assert_array_equal(g, 1)


def test_a_gradient_of_the_kernel_is_refused_as_without_them(by_norm):
    options = {"act_qtype": "float8_e4m3fn", "bwd_qtype": E5M2}
    model = nnx.Sequential(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
    model = jax_dora.quantize(model, "float8_e4m3fn", **options)
    model = jax_dora.apply_dora(model, DoRARule("all-linear", 3, 4.0), rngs=nnx.Rngs(1))
    with pytest.raises(TypeError, match="float8_e4m3fn is being differentiated; it is frozen"):
        nnx.grad(lambda model: model(jnp.ones((1, 64))).sum())(model)


@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 0)])
def test_in_vmap(axes):
    stored = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (4, 3, 5)), "float8_e4m3fn")
    turned = stored.swapaxes(1, 2)
    arrays = [
        one[0] if axis is None else jnp.moveaxis(one, 0, axis)
        for one, axis in zip((turned, stored), axes, strict=True)
    ]
    found = jax.vmap(save_codes, axes)(*arrays)
    wanted = turned if axes[0] is not None else jnp.broadcast_to(turned[0], turned.shape)
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))
