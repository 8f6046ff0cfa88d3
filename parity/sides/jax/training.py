"""The training run in JAX: `jax_dora.lm.models` with `jax_dora.apply_dora` and `optax.adamw`.

`optax.adamw` and `torch.optim.AdamW` compute the same. With m and v the moments after step t and
b̂ = 1 - bᵗ, both compute

    p ← p - lr·(m/b̂₁ / (sqrt(v/b̂₂) + eps) + decay·p)

with eps outside the root, a decoupled decay scaled by lr, and states in the parameters' fp32. They
differ only in rounding: torch computes b̂ in fp64 and decays p before the step; optax computes b̂
in fp32 (1 - 0.999ᵗ has a relative error of up to 3·10⁻⁵ at t = 1 and 3·10⁻⁷ at t = 100) and first
adds both terms.

optax evaluates its schedule at step 0 first, so both use the same table of learning rates.
Magnitudes are not decayed: without training they equal the base's norms, not 0. Gradients are not
clipped, since the two clip with different formulas (torch adds 10⁻⁶ to the norm).
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_dora
from jax_dora.lm.finetune.training import decayed
from jax_dora.lm.models import CausalLM, DecoderConfig, load_model, make_model, save_model
from parity.sides.jax.decoder import adapter_of, with_adapter
from parity.training.adapter import Adapter
from parity.training.difference import Run
from parity.training.settings import Settings, schedule
from parity.training.text import even_starts, starts, text

EVAL_BATCH = 32
RULE = r"model/layers/(self_attn|mlp)/\w+_proj"


def make_base(settings: Settings, folder: Path) -> None:
    """Trains the base model in fp32 from random weights and writes it in bf16."""
    hf = settings.hf_config(settings.layers, max(settings.length, 1024))
    config = DecoderConfig.from_hf(hf, dtype=jnp.float32, attention="xla", remat=False)
    graphdef, weights = nnx.split(make_model(config, seed=0))
    rates = schedule(settings.base_steps, settings.warmup, settings.base_learning_rate)
    optimizer = optax.adamw(table(rates), weight_decay=settings.weight_decay)
    part = text().base
    where = starts(part, (settings.base_steps, settings.rows), settings.length, 0)

    def loss(weights, tokens, _):
        return mean_loss(nnx.merge(graphdef, weights), tokens)

    steps = compiled_steps(loss, optimizer, jnp.asarray(part), settings.length)
    weights, _, _ = run(steps, weights, optimizer.init(weights), None, where)
    narrow = dataclasses.replace(config, dtype=jnp.bfloat16)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: CausalLM(narrow, rngs=nnx.Rngs(0))))
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    save_model(nnx.merge(graphdef, weights), folder, hf)


def train(
    settings: Settings,
    base: Path,
    adapter: Adapter,
    seed: int,
    implementation: str | None,
    device: str = "cpu",
) -> Run:
    """Trains an adapter for the base model in the folder `base`, on JAX's default device."""
    begin = time.perf_counter()
    graphdef, trained, frozen = nnx.split(
        _model(settings, base, adapter, implementation), nnx.LoRAParam, ...
    )
    optimizer = optax.adamw(
        table(settings.learning_rates()),
        *settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=decayed,
    )

    def loss(trained, tokens, frozen):
        return mean_loss(nnx.merge(graphdef, trained, frozen), tokens)

    steps = compiled_steps(loss, optimizer, jnp.asarray(text().adapter), settings.length)
    evaluate = evaluator(loss, settings, text().held_out)
    before = evaluate(trained, frozen)
    where = starts(text().adapter, (settings.steps, settings.rows), settings.length, seed)
    trained, losses, norms = run(steps, trained, optimizer.init(trained), frozen, where)
    return Run(
        losses=losses,
        gradient_norms=norms,
        eval_before=before,
        eval_after=evaluate(trained, frozen),
        adapter=adapter_of(trained, np.asarray),
        seconds=time.perf_counter() - begin,
    )


