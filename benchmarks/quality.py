"""Level `quality`: how much each quantised format changes the results of a model.

Nothing is timed, so results from a CPU are as good as from a GPU. The model is a decoder over
bytes, pretrained here on the sources of Python's standard library, with weights rounded to bf16.
DoRA is trained over each quantised base, from one seed and on the same rows of this repository's
documentation.

Arithmetic is fp32, except where a format says FP8. Kernels that would be dequantised for a product
are dequantised in advance, so that one program serves all formats; the long run over NF4 reads the
codes.

One line is one `format`, compared with the same model in bf16: the mean relative error
of the kernels (`weights`), 1 - cosine of the results (`cosine`), the mean KL divergence of the
logits (`kl`), the share of rows with the same largest logit (`agreement`), and the loss of held-out
text before and after training (`held_out_before`, `held_out`). The last two lines are long runs
over bf16 and NF4, with the mean loss of each tenth of the run (`losses`).
"""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import jax_dora
from benchmarks.results import Row
from jax_dora.layers.quantised_kernel import compute_quantised, dot_general
from jax_dora.lm.finetune.training import decayed
from jax_dora.lm.models import load_model
from jax_dora.ops import quantised, row_scaled
from jax_dora.ops.rounding import bound, round_to
from parity.model.measure import compare_logits
from parity.sides.jax import training
from parity.training.settings import Settings as Decoder
from parity.training.text import even_starts, starts, text

ROOT = Path(__file__).parents[1]
BASE, FP8 = "bf16", row_scaled.QTYPE


class Format(NamedTuple):
    """A way to quantise a model.

    Attributes:
      rows: number of inputs that share a scale; 0 for all inputs of an output, -1 for one scale of
        the whole matrix.
      activations: quantised with a scale for each "row", with one for the "tensor", or not (None).
      gradients: the format of their products with the kernels.
    """

    name: str
    qtype: str
    rows: int
    activations: str | None = None
    gradients: str | None = None


FORMATS = (
    Format("int8, a scale an output", "int8", 0),
    Format("float8_e4m3fn, a scale an output", FP8, 0),
    Format("float8_e4m3fn, one scale", FP8, -1),
    Format("float8_e4m3fn on both sides, scales of rows and columns", FP8, 0, "row"),
    Format("float8_e4m3fn on both sides, one scale each", FP8, -1, "tensor"),
    Format("nf4, tiles of 64", "nf4", 64),
    Format("int4, tiles of 64", "int4", 64),
)


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      steps: of training over every format.
      long: number of steps of the long runs over bf16 and NF4.
    """

    decoder: Decoder = Decoder(
        128,
        256,
        4,
        2,
        32,
        rank=8,
        alpha=16,
        layers=3,
        dtype="float32",
        length=64,
        rows=8,
        learning_rate=2e-3,
        base_learning_rate=3e-3,
        base_steps=400,
        eval_rows=512,
    )
    steps: int = 50
    long: int = 500
    formats: tuple[Format, ...] = FORMATS


TINY = Settings(
    Decoder.tiny(dtype="float32", length=16, base_steps=4, eval_rows=32, rank=4, alpha=8),
    steps=2,
    long=10,
    formats=(FORMATS[3], FORMATS[5]),
)
PARTS = 10  # of a long run, each with its mean loss


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each format, and for each long run."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "base"
        training.make_base(settings.decoder, folder)
        yield from _decoder(settings, folder)


def _decoder(settings: Settings, folder: Path) -> Iterator[Row]:
    load = functools.partial(load_model, folder, dtype=jnp.float32, attention="xla", remat=False)
    sizes = settings.decoder
    where = jnp.asarray(even_starts(text().held_out, sizes.eval_rows, sizes.length))
    held_out = training.rows_at(jnp.asarray(text().held_out), where, sizes.length)[:, :-1]
    logits = jax.jit(lambda graphdef, state: nnx.merge(graphdef, state)(held_out), static_argnums=0)
    base = load()
    exact = np.asarray(logits(*nnx.split(base)), np.float64)
    yield {"model": "decoder", "format": BASE} | trained(base, sizes, settings.steps)[2]
    for form in settings.formats:
        model = load()
        row: Row = {"model": "decoder", "format": form.name}
        row["weights"] = quantise(model, form)
        found = np.asarray(logits(*nnx.split(model)), np.float64)
        row["cosine"] = cosine(exact, found)
        row |= compared(exact, found)
        # Adapted layers do not support one scale for all activations.
        if form.activations != "tensor":
            row |= trained(model, sizes, settings.steps)[2]
        yield row
    nf4 = next(form for form in settings.formats if form.qtype == "nf4")
    for name in (BASE, nf4.name):
        model = load()
        if name != BASE:
            quantise(model, nf4, as_codes=True)
        _, losses, row = trained(model, sizes, settings.long)
        means = [float(part.mean()) for part in np.array_split(losses, PARTS)]
        facts = {"model": "decoder", "format": name, "steps": settings.long, "losses": means}
        yield facts | row


def trained(
    base: Any, sizes: Decoder, steps: int, seed: int = 0
) -> tuple[nnx.Module, np.ndarray, Row]:
    """Trains an adapter over a base; returns the model, the loss of each step, and that of held-out
    text before and after training."""
    rule = jax_dora.DoRARule(training.RULE, sizes.rank, sizes.alpha)
    model = jax_dora.apply_dora(base, rule, rngs=nnx.Rngs(seed))
    graphdef, adapter, frozen = nnx.split(model, nnx.LoRAParam, ...)
    run, evaluate, optimizer = _compiled(graphdef, sizes)
    before = evaluate(adapter, frozen)
    where = starts(prose()[0], (steps, sizes.rows), sizes.length, 1 + seed)
    adapter, losses, _ = training.run(run, adapter, optimizer.init(adapter), frozen, where)
    row = {"held_out_before": before, "held_out": evaluate(adapter, frozen)}
    return nnx.merge(graphdef, adapter, frozen), losses, row


@functools.cache
def _compiled(graphdef: Any, sizes: Decoder) -> tuple[Any, Any, Any]:
    """Returns functions that run steps and compute the held-out loss, compiled once for all bases
    of the same structure, and the optimizer."""

    def loss(trained, tokens, frozen):
        return training.mean_loss(nnx.merge(graphdef, trained, frozen), tokens)

    optimizer = optax.adamw(sizes.learning_rate, weight_decay=0.01, mask=decayed)
    train, held_out = prose()
    run = training.compiled_steps(loss, optimizer, jnp.asarray(train), sizes.length)
    return run, training.evaluator(loss, sizes, held_out), optimizer


def pages() -> list[Path]:
    """Returns the guides of this repository's documentation."""
    return sorted(ROOT.glob("docs/*.md"))


