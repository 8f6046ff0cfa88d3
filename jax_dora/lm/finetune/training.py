"""An optimizer step: the gradients of several micro-batches with the same norms, then the update.

The model is split into parts, and the frozen weights are only arguments. A function that also
returns them, as with `nnx.jit`, would copy the base model in every step.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_dora
from jax_dora.lm.finetune.adapter import keep_norms, without_untrained
from jax_dora.lm.finetune.packing import Rows
from jax_dora.lm.finetune.settings import DECAYING, Settings
from jax_dora.lm.models import CausalLM, DecoderSharding, next_token_loss
from jax_dora.lm.models.decoder import for_inference
from jax_dora.lm.models.loss import Loss


class Parts(NamedTuple):
    """A model, split into a graphdef and three states."""

    graphdef: nnx.GraphDef[CausalLM]
    adapters: nnx.State  # changed by the optimizer
    streams: nnx.State  # the RNG streams of dropout, which count their calls
    frozen: nnx.State  # never changed

    @classmethod
    def of(cls, model: CausalLM) -> Self:
        """Splits a model."""
        return cls(*nnx.split(model, nnx.LoRAParam, nnx.RngState, ...))

    def model(self) -> CausalLM:
        """Returns the model with these parts."""
        return nnx.merge(self.graphdef, self.adapters, self.streams, self.frozen)


class Metrics(NamedTuple):
    """The metrics of an optimizer step."""

    loss: jax.Array  # f32[]: mean over the learned tokens of the step
    gradient_norm: jax.Array  # f32[]
    finite: jax.Array  # bool[]: whether loss, gradient and updated adapters are finite


def make_schedule(settings: Settings, steps: int) -> optax.Schedule:
    """Returns the learning rate of a run of `steps` as a function of the step, from 0."""
    peak, warmup = settings.learning_rate, settings.warmup
    final = settings.final_rate
    steps -= warmup
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, steps, final),
        "linear": lambda: optax.linear_schedule(peak, final * peak, steps),
        "polynomial": lambda: optax.polynomial_schedule(peak, final * peak, 2, steps),
        "exponential": lambda: optax.exponential_decay(peak, steps, final),
        "constant": lambda: optax.constant_schedule(peak),
    }[settings.schedule]()
    if not warmup:
        return after
    # Warmup starts at 1/warmup of the learning rate: at 0, the first step would do nothing.
    rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([rise, after], [warmup])


def make_optimizer(
    name: str, schedule: optax.Schedule, *, clip: float, weight_decay: float
) -> optax.GradientTransformation:
    """Returns an optimizer of optax with gradient clipping.

    Weight decay does not apply to magnitudes.
    """
    options = {"weight_decay": weight_decay, "mask": decayed} if name in DECAYING else {}
    return optax.chain(optax.clip_by_global_norm(clip), getattr(optax, name)(schedule, **options))


def decayed(adapters: nnx.State) -> Any:
    """Returns for each parameter whether weight decay applies to it.

    It does not apply to magnitudes: without training, they equal the norms of the base weights, not
    0. Nor does it to the scales of norms, and to biases, as is usual. They are recognised by their
    names, because `nnx.Optimizer` passes arrays without variables to a mask when it updates.
    """

    def is_decayed(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True)
        return not name.endswith(("magnitude", "scale", "bias"))

    return jax.tree.map_with_path(
        is_decayed, adapters, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames="loss_of")
def accumulate(
    graphdef: nnx.GraphDef[CausalLM],
    adapters: nnx.State,
    streams: nnx.State,
    frozen: nnx.State,
    rows: Rows,
    trained: Mapping[str, jax.Array] | None = None,
    *,
    loss_of: Callable[..., Loss] = next_token_loss,
) -> tuple[jax.Array, nnx.State, nnx.State]:
    """Computes the gradient of the mean loss over all learned tokens of `rows`.

    Args:
      rows: [accumulate, batch, time]; of another loss, a tuple of its own with a field `weights`.
      trained: which magnitudes are trained, of `trained_magnitudes`.
      loss_of: returns the loss of a model and of the fields of a micro-batch's rows, by name.

    Returns:
      The loss, the gradient by the adapters, and the updated streams.
    """
    # The norms are computed once, since the adapters are the same for all micro-batches.
    model = nnx.merge(graphdef, adapters, streams, frozen, copy=trained is not None)
    if trained is not None:
        keep_norms(model, trained)
        adapters = nnx.state(model, nnx.LoRAParam)
    norms = jax_dora.norms(model)
    weight = jnp.maximum(jnp.sum(rows.weights), 1)

    def loss_fn(adapters, streams, rows):
        # The copy is needed: jax.grad passes in variables of the outer trace, which must not be
        # changed here, and the dropout streams count their calls.
        model = nnx.merge(graphdef, adapters, streams, frozen, copy=True)
        model = jax_dora.with_norms(model, norms)
        total = loss_of(model, **rows._asdict()).total
        return total / weight, nnx.state(model, nnx.RngState)

    def micro_step(carry, rows):
        total, gradients, streams = carry
        (loss, streams), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
            adapters, streams, rows
        )
        gradients = jax.tree.map(jnp.add, gradients, gradient)
        sharding = getattr(model.config, "sharding", None)
        return (total + loss, _constrain(sharding, gradients), streams), None

    zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, adapters), streams
    (loss, gradients, streams), _ = jax.lax.scan(micro_step, zero, rows)
    if trained is not None:
        gradients = without_untrained(gradients, trained)
    return loss, gradients, streams


@functools.cache
def accumulate_with(options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Returns `accumulate`, compiled with the `step_options` of a model."""
    if not options:
        return accumulate
    function: Any = accumulate
    jit = functools.partial(jax.jit, static_argnums=0, static_argnames="loss_of")
    return jit(function.__wrapped__, compiler_options=dict(options))


def _constrain(sharding: DecoderSharding | None, state: nnx.State) -> nnx.State:
    """Returns `state` with the shardings of the model's arrays. XLA might choose others."""
    if sharding is None:
        return state
    flat = nnx.to_flat_state(state)
    shardings = (sharding("/".join(map(str, path)), variable.shape) for path, variable in flat)
    return nnx.from_flat_state(
        (path, variable.replace(jax.lax.with_sharding_constraint(variable.get_value(), one)))
        for (path, variable), one in zip(flat, shardings, strict=True)
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def update(
    optimizer: optax.GradientTransformation,
    adapters: nnx.State,
    optimizer_state: optax.OptState,
    gradients: nnx.State,
    loss: jax.Array,
) -> tuple[nnx.State, optax.OptState, Metrics]:
    """Returns the updated adapters and optimizer state, and the metrics of the step."""
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
    """Returns the mean loss over the learned tokens of `rows` [count, time].

    The loss is computed for `batch` rows at a time.
    """
    # Rows are padded to whole batches, so that there is only one program to compile.
    missing = -len(rows.tokens) % batch
    rows = Rows(*(np.pad(array, ((0, missing), (0, 0))) for array in rows))
    graphdef, state = for_inference(model)
    total = weight = 0.0
    for start in range(0, len(rows.tokens), batch):
        part = rows.take(slice(start, start + batch))
        if model.config.sharding is not None:
            part = part.placed(model.config.sharding.rows)
        loss = _evaluate(graphdef, state, part)
        total, weight = total + float(loss.total), weight + float(loss.weight)
    return total / max(weight, 1.0)
