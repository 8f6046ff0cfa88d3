"""Cross-entropy of the next token. Logits are computed only for tokens that count."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jax_dora
from jax_dora.lm.models import coded_head
from jax_dora.lm.models.decoder import CausalLM, logits_of
from jax_dora.ops import residuals
from jax_dora.quantisation import ForwardCodes, multiply_forward


class Loss(NamedTuple):
    """A weighted sum of losses. The mean is total / weight.

    Total and weight are separate so that micro-batches can be summed.
    """

    total: jax.Array  # f32[]: weighted sum of the cross-entropies, in nats
    weight: jax.Array  # f32[]: sum of the weights


def last_tokens_loss(
    model: CausalLM, tokens: jax.Array, last: int, *, chunk: int | None = None
) -> Loss:
    """Returns the loss of the last `last` tokens of every row.

    Each token is predicted from the tokens before it.

    Args:
      model: the model.
      tokens: i32[batch, time]. The last token of a row is only a target, not an input.
      last: at least 1 and less than time.
      chunk: the number of tokens whose logits are in memory at a time; by default, all of them.

    Raises:
      ValueError: `last` is out of range.
    """
    time = tokens.shape[1]
    if not 1 <= last < time:
        raise ValueError(f"last is {last}; expected at least 1 and less than the {time} tokens")
    hidden = model.model(tokens[:, :-1])[:, -last:]
    targets = tokens[:, -last:]
    weights = jnp.ones(targets.shape, jnp.float32)
    return _cross_entropy(model, hidden, targets, weights, chunk)


def next_token_loss(
    model: CausalLM,
    tokens: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk: int | None = 1024,
) -> Loss:
    """Returns the weighted loss of predicting `targets`.

    Tokens of weight 0 are sorted to the end, and chunks with only such tokens are skipped. So
    logits are computed for at most `chunk` tokens of weight 0.

    Args:
      model, tokens, positions, segment_ids: the same as in `CausalLM.__call__`.
      targets: i32[batch, time], the token that follows each token.
      weights: f32[batch, time]; 0 if the token's loss does not count.
      chunk: the number of tokens whose logits are in a device's memory at a time; None for all.
    """
    hidden = model.model(tokens, positions, segment_ids)
    return _cross_entropy(model, hidden, targets, weights, chunk)


def _cross_entropy(
    model: CausalLM,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunk: int | None,
) -> Loss:
    head = model.head()
    if isinstance(head, jax_dora.DoRALayer) and head.dropout and not head.dropout.deterministic:
        raise NotImplementedError(
            f"the head's adapter has dropout rate {head.dropout.rate}, which the loss does not "
            "support; expected a rule without dropout for lm_head, or model.eval()"
        )
    graphdef, arrays = nnx.split(head)
    # Each device sorts its own rows, so that no activations are sent between devices.
    shards = model.config.row_shards if targets.shape[0] % model.config.row_shards == 0 else 1
    hidden = hidden.reshape(shards, -1, hidden.shape[-1])
    targets, weights = targets.reshape(shards, -1), weights.reshape(shards, -1).astype(jnp.float32)
    count = targets.shape[1]
    chunk = count if chunk is None else min(chunk, count)
    coded = coded_head.codes_of(model)
    total = _total(graphdef, chunk, arrays, coded, hidden, targets, weights)
    return Loss(total, jnp.sum(weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(
    head: nnx.GraphDef[Any],
    chunk: int,
    arrays: nnx.State,
    coded: ForwardCodes | None,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """Returns the weighted sum of the cross-entropies of hidden [shards, count, features].

    When it is differentiated, the forward pass computes the gradients chunk by chunk as well, so
    that logits are computed once. These are the gradient of `hidden`, and in fp32 the gradients of
    those arrays of the head that are differentiated.
    """
    chunks, _ = _in_chunks(chunk, hidden, targets, weights)

    def add(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
        chunk_total = _skip_zero_weights(functools.partial(_chunk_total, head, arrays, coded), part)
        return total + chunk_total, None

    return lax.scan(add, jnp.zeros((), jnp.float32), chunks)[0]


def _total_fwd(
    head: nnx.GraphDef[Any], chunk: int, arrays: Any, coded: Any, *others: Any
) -> tuple[Any, Any]:
    primals, tree = jax.tree.flatten(arrays)
    hidden, targets, weights = (primal.value for primal in others)
    chunks, inverse = _in_chunks(chunk, hidden, targets, weights)
    trained = {i: primal.value for i, primal in enumerate(primals) if primal.perturbed}
    # The codes have no gradient.
    coded = None if trained else jax.tree.map(lambda primal: primal.value, coded)

    def total_of(trained: dict[int, jax.Array], *part: jax.Array) -> jax.Array:
        leaves = [trained.get(i, primal.value) for i, primal in enumerate(primals)]
        return _chunk_total(head, jax.tree.unflatten(tree, leaves), coded, *part)

    gradient = jax.value_and_grad(total_of, argnums=(0, 1))

    def add(carry: Any, part: Any) -> tuple[Any, jax.Array]:
        total, (d_trained, d_hidden) = _skip_zero_weights(
            functools.partial(gradient, trained), part
        )
        return jax.tree.map(jnp.add, carry, (total, d_trained)), d_hidden

    zeros = {i: jnp.zeros(value.shape, jnp.float32) for i, value in trained.items()}
    (total, d_trained), d_hidden = lax.scan(add, (jnp.zeros((), jnp.float32), zeros), chunks)
    shards, _, features = hidden.shape
    d_hidden = d_hidden.reshape(len(d_hidden), shards, -1, features)
    d_hidden = jnp.moveaxis(d_hidden, 1, 0).reshape(shards, -1, features)
    d_hidden = jax.vmap(operator.getitem)(d_hidden, inverse)
    d_leaves = [
        d_trained[i].astype(primal.value.dtype) if i in trained else None
        for i, primal in enumerate(primals)
    ]
    return total, residuals.pack((jax.tree.unflatten(tree, d_leaves), d_hidden))


def _total_bwd(head: nnx.GraphDef[Any], chunk: int, packed: Any, ct: Any) -> tuple[Any, ...]:
    def scaled(leaf: jax.Array | None) -> jax.Array | None:
        return None if leaf is None else (ct * leaf.astype(jnp.float32)).astype(leaf.dtype)

    d_arrays, d_hidden = residuals.unpack(packed)
    if isinstance(ct, SymbolicZero):
        return None, None, None, None, None
    d_arrays = jax.tree.map(scaled, d_arrays, is_leaf=lambda leaf: leaf is None)
    return d_arrays, None, scaled(d_hidden), None, None


_total.defvjp(_total_fwd, _total_bwd, symbolic_zeros=True)


def _in_chunks(chunk: int, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
    """Returns the three arrays as [chunks, shards·chunk, ...], and the new index of each token.

    In each shard, tokens of weight 0 come last.
    """

    def sort_shard(hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        count = targets.shape[0]
        order = jnp.argsort(weights == 0, stable=True)
        # The last chunk is padded with the first token, at weight 0.
        order = jnp.concatenate((order, jnp.zeros((-count % chunk,), order.dtype)))
        weights = weights[order].at[count:].set(0).reshape(-1, chunk)
        hidden = hidden[order].reshape(-1, chunk, hidden.shape[-1])
        return (hidden, targets[order].reshape(-1, chunk), weights), jnp.argsort(order[:count])

    arrays, inverse = jax.vmap(sort_shard, out_axes=(1, 0))(hidden, targets, weights)
    return jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]), arrays), inverse


def _skip_zero_weights(function: Callable[..., Any], chunk: Any) -> Any:
    """Returns function(*chunk), or zeros if all weights of the chunk are 0."""
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, *chunk))
    return lax.cond(jnp.any(chunk[-1] != 0), lambda: function(*chunk), lambda: zeros)


def _chunk_total(
    head: nnx.GraphDef[Any],
    arrays: Any,
    coded: ForwardCodes | None,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    layer = nnx.merge(head, arrays, copy=True)
    if coded is None:
        logits = logits_of(layer, hidden).astype(jnp.float32)
    else:
        logits = multiply_forward(hidden, layer.kernel[...], coded)
    # Not an index, whose gradient would be scattered into logits in fp32, in passes of their own.
    is_target = targets[:, None] == jnp.arange(logits.shape[1])[None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    cross_entropy = jax.nn.logsumexp(logits, axis=-1) - target_logits
    # The loss of a token of weight 0 can be infinite; 0 * inf would be NaN.
    return jnp.sum(jnp.where(weights == 0, 0, weights * cross_entropy))