def mean_loss(model: CausalLM, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy, f32[], of tokens i32[rows, length + 1]; logits are not
    rounded."""
    assert model.lm_head is not None
    hidden = model.model(tokens[:, :-1]).astype(jnp.float32)
    head = model.lm_head.kernel[...].astype(jnp.float32)
    logits = jnp.matmul(hidden, head, precision=jax.lax.Precision.HIGHEST)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _model(
    settings: Settings, base: Path, adapter: Adapter, implementation: str | None
) -> CausalLM:
    model = load_model(base, dtype=jnp.dtype(settings.dtype), attention="xla", remat=False)
    rule = jax_dora.DoRARule(
        RULE,
        rank=settings.rank,
        alpha=settings.alpha,
        use_rslora=True,
        implementation=implementation,
    )
    model = jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(0))
    state = with_adapter(nnx.state(model, nnx.LoRAParam), adapter, jnp.asarray)
    nnx.update(model, state)
    return model


def compiled_steps(
    loss: Callable, optimizer: Any, part: jax.Array, length: int, *, stacked: bool = False
) -> Callable:
    """Compiles a function that runs several steps.

    It maps (trained, optimizer state, frozen, starts i32[n, rows]) to (trained, optimizer state,
    losses f32[n], gradient norms f32[n]). If they are `stacked`, all but the frozen parameters have
    a leading axis of runs, which take their steps together.
    """

    def several(trained, state, frozen, where):
        def step(carry, where):
            trained, state = carry
            tokens = rows_at(part, where, length)
            value, gradients = jax.value_and_grad(loss)(trained, tokens, frozen)
            updates, state = optimizer.update(gradients, state, trained)
            trained = optax.apply_updates(trained, updates)
            return (trained, state), (value, optax.tree.norm(gradients))

        carry, metrics = jax.lax.scan(step, (trained, state), where)
        return *carry, *metrics

    if stacked:
        several = jax.vmap(several, in_axes=(0, 0, None, 0))
    return jax.jit(several, donate_argnums=(0, 1), compiler_options=compiler_options())


def run(
    steps: Callable, trained: Any, state: Any, frozen: Any, where: np.ndarray
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Runs `compiled_steps` from the starts i32[steps, rows]; returns the trained parameters, and
    the loss and gradient norm of each step, f64[steps]."""
    trained, _, losses, norms = steps(trained, state, frozen, where)
    return trained, np.asarray(losses, np.float64), np.asarray(norms, np.float64)


def evaluator(
    loss: Callable, settings: Settings, held_out: np.ndarray
) -> Callable[[Any, Any], float]:
    """Returns a function of (trained, frozen): the mean loss of rows of the text u8 `held_out`."""
    part = jnp.asarray(held_out)
    where = even_starts(held_out, settings.eval_rows, settings.length)
    batches = np.split(where, max(1, len(where) // EVAL_BATCH))

    @functools.partial(jax.jit, compiler_options=compiler_options())
    def batch_loss(trained, frozen, where):
        return loss(trained, rows_at(part, where, settings.length), frozen)

    def evaluate(trained, frozen) -> float:
        return float(np.mean([float(batch_loss(trained, frozen, batch)) for batch in batches]))

    return evaluate


def compiler_options() -> dict[str, bool]:
    """Returns options that make XLA round where the program does, as torch does. By default XLA may
    keep bf16 intermediates in fp32."""
    options = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "gpu":
        # Tuning these small products takes minutes.
        options["xla_gpu_enable_triton_gemm"] = False
    return options


def rows_at(part: jax.Array, where: jax.Array, length: int) -> jax.Array:
    return part[where[:, None] + jnp.arange(length + 1)[None, :]].astype(jnp.int32)


def table(rates: np.ndarray) -> optax.Schedule:
    table = jnp.asarray(rates, jnp.float32)
    return lambda count: table[count]
