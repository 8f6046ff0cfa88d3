"""Level `step --tunix`: an optimizer step in Tunix's own trainer, on Tunix's own model.

Qwen3 with layers of Qwen3-8B's width in bf16, whose blocks Tunix rematerialises without a policy,
is trained by `PeftTrainer` with Adam on random tokens:

    LoRA    by qwix's `apply_lora_to_model`, as Tunix's own examples do
    DoRA    by `jax_dora.apply_dora`

Both adapt the same seven projections of each layer. The trainers take turns of `steps` steps. The
time of a step is from one request for a batch to the next, as a user would see it: the trainer lets
two steps run ahead of the host. One line is one kind: the median of its steps (`ms`), the mean,
and the time until the first step had ended (`first_step_s`), with compilation.

Needs Tunix in the environment, as `make setup-models` installs it.
"""

import gc
import importlib.metadata
import importlib.util
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_dora
from benchmarks.model.protocol import QUICK, QWEN3, Protocol
from benchmarks.results import Row, with_ratio

PROJECTIONS = r".*(attn/[qkvo]_proj|mlp/(gate|up|down)_proj)"
ROWS = 2


class Settings(NamedTuple):
    """The settings of the level; `layers`, `rank` and `tokens` override those of the sizes."""

    sizes: Protocol = QWEN3
    layers: int = 6
    rank: int = 64
    tokens: int = 2048
    only: tuple[str, ...] = ("LoRA", "DoRA")
    rounds: int = 5
    steps: int = 12


TINY = Settings(QUICK, layers=1, rank=4, tokens=24, rounds=1, steps=4)


def refuses(settings: Settings) -> str:
    if unknown := [kind for kind in settings.only if kind not in ("LoRA", "DoRA")]:
        return f"--only is {unknown[0]!r}; expected 'LoRA' or 'DoRA'"
    if importlib.util.find_spec("tunix") is None:
        return (
            "there is no Tunix in this environment; run make setup-models, with PYTHONPATH=.models"
        )
    return ""


def facts(settings: Settings, device: str) -> Row:
    return {name: importlib.metadata.version(name) for name in ("google-tunix", "qwix")}


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each kind."""
    batch = _batch(settings)
    trainers = {kind: _trainer(kind, settings) for kind in settings.only}
    first, times = {}, {kind: [] for kind in trainers}
    for kind, trainer in trainers.items():
        begin = time.perf_counter()
        trainer.train([batch])
        first[kind] = time.perf_counter() - begin
    gc.collect()
    gc.freeze()  # Otherwise a collection looks through both models during a step.
    for _ in range(settings.rounds):
        for kind, trainer in trainers.items():
            asked: list[float] = []
            trainer.train(_batches(batch, settings.steps + 1, asked))
            # The trainer sends its first two steps to the device without waiting for any.
            times[kind] += [after - before for before, after in itertools.pairwise(asked[2:])]
    gc.unfreeze()
    lora = None
    for kind, seconds in times.items():
        row: Row = {"kind": kind, "task": "step", "model": "Tunix's Qwen3 under its PeftTrainer"}
        row |= {"hidden": settings.sizes.hidden, "layers": settings.layers, "rank": settings.rank}
        row |= {"tokens": settings.tokens, "rows": ROWS, "remat": "nnx.remat without a policy"}
        row |= {"ms": 1e3 * statistics.median(seconds), "mean_ms": 1e3 * statistics.mean(seconds)}
        row |= {"first_step_s": first[kind]}
        lora = row if kind == "LoRA" else lora
        yield with_ratio(row, lora if kind == "DoRA" else None, "over_lora")


def _batches(batch: Any, count: int, asked: list[float]) -> Iterator[Any]:
    """Yields a batch so many times, and adds the time at which each was asked for."""
    for _ in range(count):
        asked.append(time.perf_counter())
        yield batch


def _trainer(kind: str, settings: Settings) -> Any:
    peft_trainer = importlib.import_module("tunix.sft.peft_trainer")
    config = peft_trainer.TrainingConfig(eval_every_n_steps=10**9)
    trainer = peft_trainer.PeftTrainer(_model(kind, settings), optax.adam(1e-4), config)
    trainer.is_managed_externally = True  # Else it is closed when its batches end.
    return trainer.with_gen_model_input_fn(_model_input)


def _model(kind: str, settings: Settings) -> nnx.Module:
    qwen3 = importlib.import_module("tunix.models.qwen3.model")
    sizes = settings.sizes
    config = qwen3.ModelConfig(
        num_layers=settings.layers,
        vocab_size=sizes.vocabulary,
        embed_dim=sizes.hidden,
        hidden_dim=sizes.intermediate,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        rope_theta=int(sizes.rope_theta),
        norm_eps=sizes.epsilon,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        remat_config=qwen3.RematConfig.BLOCK,
    )
    rank, alpha = settings.rank, 2.0 * settings.rank

    @nnx.jit
    def make() -> nnx.Module:
        return qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    base = make()
    if kind == "DoRA":
        rule = jax_dora.DoRARule(PROJECTIONS, rank, alpha)
        return jax_dora.apply_dora(base, rule, rngs=nnx.Rngs(1))
    qwix = importlib.import_module("qwix")
    provider = qwix.LoraProvider(module_path=PROJECTIONS, rank=rank, alpha=alpha)
    example = _model_input(_batch(settings._replace(tokens=16)))
    inputs = example["input_tokens"], example["positions"], None, example["attention_mask"]
    return qwix.apply_lora_to_model(base, provider, *inputs, rngs=nnx.Rngs(params=1))


def _batch(settings: Settings) -> Any:
    peft_trainer = importlib.import_module("tunix.sft.peft_trainer")
    shape = ROWS, settings.tokens
    tokens = np.random.default_rng(0).integers(settings.sizes.vocabulary, size=shape)
    return peft_trainer.TrainingInput(
        input_tokens=jnp.asarray(tokens, jnp.int32), input_mask=jnp.ones(shape, bool)
    )


def _model_input(batch: Any) -> dict[str, jax.Array]:
    """Returns the model's inputs, in which each token sees itself and those before it."""
    rows, tokens = batch.input_tokens.shape
    mask = jnp.tril(jnp.ones((tokens, tokens), bool))
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(tokens), (rows, tokens)),
        "attention_mask": jnp.broadcast_to(mask, (rows, tokens, tokens)),
    }
