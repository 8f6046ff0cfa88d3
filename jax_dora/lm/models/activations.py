"""Chooses which activations of a layer are kept from the forward to the backward pass.

The others are recomputed in the backward pass. A layer has few `Activation`s, so the best set
within a memory budget is found by trying every set: the best one saves the most recomputation. If
memory is left, the first layers may keep more than the others (`parts`). The
cost of recomputation is counted in FLOPs. Moving bytes costs as many FLOPs as a Hopper GPU computes
in the same time, `FLOPS_PER_BYTE`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_dora
from jax_dora.lm.models.config import DecoderConfig
from jax_dora.ops import AUTOMATIC_POLICIES, RESULT_NAME, Z_NAME

GIB = 2**30

# 750 TFLOP/s of matrix products and 3 TB/s of memory bandwidth.
FLOPS_PER_BYTE = 250
# In a step in FP8, the time of a FLOP relative to that: products by `coded_matmul` run at 1,500
# TFLOP/s, and cuDNN's attention at 500 (H200, `h200/tried.jsonl`, "a step of 70B in FP8, by
# kernel"). In 16 bits all count the same.
PRODUCT_IN_FP8, ATTENTION_IN_FP8 = 0.5, 1.5
# Checkpoint names that the decoder gives to activations other than a projection's result.
ATTENTION, NORMED, GATED = "attention", "normed", "gated"
# The result that the gradient of the last projection's magnitude reads, if nothing else does; see
# `save_inner`.
LAST = "last"
# The primitives of cuDNN's forward pass. Their residuals have no checkpoint name.
ATTENTION_PRIMITIVES = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")
# The largest rank whose z = x (s·A) is kept with other activations. It takes few bytes then, and
# computing it again would read the inputs of every projection.
MOST_Z_FEATURES = 64
# The share of the device's memory left for fragmentation and for arrays not counted here.
RESERVED_SHARE = 0.15


class Activation(NamedTuple):
    """An activation of a layer that can be kept.

    Attributes:
      name: the name given with `jax.ad_checkpoint.checkpoint_name`, or `LAST`.
      width: the number of features, for projections' results, which all share one name; else 0.
      size: bytes per token and layer.
      work: FLOPs per token and layer that keeping the activation saves.
    """

    name: str
    width: int
    size: int
    work: float


def activations(config: DecoderConfig, time: int, in_fp8: bool = False) -> list[Activation]:
    """Returns the activations of a layer that can be kept, for texts of `time` tokens. `in_fp8` is
    whether the products of the forward pass are."""
    item = jnp.dtype(config.dtype).itemsize
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    # (input width, output width, whether the magnitude's gradient reads a second array besides the
    # result). For gate and up, SwiGLU and the magnitude's gradient read the same array.
    is_short = jnp.dtype(config.dtype) == jnp.float16
    products = [
        *[(hidden, out, config.qkv_bias or is_short) for out in (query, key, key)],
        (query, hidden, config.o_bias or is_short),
        *[(hidden, inner, False)] * 2,
    ]
    # Nothing but the magnitude's gradient reads the result of the last projection.
    product, attention = (PRODUCT_IN_FP8, ATTENTION_IN_FP8) if in_fp8 else (1, 1)
    choices = [Activation(LAST, 0, hidden * item, product * 2 * inner * hidden)]
    for width in dict.fromkeys(out for _, out, _ in products):
        same_width = [(n_in, has_second) for n_in, out, has_second in products if out == width]
        size = sum(1 + has_second for _, has_second in same_width) * width * item
        work = product * sum(2 * n_in * width for n_in, _ in same_width)
        choices.append(Activation(RESULT_NAME, width, size, work))
    if config.attention == "cudnn":
        # Size: the result and one fp32 sum per head. Work: the scores and their product with the
        # values, each over half of the square.
        size = query * item + 4 * config.num_attention_heads
        choices.append(Activation(ATTENTION, 0, size, attention * 2 * query * time))
    # A scan copies what is kept into a stack of layers, in as many passes as computing it again.
    if config.unroll:
        elementwise = [(NORMED, 2 * hidden, 3), (GATED, inner, 3)]
        choices += [
            Activation(name, 0, width * item, FLOPS_PER_BYTE * passes * width * item)
            for name, width, passes in elementwise
        ]
    return choices


def best(choices: Sequence[Activation], tokens: int, budget: float) -> tuple[Activation, ...]:
    """Returns the set of activations that saves the most work and fits into `budget` bytes.

    Args:
      tokens: the number of tokens, times the number of layers.
    """
    fitting = [kept for kept in _sets(choices) if tokens * _size(kept) <= budget]
    return max(fitting, key=_work)


def plan(
    config: DecoderConfig, batch: int, time: int, in_fp8: bool = False
) -> tuple[Activation, ...]:
    """Returns the activations that all layers keep for [batch, time] tokens, according to
    `config.memory`."""
    return parts(config, batch, time, in_fp8)[-1][1]


def parts(
    config: DecoderConfig, batch: int, time: int, in_fp8: bool = False
) -> list[tuple[int, tuple[Activation, ...]]]:
    """Returns (number of layers, the activations that they keep), first for layers that keep more
    in the memory that is left, if it is enough for any, and then for all others, as `plan`."""
    layers = config.num_hidden_layers
    if config.memory is None:
        return [(layers, ())]
    tokens, choices = batch * time, activations(config, time, in_fp8)
    if config.memory == "auto":
        budget = free_memory() - _working_set(config, tokens)
    else:
        budget = config.memory * GIB
        if budget < 0:
            raise ValueError(f"memory is {config.memory}; expected at least 0 GiB, or 'auto'")
    kept = best(choices, tokens * layers, max(budget, 0))
    left = max(budget, 0) - tokens * layers * _size(kept)
    others = [one for one in choices if one not in kept]
    found = 0.0, 0, kept
    for added in _sets(others)[1:]:
        count = min(int(left // (tokens * _size(added))), layers) if tokens else 0
        found = max(found, (count * _work(added), count, kept + added), key=lambda one: one[0])
    _, count, more = found
    return ([(count, more)] if count else []) + [(layers - count, kept)]


def _sets(choices: Sequence[Activation]) -> list[tuple[Activation, ...]]:
    """Returns all sets of activations, the empty one first."""
    sizes = range(len(choices) + 1)
    return [kept for count in sizes for kept in itertools.combinations(choices, count)]


def _size(kept: Sequence[Activation]) -> int:
    return sum(one.size for one in kept)


def _work(kept: Sequence[Activation]) -> float:
    return sum(one.work for one in kept)


def free_memory() -> float:
    """Returns the bytes of device memory that are free while this is traced.

    Returns 0 if the device does not report its memory, like a CPU.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return (1 - RESERVED_SHARE) * limit - stats.get("bytes_in_use", 0)


