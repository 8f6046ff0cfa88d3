"""The loss of chosen tokens, and that no other token's logits are computed."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora.lm.models as decoder
from tests.jax_dora.drawn import drawn
from tests.jax_dora.lm.models.conftest import SMALL as CONFIG
from tests.jax_dora.programs import equations
from tests.tables import thinned


@pytest.fixture(scope="module")
def model():
    return drawn(lambda: decoder.CausalLM(CONFIG, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, CONFIG.vocab_size, (3, 24)).astype(np.int32)
    weights = np.where(rng.random((3, 23)) < 0.3, rng.random((3, 23)), 0).astype(np.float32)
    return tokens[:, :-1], tokens[:, 1:], weights


def jitted(loss, **options):
    return nnx.jit(functools.partial(loss, **options))


logits_of = nnx.jit(lambda model, tokens: model(tokens))


def reference(model, tokens, targets, weights):
    """From all logits, in fp64 NumPy."""
    logits = np.float64(logits_of(model, jnp.asarray(tokens)))
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return -(weights * chosen).sum()


@pytest.mark.parametrize("chunk", thinned([1, 7, 69, None], [7]))
def test_next_token_loss(model, batch, chunk):
    loss = jitted(decoder.next_token_loss, chunk=chunk)(model, *map(jnp.asarray, batch))
    np.testing.assert_allclose(loss.total, reference(model, *batch), rtol=1e-5)
    np.testing.assert_allclose(loss.weight, batch[2].sum(), rtol=1e-6)


@pytest.mark.parametrize("chunk", thinned([4, None], [4]))
def test_last_tokens_loss(model, batch, chunk):
    tokens, targets, _ = batch
    weights = np.zeros(targets.shape, np.float32)
    weights[:, -9:] = 1
    whole = np.concatenate((tokens, targets[:, -1:]), axis=1)
    loss = jitted(decoder.last_tokens_loss, last=9, chunk=chunk)(model, jnp.asarray(whole))
    np.testing.assert_allclose(loss.total, reference(model, tokens, targets, weights), rtol=1e-5)
    assert loss.weight == 27


@pytest.mark.slow
def test_gradient_does_not_depend_on_the_chunks(model, batch):
    batch = [jnp.asarray(array) for array in batch]

    def gradient(chunk):
        loss = lambda m: decoder.next_token_loss(m, *batch, chunk=chunk).total  # noqa: E731
        return nnx.jit(nnx.grad(loss))(model)

    for a, b in zip(jax.tree.leaves(gradient(5)), jax.tree.leaves(gradient(None)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max())


@pytest.mark.ci
def test_gradient_is_that_of_all_logits(model, batch):
    """The head's and those of the layers below it, at any weight of the loss."""
    tokens, targets, weights = map(jnp.asarray, batch)

    def dense(model):
        log_p = jax.nn.log_softmax(model(tokens))
        chosen = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        return -3 * (weights * chosen).sum()

    def ours(model):
        return 3 * decoder.next_token_loss(model, tokens, targets, weights, chunk=8).total

    for a, b in zip(
        *(jax.tree.leaves(nnx.jit(nnx.grad(f))(model)) for f in (ours, dense)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max())


def test_logits_are_computed_once_beside_a_frozen_head(model, batch):
    """A product for the logits, and one for the gradient of what the head reads."""
    batch = [jnp.asarray(array) for array in batch]
    wanted = nnx.All(nnx.Param, nnx.PathContains("layers"))
    graphdef, trained, frozen = nnx.split(model, wanted, ...)

    def loss(trained):
        return decoder.next_token_loss(nnx.merge(graphdef, trained, frozen), *batch, chunk=8).total

    products = [
        one.outvars[0].aval.shape
        for one in equations(jax.grad(loss), trained)
        if one.primitive.name == "dot_general"
    ]
    vocab, hidden = CONFIG.vocab_size, CONFIG.hidden_size
    assert products.count((8, vocab)) == 1
    assert not {(hidden, vocab), (vocab, hidden)} & set(products)


def test_no_tokens_no_loss(model, batch):
    tokens, targets, weights = map(jnp.asarray, batch)
    loss = jitted(decoder.next_token_loss, chunk=8)(model, tokens, targets, 0 * weights)
    assert (loss.total, loss.weight) == (0, 0)


def most_logits(function, *args):
    """The largest number of rows of any [..., vocab] array that the function computes."""
    rows = [0]
    for equation in equations(function, *args):
        for var in equation.outvars:
            shape = getattr(var.aval, "shape", ())
            # The head's kernel and its gradient are [hidden, vocab].
            if shape and shape[-1] == CONFIG.vocab_size and shape[0] != CONFIG.hidden_size:
                rows.append(int(np.prod(shape[:-1])))
    return max(rows)


def test_logits_exist_only_for_the_loss(model, batch):
    tokens, targets, weights = map(jnp.asarray, batch)
    graphdef, state = nnx.split(model)

    def last(state):
        return decoder.last_tokens_loss(nnx.merge(graphdef, state), tokens, 4).total

    def masked(state):
        model = nnx.merge(graphdef, state)
        return decoder.next_token_loss(model, tokens, targets, weights, chunk=8).total

    assert most_logits(jax.value_and_grad(last), state) == 12
    assert most_logits(jax.value_and_grad(masked), state) == 8
    assert most_logits(nnx.jit(type(model).__call__), model, tokens) == tokens.size


@pytest.mark.parametrize("last", [0, 24])
def test_last_out_of_range(model, last):
    with pytest.raises(ValueError, match=f"last is {last}; expected at least 1 and less than"):
        decoder.last_tokens_loss(model, jnp.zeros((1, 24), jnp.int32), last)
