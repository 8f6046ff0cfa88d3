"""Level `fp8_training`: adapters trained over a base in FP8, compared with bf16.

The decoder, its text, its pretraining and the settings of a run are those of the parity level
`training`, once as deep as there and once deeper, with half the width. DoRA is trained with each
variant of the base, of activations and of gradients, from several seeds, which change the adapter's
first values and the order of the text. Variants follow each other; the seeds of one take their
steps together. Kernels of formats that are dequantised for a product are dequantised in advance, so
that they share the program of bf16. Adapters are computed by XLA, whose programs are compiled
fastest. Nothing is timed, so XLA_FLAGS=--xla_gpu_autotune_level=0 saves the time in which XLA times
kernels.

One line is one run: the loss of held-out text at the end (`held_out`), and the mean and the largest
difference between the losses of a step and those of bf16 with the same seed (`mean_apart`,
`worst_apart`; of means over `WINDOW` steps).

The last line of a variant compares the gradients of lora_a, lora_b and magnitude of the adapters
that the runs in bf16 end with: the least and the mean cosine with those in bf16 over the arrays and
seeds of a layer, for each layer from the first on (`least`, `mean`).
"""

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jax_dora
from benchmarks import quality
from benchmarks.quality import BASE, FP8, Format
from benchmarks.results import Row, attempt, failed
from benchmarks.work import matches
from jax_dora.layers.quantised_kernel import compute_quantised
from jax_dora.lm.finetune.training import decayed
from jax_dora.lm.models import load_model, next_token_loss
from jax_dora.ops import row_scaled
from jax_dora.ops.mosaic.rows import row_codes
from jax_dora.ops.row_scaled import RowScaled
from parity.faults import Fault
from parity.sides.jax import training
from parity.training.settings import Settings as Decoder
from parity.training.text import even_starts, starts, text

WINDOW = 20
AT_ONCE = 100  # steps of a call
E5M2 = "float8_e5m2"


class Variant(NamedTuple):
    """What is quantised.

    Attributes:
      form: the format of the base, of activations and of gradients; None for bf16.
      gradients_of: a regular expression; the gradients of modules whose path it does not match stay
        in bf16.
      is_stochastic: whether gradients are rounded up with the probability of their distance from
        the lower neighbour.
      with_head: whether the loss's product with the head is in FP8 too, as in `next_token_loss`.
    """

    name: str
    form: Format | None = None
    gradients_of: str = ""
    is_stochastic: bool = False
    with_head: bool = False


IN_E5M2 = Format("", FP8, 0, "row", E5M2)
VARIANTS = (
    Variant(BASE),
    Variant("FP8 forward, gradients in e5m2", IN_E5M2),
    Variant("nf4", Format("", "nf4", 64)),
    Variant("FP8 forward", Format("", FP8, 0, "row")),
    Variant("FP8 forward and in the head, gradients in e5m2", IN_E5M2, with_head=True),
    Variant("FP8 forward, gradients in e4m3", Format("", FP8, 0, "row", FP8)),
    Variant("FP8 weights", Format("", FP8, 0)),
    Variant("e5m2, rounded stochastically", IN_E5M2, is_stochastic=True),
    Variant("e5m2, in the MLP only", IN_E5M2, "mlp"),
)
DEEPER = Decoder(512, 1024, 8, 4, rank=192, alpha=96, layers=9)


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      layers: chooses the decoder with this depth; None for all of them.
      only: `fnmatch` patterns; a variant whose name begins like none of them is skipped, except
        bf16.
    """

    decoders: tuple[Decoder, ...] = (Decoder(), DEEPER)
    seeds: int = 3
    variants: tuple[Variant, ...] = VARIANTS
    layers: int | None = None
    only: tuple[str, ...] = ()


TINY = Settings(
    (Decoder.tiny(length=16, steps=4, warmup=1, eval_rows=32, base_steps=4),),
    2,
    (VARIANTS[0], VARIANTS[2], VARIANTS[4], *VARIANTS[7:]),
)


class _Runs(NamedTuple):
    """The runs of one variant.

    Attributes:
      before, after: the loss of held-out text of each run.
      losses: f64[runs, steps].
      gradients: f32[runs, layers, ...] of each array of the adapters `end`.
      end: the adapters that the runs of bf16 end with, stacked.
    """

    before: np.ndarray
    after: np.ndarray
    losses: np.ndarray
    gradients: list[np.ndarray]
    end: Any


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each run, and for the gradients of each variant and depth."""
    for sizes in settings.decoders:
        if settings.layers in (None, sizes.layers):
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "base"
                training.make_base(sizes, folder)
                yield from _variants(folder, sizes, settings)


