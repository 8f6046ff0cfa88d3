"""Level `step --table`: what each part of an optimizer step costs.

The first program is a step of DoRA of rank 16 on all projections of 8 layers of Llama 3 8B's
dimensions, with 2 × 4096 tokens of one batch and AdamW. Each further program differs from the first
in one thing, which its `kind` names: XLA's DoRA, LoRA, another loss, another attention, and so on.

One line is one program, run for a hundred steps: the median wall time of a step (`ms`), XLA's
account of memory, the loss after the last step, and `kernels`, the launches and microseconds of
each kernel in one more step, as CUPTI records them. `over_first` is the time divided by that of the
first program, `moved` the difference of the losses.
"""

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
from benchmarks.results import Row, attempt
from benchmarks.step import LLAMA_3_8B, TINY_DECODER, mean_loss, timed
from jax_dora.lm.models import DecoderConfig, decoder_layer, make_model, rope

# A kernel belongs to the first operator whose pattern is found in its name.
OPERATORS = (
    ("kernels of jax_dora", r"^dora_"),
    ("attention, by cuDNN", r"cudnn"),
    ("other products", r"gemm|nvjet|cutlass|cublas"),
    ("all else, fused by XLA", r"^(?!mem)"),
)
# The relative lengths of the texts in a packed row, similar to packed chat data.
TEXTS = (1536, 256, 640, 1152, 512)


class Variant(NamedTuple):
    """One program.

    Attributes:
      name: what differs from the first program.
      changes: to the decoder's config.
      kind, adapter: arguments of `linear_of`.
      patches: (object, attribute, value) to set while the program is traced.
      packed: whether a row holds several texts.
    """

    name: str
    changes: Mapping[str, Any] = {}
    kind: str = "DoRA"
    adapter: Mapping[str, Any] = {}
    patches: Sequence[tuple[Any, str, Any]] = ()
    loss: Loss = mean_loss
    packed: bool = False


def _unchunked_loss(model: Any, tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Returns the mean cross-entropy of all logits in fp32, differentiated by JAX."""
    logits = model(tokens, segment_ids=segments).astype(jnp.float32)
    targets = jnp.roll(tokens, -1, 1)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def _norm_without_fp32(self: Any, x: jax.Array) -> jax.Array:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...]


def _rotate_without_fp32(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _unfused_swiglu(gate: Any, up: Any, x: jax.Array) -> jax.Array:
    return nnx.silu(gate(x)) * up(x)


VARIANTS = (
    Variant("as it is"),
    Variant("kernels of jax_dora off: XLA's DoRA", adapter={"implementation": "xla"}),
    Variant("LoRA in place of DoRA", kind="LoRA"),
    Variant("packed rows, by cuDNN's segments", {"segments": 8}, packed=True),
    Variant("packed rows, by a mask", packed=True),
    Variant("attention by XLA in place of cuDNN", {"attention": "xla"}),
    Variant("cross-entropy of all logits at once", loss=_unchunked_loss),
    Variant("silu(gate) * up written out", patches=((jax_dora, "swiglu", _unfused_swiglu),)),
    Variant("dropout 0.1 of the adapter's input", adapter={"dropout": 0.1}),
    Variant(
        "RMSNorm without fp32", patches=((decoder_layer.RMSNorm, "__call__", _norm_without_fp32),)
    ),
    Variant("rotation without fp32", patches=((rope, "rotate", _rotate_without_fp32),)),
    Variant("LoRA, products in the dear order", kind="dense"),
    Variant("every layer rematerialised", {"memory": None}),
)


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      memory: GiB of activations to keep.
      only: beginnings of the names of variants; others are skipped.
    """

    decoder: DecoderConfig = LLAMA_3_8B
    layers: int = 8
    shape: tuple[int, int] = (2, 4096)
    rank: int = 16
    memory: float = 10.0
    steps: int = 100
    only: tuple[str, ...] = ()


TINY = Settings(TINY_DECODER, 2, (2, 16), memory=1.0, steps=3)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each program."""
    first = None
    for variant in VARIANTS:
        if settings.only and not variant.name.startswith(settings.only):
            continue
        row: Row = {"kind": variant.name, "layers": settings.layers, "rank": settings.rank}
        row |= {"batch": settings.shape[0], "time": settings.shape[1], "steps": settings.steps}
        row = attempt(row, functools.partial(_measured, variant, settings, device))
        if "failed" not in row:
            first = first or row
            row |= {"over_first": row["ms"] / first["ms"], "moved": row["loss"] - first["loss"]}
        yield row


def _measured(variant: Variant, settings: Settings, device: str) -> Row:
    changes = {"num_hidden_layers": settings.layers, "attention": "cudnn"}
    changes |= {"memory": settings.memory} | dict(variant.changes)
    if device != "cuda":
        changes |= {"attention": "xla", "segments": None}
    config = dataclasses.replace(settings.decoder, **changes)
    with contextlib.ExitStack() as stack:
        for owner, name, value in variant.patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        linear = linear_of(variant.kind, settings.rank, **variant.adapter)
        return timed(
            make_model(config, linear=linear),
            config.vocab_size,
            settings.shape,
            max(settings.steps - 2, 1),
            variant.loss,
            _segments(settings.shape) if variant.packed else None,
            _profile if device == "cuda" else None,
        )


def _profile(step: Callable[[], Any]) -> Row:
    return {"kernels": by_name(device_clock().kernels(step))}


def _segments(shape: tuple[int, int]) -> jax.Array:
    """Returns the number of each token's text: i32[batch, time]."""
    lengths = np.asarray(TEXTS) * shape[1] // sum(TEXTS)
    lengths[-1] += shape[1] - lengths.sum()
    number = np.repeat(np.arange(len(lengths)), lengths)
    return jnp.broadcast_to(jnp.asarray(number, jnp.int32), shape)


def by_name(kernels: Kernels) -> dict[str, list[float]]:
    """Returns the launches and microseconds of kernels by their names without numbers."""
    totals: dict[str, list[float]] = {}
    for name, us in kernels:
        total = totals.setdefault(re.sub(r"(<.*|[_.]?\d+)", "", name)[:60], [0, 0.0])
        total[0] += 1
        total[1] = round(total[1] + us, 1)
    return totals


def by_operator(kernels: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Returns the launches and microseconds of each operator, given the result of `by_name`.

    Copies are left out: whether a copy is a kernel depends on what launches it.
    """
    totals: dict[str, list[float]] = {name: [0, 0.0] for name, _ in OPERATORS}
    for kernel, (count, us) in kernels.items():
        for name, pattern in OPERATORS:
            if re.search(pattern, kernel):
                totals[name][0] += count
                totals[name][1] += us
                break
    return totals