@functools.cache
def prose() -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of this repository's documentation, u8[…]: the training text, and every
    fourth page as held-out text."""
    held_out = pages()[::4]
    parts = ([page for page in pages() if page not in held_out], held_out)
    train, rest = (b"".join(page.read_bytes() for page in part) for part in parts)
    return np.frombuffer(train, np.uint8), np.frombuffer(rest, np.uint8)


def quantise(model: nnx.Module, form: Format, *, as_codes: bool = False) -> float:
    """Quantises the projections of a model except the head, in place; returns the mean relative
    error of the kernels.

    Args:
      as_codes: whether to store codes and scales instead of the dequantised kernels; codes are
        always stored if activations are quantised.
    """
    errors = []
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, nnx.Linear) or "lm_head" in path:
            continue
        kernel = module.kernel[...]
        *stack, n_in, n_out = kernel.shape
        matrix = (n_in, n_out) if form.rows < 0 else (form.rows or n_in, 1)
        rounded = round_to(kernel, form.qtype, ((1,) * len(stack)) + matrix, jnp.float32)
        dequantised = quantised.dequantise(rounded, jnp.float32)
        errors.append(float(jnp.linalg.norm(dequantised - kernel) / jnp.linalg.norm(kernel)))
        if form.activations is None and not as_codes:
            module.kernel.set_value(dequantised.astype(kernel.dtype))
            continue
        module.kernel.set_value(rounded)
        compute_quantised(module, FP8 if form.activations == "row" else None, form.gradients)
        if form.activations == "tensor":
            module.dot_general = by_tensors
    return float(np.mean(errors))


def by_tensors(x: jax.Array, kernel: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """Returns the product of a kernel with x, rounded with one scale for the whole tensor."""
    scale = jnp.max(jnp.abs(x)) / bound(FP8)
    rounded = (x / scale).astype(FP8).astype(x.dtype) * scale
    return dot_general(rounded, kernel, *args, **kwargs)


def cosine(exact: np.ndarray, found: np.ndarray) -> float:
    """Returns the mean of 1 - cosine over vectors."""
    product = (exact * found).sum(-1)
    lengths = np.linalg.norm(exact, axis=-1) * np.linalg.norm(found, axis=-1)
    return float(1 - (product / lengths).mean())


def compared(exact: np.ndarray, found: np.ndarray) -> Row:
    vocabulary = exact.shape[-1]
    rows = (torch.from_numpy(one).reshape(-1, vocabulary) for one in (found, exact))
    distance = compare_logits(*rows)
    return {"kl": distance.kl_mean, "agreement": distance.top1}