def _variants(folder: Path, sizes: Decoder, settings: Settings) -> Iterator[Row]:
    programs: dict[Any, tuple[Callable, Callable]] = {}
    runs: dict[str, _Runs] = {}
    for variant in settings.variants:
        if variant.name != BASE and not matches(variant.name, settings.only):
            continue
        facts: Row = {"layers": sizes.layers, "hidden": sizes.hidden, "format": variant.name}

        def train(variant: Variant = variant) -> Row:
            with _rounding(variant):
                runs[variant.name] = _run(folder, sizes, settings.seeds, variant, programs, runs)
            return {}

        outcome = attempt(facts, train)
        if failed(outcome):
            yield outcome
            continue
        for row in _rows(runs[variant.name], runs[BASE], sizes.steps):
            yield facts | row


def _rows(runs: _Runs, exact: _Runs, steps: int) -> Iterator[Row]:
    """Yields the rows of a variant, compared with those `exact` in bf16."""
    means = [
        np.stack([part.mean(1) for part in np.array_split(one.losses, max(1, steps // WINDOW), 1)])
        for one in (runs, exact)
    ]
    apart = np.abs(means[0] - means[1])
    for seed, (before, after) in enumerate(zip(runs.before, runs.after, strict=True)):
        row: Row = {"seed": seed, "steps": steps}
        row |= {"held_out_before": float(before), "held_out": float(after)}
        one = apart[:, seed]
        yield row | {"mean_apart": float(one.mean()), "worst_apart": float(one.max())}
    if runs is not exact:
        cosines = np.stack(list(map(_cosines, runs.gradients, exact.gradients)))
        least, mean = cosines.min((0, 1)).tolist(), cosines.mean((0, 1)).tolist()
        yield {"compared": "gradients", "least": least, "mean": mean}


def _model(folder: Path, sizes: Decoder, variant: Variant) -> nnx.Module:
    """Returns the base of a variant with a fresh adapter."""
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    base = load_model(folder, dtype=jnp.dtype(sizes.dtype), attention=attention, remat=False)
    if variant.form is not None:
        quality.quantise(base, variant.form)
    for path, module in nnx.iter_modules(base):
        name = "/".join(map(str, path))
        if getattr(module, "bwd_qtype", None) and not re.search(variant.gradients_of, name):
            compute_quantised(module, FP8)
    options = {"use_rslora": True, "implementation": "xla"}
    rule = jax_dora.DoRARule(training.RULE, sizes.rank, sizes.alpha, **options)
    return jax_dora.apply_dora(base, rule, rngs=nnx.Rngs(0))


def _drawn(fresh: Any, seed: int) -> Any:
    """Returns a fresh adapter with another lora_a, uniform in ±1/sqrt(in) as in PEFT."""
    rng = np.random.default_rng((23, seed))

    def draw(path: Any, array: jax.Array) -> jax.Array:
        if "lora_a" not in jax.tree_util.keystr(path):
            return array
        most = array.shape[-2] ** -0.5
        return jnp.asarray(rng.uniform(-most, most, array.shape), array.dtype)

    return jax.tree_util.tree_map_with_path(draw, fresh)


def _rounding(variant: Variant) -> contextlib.AbstractContextManager[None]:
    if not variant.is_stochastic:
        return contextlib.nullcontext()
    points = {
        f"{row_scaled.__name__}.coded_by": _stochastic,
        # Rows are then coded by XLA.
        f"{row_codes.__name__}.refuses": lambda _: lambda *call: "rounded stochastically",
    }
    return Fault("rounded stochastically", "", (), points).plant("jax")


def _stochastic(coded_by: Callable[..., RowScaled]) -> Callable[..., RowScaled]:
    """Returns `coded_by` with stochastic rounding to e5m2."""

    def changed(largest: jax.Array, x: jax.Array, qtype: str = FP8) -> RowScaled:
        if qtype != E5M2:
            return coded_by(largest, x, qtype)
        scales = coded_by(largest, x, qtype).scales
        return RowScaled(x, stochastically(lax.stop_gradient(x) / scales[..., None]), scales)

    return changed


def stochastically(x: jax.Array) -> jax.Array:
    """Returns x f32[...] in float8_e5m2, which are the first 8 bits of fp16: the other 8 decide, by
    a random number, whether the first ones are increased. The number is a hash of x."""
    hashed = lax.bitcast_convert_type(x, jnp.uint32) * jnp.uint32(2_654_435_761)
    noise = (hashed >> 24).astype(jnp.uint16)
    bits = lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)
    up = lax.bitcast_convert_type((bits + noise) & jnp.uint16(0xFF00), jnp.float16)
    most = float(jnp.finfo(E5M2).max)
    return jnp.clip(up, -most, most).astype(E5M2)


def _optimizer(sizes: Decoder) -> optax.GradientTransformation:
    rates = training.table(sizes.learning_rates())
    options = {"eps": sizes.eps, "weight_decay": sizes.weight_decay, "mask": decayed}
    return optax.adamw(rates, *sizes.betas, **options)


def _compiled(graphdef: Any, variant: Variant, sizes: Decoder) -> tuple[Callable, Callable]:
    """Returns functions of the adapters of all runs, stacked: the first runs steps, as
    `training.compiled_steps`, the second returns the losses and gradients for tokens."""
    mean_loss = _loss_with_head if variant.with_head else training.mean_loss

    def loss(trained: Any, tokens: jax.Array, frozen: Any) -> jax.Array:
        return mean_loss(nnx.merge(graphdef, trained, frozen), tokens)

    part, options = jnp.asarray(text().adapter), training.compiler_options()
    steps = training.compiled_steps(loss, _optimizer(sizes), part, sizes.length, stacked=True)
    with_gradient = jax.vmap(jax.value_and_grad(loss), in_axes=(0, None, None))
    return steps, jax.jit(with_gradient, compiler_options=options)


def _run(
    folder: Path,
    sizes: Decoder,
    seeds: int,
    variant: Variant,
    programs: dict[Any, tuple[Callable, Callable]],
    runs: dict[str, _Runs],
) -> _Runs:
    """Trains a variant from all seeds, over the base in `folder`.

    Args:
      programs: of variants before it, by what they depend on; its own are added.
      runs: of variants before it; the gradients are those of the adapters that bf16 ends with.
    """
    _say(sizes, variant, "begins")
    graphdef, fresh, frozen = nnx.split(_model(folder, sizes, variant), nnx.LoRAParam, ...)
    drawn = [_drawn(fresh, seed) for seed in range(seeds)]
    adapters = jax.tree.map(lambda *arrays: jnp.asarray(np.stack(arrays)), *drawn)
    key = graphdef, variant.with_head, variant.is_stochastic
    if key not in programs:
        programs[key] = _compiled(graphdef, variant, sizes)
    steps, with_gradient = programs[key]

    rows = even_starts(text().held_out, sizes.eval_rows, sizes.length)
    count = max(1, len(rows) // training.EVAL_BATCH)
    held_out = np.split(_tokens(text().held_out, rows, sizes), count)

    def evaluate(adapters: Any) -> np.ndarray:
        return np.mean([with_gradient(adapters, one, frozen)[0] for one in held_out], 0)

    before = evaluate(adapters)
    state, losses = jax.jit(jax.vmap(_optimizer(sizes).init))(adapters), []
    shape = sizes.steps, sizes.rows
    where = [starts(text().adapter, shape, sizes.length, 1 + seed) for seed in range(seeds)]
    for part in np.split(np.stack(where), range(AT_ONCE, sizes.steps, AT_ONCE), 1):
        adapters, state, some, _ = steps(adapters, state, frozen, part)
        losses.append(np.asarray(some, np.float64))
        _say(sizes, variant, f"loss {losses[-1].mean():.4f}")
    after = evaluate(adapters)
    _say(sizes, variant, f"held out {after}")
    end = runs[BASE].end if BASE in runs else adapters
    rows = starts(text().adapter, (training.EVAL_BATCH,), sizes.length, 99)
    tokens = _tokens(text().adapter, rows, sizes)
    gradients = list(map(np.asarray, jax.tree.leaves(with_gradient(end, tokens, frozen)[1])))
    return _Runs(before, after, np.concatenate(losses, 1), gradients, end)


def _tokens(part: np.ndarray, where: np.ndarray, sizes: Decoder) -> np.ndarray:
    return np.asarray(training.rows_at(jnp.asarray(part), jnp.asarray(where), sizes.length))


def _say(sizes: Decoder, variant: Variant, what: str) -> None:
    now = time.strftime("%H:%M:%S")
    print(f"{now} {sizes.layers} layers, {variant.name}: {what}", file=sys.stderr, flush=True)


def _loss_with_head(model: Any, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of tokens i32[rows, length + 1], as a step computes it."""
    targets = tokens[:, 1:]
    weights = jnp.ones(targets.shape, jnp.float32)
    loss = next_token_loss(model, tokens[:, :-1], targets, weights, chunk=None)
    return loss.total / loss.weight


def _cosines(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the cosines of gradients [runs, layers, ...] with the wanted ones, [runs, layers]."""
    found, wanted = (one.reshape(*one.shape[:2], -1).astype(np.float64) for one in (found, wanted))
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(wanted, axis=-1)
    return (found * wanted).sum(-1) / lengths
