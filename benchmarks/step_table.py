"""Level `step --table`: what each part of an optimizer step costs, with it and without.

A few layers of Llama 3 8B's dimensions, rank 16 on all projections, 2 × 4096 tokens of one batch, a
hundred steps of AdamW each: time, memory, the loss at the end, and a profile of one step, kernel by
kernel. Every row changes one thing in the program of the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_dora
from benchmarks.clock import Kernels, device_clock
from benchmarks.model.adapters import linear_of
from benchmarks.model.decoder import Loss
from benchmarks.results import Row, attempted
from benchmarks.step import LLAMA_3_8B, TINY_DECODER, mean_loss, timed
from jax_dora.models import DecoderConfig, layer, make_model, rope

# What a kernel belongs to, by the first pattern that its name has.
OPERATORS = (
    ("kernels of jax_dora", r"^dora_"),
    ("attention, by cuDNN", r"cudnn"),
    ("other products", r"gemm|nvjet|cutlass|cublas"),
    ("all else, fused by XLA", r"^(?!mem)"),
)
# A text in four of a row's tokens, or more: what chat data look like when packed.
TEXTS = (1536, 256, 640, 1152, 512)


def at_once(model: Any, tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Returns the mean cross-entropy of all logits in fp32, differentiated as JAX does."""
    logits = model(tokens, segment_ids=segments).astype(jnp.float32)
    targets = jnp.roll(tokens, -1, 1)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


class Variant(NamedTuple):
    """One program.

    Attributes:
      name: of what differs from the first.
      changes: to the decoder's config.
      kind, adapter: of `linear_of`.
      patches: (object, attribute, value) while it is traced.
      packed: several texts a row.
    """

    name: str
    changes: Mapping[str, Any] = {}
    kind: str = "DoRA"
    adapter: Mapping[str, Any] = {}
    patches: Sequence[tuple[Any, str, Any]] = ()
    loss: Loss = mean_loss
    packed: bool = False


def _norm_as_it_comes(self: Any, x: jax.Array) -> jax.Array:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...]


def _rotate_as_it_comes(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _gated_by_hand(gate: Any, up: Any, x: jax.Array) -> jax.Array:
    return nnx.silu(gate(x)) * up(x)


VARIANTS = (
    Variant("as it is"),
    Variant("kernels of jax_dora off: XLA's DoRA", adapter={"implementation": "xla"}),
    Variant("LoRA in place of DoRA", kind="LoRA"),
    Variant("packed rows, by cuDNN's segments", {"segments": 8}, packed=True),
    Variant("packed rows, by a mask", packed=True),
    Variant("attention by XLA in place of cuDNN", {"attention": "xla"}),
    Variant("cross-entropy of all logits at once", loss=at_once),
    Variant("silu(gate) * up written out", patches=((jax_dora, "swiglu", _gated_by_hand),)),
    Variant("dropout 0.1 of the adapter's input", adapter={"dropout": 0.1}),
    Variant("RMSNorm without fp32", patches=((layer.RMSNorm, "__call__", _norm_as_it_comes),)),
    Variant("rotation without fp32", patches=((rope, "rotate", _rotate_as_it_comes),)),
    Variant("LoRA, products in the dear order", kind="dense"),
    Variant("every layer rematerialised", {"memory": None}),
)


class Settings(NamedTuple):
    """The settings of the level; of the variants those are measured whose names begin like one of
    `only`."""

    decoder: DecoderConfig = LLAMA_3_8B
    layers: int = 8
    shape: tuple[int, int] = (2, 4096)
    rank: int = 16
    memory: float = 10.0
    steps: int = 100
    only: tuple[str, ...] = ()


TINY = Settings(TINY_DECODER, 2, (2, 16), memory=1.0, steps=3)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a program; ratios are to the first."""
    first = None
    for variant in VARIANTS:
        if settings.only and not variant.name.startswith(settings.only):
            continue
        row: Row = {"kind": variant.name, "layers": settings.layers, "rank": settings.rank}
        row |= {"batch": settings.shape[0], "time": settings.shape[1], "steps": settings.steps}
        row = attempted(row, functools.partial(_measured, variant, settings, device))
        if "failed" not in row:
            first = first or row
            row |= {"over_first": row["ms"] / first["ms"], "moved": row["loss"] - first["loss"]}
        yield row


def _measured(variant: Variant, settings: Settings, device: str) -> Row:
    attention = "cudnn" if device == "cuda" else "xla"
    changes = {"num_hidden_layers": settings.layers, "attention": attention}
    changes |= {"memory": settings.memory} | dict(variant.changes)
    if device != "cuda":
        changes |= {"attention": "xla", "segments": None}
    config = dataclasses.replace(settings.decoder, **changes)
    with contextlib.ExitStack() as stack:
        for owner, name, value in variant.patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        linear = linear_of(variant.kind, settings.rank, **variant.adapter)
        model = make_model(config, linear=linear)
        return timed(
            model,
            config.vocab_size,
            settings.shape,
            max(settings.steps - 2, 1),
            variant.loss,
            _segments(settings.shape) if variant.packed else None,
            _profiled if device == "cuda" else None,
        )


def _profiled(step: Callable[[], Any]) -> Row:
    return {"kernels": by_name(device_clock().kernels(step))}


def _segments(shape: tuple[int, int]) -> jax.Array:
    """Returns the number of each token's text: i32[batch, time]."""
    lengths = np.asarray(TEXTS) * shape[1] // sum(TEXTS)
    lengths[-1] += shape[1] - lengths.sum()
    number = np.repeat(np.arange(len(lengths)), lengths)
    return jnp.broadcast_to(jnp.asarray(number, jnp.int32), shape)


def by_name(kernels: Kernels) -> dict[str, list[float]]:
    """Returns the launches and microseconds of kernels by their names without numbers."""
    found: dict[str, list[float]] = {}
    for name, us in kernels:
        one = found.setdefault(re.sub(r"(<.*|[_.]?\d+)", "", name)[:60], [0, 0.0])
        one[0] += 1
        one[1] = round(one[1] + us, 1)
    return found


def by_operator(kernels: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Returns the launches and microseconds of each operator, of what `by_name` returns. Copies are
    left out: whether they are kernels depends on what launches them."""
    found: dict[str, list[float]] = {name: [0, 0.0] for name, _ in OPERATORS}
    for kernel, (count, us) in kernels.items():
        for name, names in OPERATORS:
            if re.search(names, kernel):
                found[name][0] += count
                found[name][1] += us
                break
    return found