def _working_set(config: DecoderConfig, tokens: int) -> float:
    """Returns the bytes that a step needs besides the kept activations.

    These are the input of every layer, all activations of one layer with their gradients, and the
    logits of one chunk of the loss with their gradients.
    """
    item = jnp.dtype(config.dtype).itemsize
    layer = 8 * config.hidden_size + 6 * config.intermediate_size
    inputs = config.num_hidden_layers * config.hidden_size
    return tokens * (2 * layer + inputs) * item + 4 * 1024 * config.vocab_size * 4


@functools.cache
def policy(kept: tuple[Activation, ...]) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint`.

    It keeps `kept`, with the z of adapters of small rank, and the values that
    `jax_dora.remat_policy` keeps.
    """
    names = [one.name for one in kept if not one.width and one.name != LAST]
    base_policy = jax_dora.remat_policy(*names)
    widths = {one.width for one in kept if one.width}
    keeps_attention = any(one.name == ATTENTION for one in kept)

    def is_kept(primitive: Any, *operands: Any, **params: Any) -> Any:
        name = params.get("name")
        if name == RESULT_NAME and operands[0].shape[-1] in widths:
            return True
        if name == Z_NAME and kept and operands[0].shape[-1] <= MOST_Z_FEATURES:
            return True
        if keeps_attention and primitive.name in ATTENTION_PRIMITIVES:
            return True
        return base_policy(primitive, *operands, **params)

    if any(one.name == LAST for one in kept):
        AUTOMATIC_POLICIES.add(is_kept)
    return is_kept
