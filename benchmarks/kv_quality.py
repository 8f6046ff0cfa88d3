"""Level `kv_quality`: how much a KV cache in FP8 changes the logits of a model.

Nothing is timed, so results from a CPU are as good as from a GPU. The model is a decoder over bytes
with head_dim 64, with random weights or pretrained here on the sources of Python's standard
library. Arithmetic is fp32, except for what a format rounds; every token's key and value are read
as a cache holds them.

    bf16                  keys and values in bf16
    FP8                   keys and values in float8_e4m3fn, a scale per token and kv head
    FP8, transformed      after a Hadamard transform of queries and keys: `jax-dora serve`
    hybrid                the same, queries also in FP8, the softmax's result in bf16
    all FP8               the same, queries and the softmax's result in FP8

Outliers are planted into a pair of channels that the rotary embedding rotates: "in keys" multiplies
those of keys and divides those of queries, which does not change the function; "in queries and
keys" multiplies both.

One line is a `format` of a `model`, compared with the same model without any rounding: the mean KL
divergence of the logits (`kl`), 1 - cosine (`cosine`), and the share of rows with the same largest
logit (`agreement`).
"""

import functools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import quality
from benchmarks.results import Row
from jax_dora.lm.models import CausalLM, kv_codes, load_model, make_model
from jax_dora.lm.models import decoder_layer as layers
from parity.sides.jax import training
from parity.training.settings import Settings as Decoder
from parity.training.text import even_starts, text


class Settings(NamedTuple):
    """The settings of the level. `outlier` is the factor of planted channels."""

    decoder: Decoder = Decoder(
        256,
        512,
        4,
        2,
        64,
        layers=4,
        dtype="float32",
        length=128,
        rows=8,
        base_learning_rate=2e-3,
        base_steps=400,
        eval_rows=64,
    )
    outlier: float = 32.0


TINY = Settings(Decoder.tiny(dtype="float32", length=16, base_steps=4, eval_rows=8))


class Format(NamedTuple):
    """What is rounded: keys and values, queries, and the softmax's result."""

    name: str
    cache: str
    transformed: bool = False
    queries: str | None = None
    weights: str | None = None


FP8 = kv_codes.QTYPE
FORMATS = (
    Format("bf16", "bfloat16", weights="bfloat16"),
    Format("FP8", FP8),
    Format("FP8, transformed", FP8, True),
    Format("hybrid", FP8, True, FP8, "bfloat16"),
    Format("all FP8", FP8, True, FP8, FP8),
)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each model and format."""
    sizes = settings.decoder
    where = jnp.asarray(even_starts(text().held_out, sizes.eval_rows, sizes.length))
    tokens = training.rows_at(jnp.asarray(text().held_out), where, sizes.length)[:, :-1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "base"
        training.make_base(sizes, folder)
        trained = load_model(folder, dtype=jnp.float32, attention="xla", remat=False)
    models = {
        "random": make_model(trained.config, seed=1),
        "trained": trained,
        "trained, outliers in keys": planted(trained, 1 / settings.outlier, settings.outlier),
        "trained, outliers in queries and keys": planted(
            trained, math.sqrt(settings.outlier), math.sqrt(settings.outlier)
        ),
    }
    for name, model in models.items():
        exact = _logits(model, tokens, None)
        for form in FORMATS:
            found = _logits(model, tokens, form)
            row: Row = {"model": name, "format": form.name}
            yield row | {"cosine": quality.cosine(exact, found)} | quality.compared(exact, found)


def planted(model: CausalLM, queries: float, keys: float) -> CausalLM:
    """Returns the model with a pair of channels of queries and keys multiplied by factors."""
    model = nnx.clone(model)
    size = model.config.head_dim
    attention = model.model.layers.self_attn
    for norm, factor in ((attention.q_norm, queries), (attention.k_norm, keys)):
        # The rotary embedding hardly turns the last pair of channels.
        pair = jnp.asarray([size // 2 - 1, size - 1])
        norm.scale.set_value(norm.scale[...].at[:, pair].multiply(factor))
    return model


def _logits(model: CausalLM, tokens: jax.Array, form: Format | None) -> np.ndarray:
    """Returns the logits of a model whose attention rounds as `form` says; None for fp32."""
    graphdef, state = nnx.split(model)
    attention = layers.attend if form is None else functools.partial(attend, form)
    with mock.patch.object(layers, "attend", attention):
        run = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens))
        return np.asarray(run(state), np.float64)


def attend(form: Format, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """Returns causal attention [batch, time, heads, head_dim] that rounds as `form` says."""
    kv_heads, size, time = k.shape[2], q.shape[3], q.shape[1]
    if form.transformed:
        q, k = kv_codes.transformed(q), kv_codes.transformed(k)
    if form.queries:
        q = _rounded(q, form.queries)
    k, v = _rounded(k, form.cache), _rounded(v, form.cache)
    grouped = q.reshape(*q.shape[:2], kv_heads, -1, size)
    s = jnp.einsum("btkgh,bskh->bkgts", grouped, k, precision="highest") * size**-0.5
    s = jnp.where(jnp.tri(time, dtype=bool), s, -jnp.inf)
    p = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    total = jnp.sum(p, axis=-1, keepdims=True)
    if form.weights == FP8:
        # Multiplied by the scales of values first, so that one scale per query suffices.
        scales = jnp.moveaxis(_scales(v), 1, 2)[:, :, None, None]
        p = _rounded(p * scales, FP8) / scales
    elif form.weights:
        p = p.astype(form.weights).astype(jnp.float32)
    y = jnp.einsum("bkgts,bskh->btkgh", p / total, v, precision="highest")
    return y.reshape(q.shape)


def _scales(x: jax.Array) -> jax.Array:
    return kv_codes.coded(x).scales


def _rounded(x: jax.Array, dtype: str) -> jax.Array:
    """Returns x as it is stored in `dtype`, in FP8 with a scale for each row."""
    if dtype == FP8:
        return kv_codes.coded(x).decoded(jnp.float32)
    return x.astype(dtype).astype(jnp.float32)
