"""One optimizer step: gradients of several micro-batches with one norm, then the update.

The model is taken apart and the frozen weights are only ever read: a function that returned them,
as `nnx.jit` would, would copy the base model at every step.
"""

import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_dora
from jax_dora.finetune.data import Rows
from jax_dora.models import CausalLM, DecoderSharding, next_token_loss
from jax_dora.models.decoder import for_inference
from jax_dora.models.loss import Loss


class Parts(NamedTuple):
    """A model, taken apart by who changes what."""

    graphdef: nnx.GraphDef[CausalLM]
    adapters: nnx.State  # by the optimizer
    moving: nnx.State  # by the step: the dropout streams count
    frozen: nnx.State  # by nobody

    @classmethod
    def of(cls, model: CausalLM) -> Self:
        return cls(*nnx.split(model, nnx.LoRAParam, nnx.RngState, ...))

    def model(self) -> CausalLM:
        return nnx.merge(self.graphdef, self.adapters, self.moving, self.frozen)


class Metrics(NamedTuple):
    loss: jax.Array  # f32[]: mean over the step's completion tokens
    gradient_norm: jax.Array  # f32[]
    finite: jax.Array  # bool[]: the loss, the gradient and the updated adapters


def make_optimizer(
    schedule: optax.Schedule, *, clip: float, weight_decay: float
) -> optax.GradientTransformation:
    """Returns AdamW with clipping, whose weight decay leaves magnitudes alone."""
    adamw = optax.adamw(schedule, weight_decay=weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(clip), adamw)


def decayed(adapters: nnx.State) -> Any:
    """Returns for each parameter whether weight decay is for it: not for magnitudes, which rest at
    the base's norm and not at 0."""
    return jax.tree.map(
        lambda variable: not isinstance(variable, jax_dora.DoRAParam),
        adapters,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


@functools.partial(jax.jit, static_argnums=0)
def accumulate(
    graphdef: nnx.GraphDef[CausalLM],
    adapters: nnx.State,
    moving: nnx.State,
    frozen: nnx.State,
    rows: Rows,
) -> tuple[jax.Array, nnx.State, nnx.State]:
    """Returns the mean loss over all completion tokens of `rows` [accumulate, batch, time], its
    gradient, and what else has moved."""
    # Once for all micro-batches: the adapters do not move between them.
    model = nnx.merge(graphdef, adapters, moving, frozen)
    norms = jax_dora.norms(model)
    weight = jnp.maximum(jnp.sum(rows.weights), 1)

    def loss_fn(adapters, moving, rows):
        # Copied: jax.grad hands over the variables of the trace around it, and streams count on.
        model = nnx.merge(graphdef, adapters, moving, frozen, copy=True)
        model = jax_dora.with_norms(model, norms)
        total = next_token_loss(model, **rows._asdict()).total
        return total / weight, nnx.state(model, nnx.RngState)

    def micro_step(carry, rows):
        total, gradients, moving = carry
        (loss, moving), more = jax.value_and_grad(loss_fn, has_aux=True)(adapters, moving, rows)
        gradients = jax.tree.map(jnp.add, gradients, more)
        return (total + loss, _placed(model.config.sharding, gradients), moving), None

    zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, adapters), moving
    (loss, gradients, moving), _ = jax.lax.scan(micro_step, zero, rows)
    return loss, gradients, moving


def _placed(sharding: DecoderSharding | None, state: nnx.State) -> nnx.State:
    """Returns `state` as its arrays are to lie, which XLA would choose otherwise."""
    if sharding is None:
        return state
    flat = nnx.to_flat_state(state)
    places = (sharding("/".join(map(str, path)), variable.shape) for path, variable in flat)
    return nnx.from_flat_state(
        (path, variable.replace(jax.lax.with_sharding_constraint(variable.get_value(), place)))
        for (path, variable), place in zip(flat, places, strict=True)
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def update(
    optimizer: optax.GradientTransformation,
    adapters: nnx.State,
    optimizer_state: optax.OptState,
    gradients: nnx.State,
    loss: jax.Array,
) -> tuple[nnx.State, optax.OptState, Metrics]:
    gradient_norm = optax.tree.norm(gradients)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, adapters)
    adapters = jax.tree.map(jnp.add, adapters, updates)
    arrays = [loss, gradient_norm, *jax.tree.leaves(adapters)]
    finite = jnp.stack([jnp.all(jnp.isfinite(array)) for array in arrays]).all()
    return adapters, optimizer_state, Metrics(loss, gradient_norm, finite)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(graphdef: nnx.GraphDef[CausalLM], state: nnx.State, rows: Rows) -> Loss:
    return next_token_loss(nnx.merge(graphdef, state), **rows._asdict())


def evaluate(model: CausalLM, rows: Rows, batch: int) -> float:
    """Returns the mean loss over the completion tokens of `rows` [count, time], `batch` rows at a
    time."""
    # Every batch is as large as the first, so that nothing is compiled twice.
    missing = -len(rows.tokens) % batch
    rows = Rows(*(np.pad(array, ((0, missing), (0, 0))) for array in rows))
    graphdef, state = for_inference(model)
    total = weight = 0.0
    for start in range(0, len(rows.tokens), batch):
        taken = rows.take(slice(start, start + batch))
        if model.config.sharding is not None:
            taken = taken.placed(model.config.sharding.rows)
        loss = _evaluate(graphdef, state, taken)
        total, weight = total + float(loss.total), weight + float(loss.weight)
    return total / max(weight, 1.0)
