"""Chooses which activations of a layer are kept from the forward to the backward pass.

The rest is computed again. A layer's choices (`Activation`) are few, so that the best set within a
budget is found by trying all: the one whose recomputation would take longest. Time is counted: the
products' FLOPs, and bytes at the rate at which a Hopper moves them while it does `FLOPS_PER_BYTE`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_dora
from jax_dora.models.config import DecoderConfig
from jax_dora.ops.projection import RESULT_NAME

GIB = 2**30

# 750 TFLOP/s of products beside 3 TB/s.
FLOPS_PER_BYTE = 250
# Names that the decoder gives to what is no projection's result.
ATTENTION, NORMED, GATED = "attention", "normed", "gated"
# cuDNN's forward pass, whose residuals have no name.
ATTENTION_PRIMITIVES = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")
# Of the device's memory: what is not counted here, and gaps between arrays.
RESERVED_SHARE = 0.15


class Activation(NamedTuple):
    """An activation of a layer that may be kept.

    Attributes:
      name: of `jax.ad_checkpoint.checkpoint_name`.
      width: features of a result, where several projections share the name; else 0.
      size: bytes of a token in a layer.
      work: FLOPs of a token in a layer that keeping it saves.
    """

    name: str
    width: int
    size: int
    work: float


def activations(config: DecoderConfig, time: int) -> list[Activation]:
    """Returns the choices of a layer for texts of `time` tokens."""
    item = jnp.dtype(config.dtype).itemsize
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    # in, out, and whether the magnitude's gradient reads another array than the result. Of gate and
    # up, SwiGLU reads the same one.
    is_short = jnp.dtype(config.dtype) == jnp.float16
    products = [
        *[(hidden, out, config.qkv_bias or is_short) for out in (query, key, key)],
        (query, hidden, config.o_bias or is_short),
        *[(hidden, inner, False)] * 2,
        (inner, hidden, config.mlp_bias or is_short),
    ]
    found = []
    for width in dict.fromkeys(out for _, out, _ in products):
        alike = [(n_in, apart) for n_in, out, apart in products if out == width]
        size = sum(1 + apart for _, apart in alike) * width * item
        work = sum(2 * n_in * width for n_in, _ in alike)
        found.append(Activation(RESULT_NAME, width, size, work))
    if config.attention == "cudnn":
        # Scores and their product with values, each for half of the square; a head's sum is fp32.
        size = query * item + 4 * config.num_attention_heads
        found.append(Activation(ATTENTION, 0, size, 2 * query * time))
    moved = [(NORMED, 2 * hidden, 3), (GATED, inner, 3)]
    found += [
        Activation(name, 0, width * item, FLOPS_PER_BYTE * passes * width * item)
        for name, width, passes in moved
    ]
    return found


def best(choices: Sequence[Activation], tokens: int, budget: float) -> tuple[Activation, ...]:
    """Returns the set that saves most within `budget` bytes for `tokens` tokens of all layers."""
    sets = itertools.chain.from_iterable(
        itertools.combinations(choices, count) for count in range(len(choices) + 1)
    )
    fitting = [kept for kept in sets if tokens * sum(one.size for one in kept) <= budget]
    return max(fitting, key=lambda kept: sum(one.work for one in kept))


def plan(config: DecoderConfig, batch: int, time: int) -> tuple[Activation, ...]:
    """Returns the activations that a pass over [batch, time] tokens keeps by `config.memory`."""
    if config.memory is None:
        return ()
    tokens, choices = batch * time, activations(config, time)
    if config.memory == "auto":
        budget = free_memory() - _working_set(config, tokens)
    else:
        budget = config.memory * GIB
        if budget < 0:
            raise ValueError(f"memory is {config.memory}; expected at least 0 GiB, or 'auto'")
    return best(choices, tokens * config.num_hidden_layers, max(budget, 0))


def free_memory() -> float:
    """Returns the bytes of the device that are not in use as this is traced; 0 where it does not
    say, as a CPU."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return (1 - RESERVED_SHARE) * limit - stats.get("bytes_in_use", 0)


def _working_set(config: DecoderConfig, tokens: int) -> float:
    """Returns the bytes of what is there at any rate: every layer's input, all that one layer
    computes and its gradient, and the logits of the loss's chunk with theirs."""
    item = jnp.dtype(config.dtype).itemsize
    layer = 8 * config.hidden_size + 6 * config.intermediate_size
    inputs = config.num_hidden_layers * config.hidden_size
    return tokens * (2 * layer + inputs) * item + 4 * 1024 * config.vocab_size * 4


def policy(kept: Sequence[Activation]) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint` that keeps what `jax_dora.remat_policy()` does, and
    these."""
    always = jax_dora.remat_policy(*(one.name for one in kept if not one.width))
    widths = {one.width for one in kept if one.width}
    attends = any(one.name == ATTENTION for one in kept)

    def keeps(primitive: Any, *operands: Any, **params: Any) -> Any:
        if params.get("name") == RESULT_NAME and operands[0].shape[-1] in widths:
            return True
        if attends and primitive.name in ATTENTION_PRIMITIVES:
            return True
        return always(primitive, *operands, **params)

    return keeps
