"""Estimates the memory that a run needs, before anything is compiled."""

import math
import os

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dora.lm.finetune import processes
from jax_dora.lm.finetune.training import Parts
from jax_dora.lm.models import CausalLM, DecoderSharding, activations, coded_head
from jax_dora.ops import is_quantised

# The weights are replicated on every device if each has room for this many copies of them. The rest
# is for activations, gradients and the optimizer.
MIN_COPIES = 4
LOSS_CHUNK = 1024  # the default chunk of next_token_loss, in tokens


def memory(model: CausalLM, batch: int, length: int) -> dict[str, int]:
    """Returns the peak memory of a step in bytes per device, by purpose.

    This is an estimate, since XLA decides which temporary arrays exist at the same time.

    Args:
      model: the adapted model; shapes and dtypes are enough.
      batch: the rows of a micro-batch, on all devices together.
      length: the tokens in a row.
    """
    config, parts = model.config, Parts.of(model)
    mesh = {"fsdp": 1, "tp": 1} if config.sharding is None else dict(config.sharding.mesh.shape)
    batch //= config.row_shards
    tokens, width = batch * length, jnp.dtype(config.dtype).itemsize
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    scores = batch * config.num_attention_heads * length**2
    if config.attention == "cudnn":
        scores = 0
    inner = (heads + 3 * config.intermediate_size) // mesh["tp"]
    shares = {
        "base model": _nbytes(parts.frozen, config.sharding),
        # The adapters, Adam's two moments, the sum of gradients, and one micro-batch's gradients.
        "adapters and optimizer": 5 * _nbytes(parts.adapters, config.sharding),
        "inputs of the layers": config.num_hidden_layers * tokens * config.hidden_size * width,
    }
    # The backward pass recomputes a layer: each activation and its gradient.
    recomputed = {
        "one recomputed layer": 2 * tokens * (4 * config.hidden_size + inner) * width
        + 3 * 4 * scores // mesh["tp"]
    }
    kernels = filter(is_quantised, jax.tree.leaves(parts.frozen, is_leaf=is_quantised))
    if largest := max((math.prod(one.shape[-2:]) for one in kernels), default=0):
        # The three of the MLP, as measured (`benchmarks quantised`).
        has_codes_alone = any(getattr(one, "bwd_qtype", None) for _, one in nnx.iter_modules(model))
        kind, item = ("transposed", 1) if has_codes_alone else ("dequantised", width)
        recomputed[f"its {kind} kernels"] = 3 * item * largest // mesh["tp"]
    # The logits and their gradient are freed before a layer is recomputed.
    logits = {"logits": 3 * 4 * min(tokens, LOSS_CHUNK) * config.vocab_size}
    if coded_head.is_coded(model):
        logits["codes of the head"] = config.hidden_size * config.vocab_size
    shares |= max(recomputed, logits, key=lambda one: sum(one.values()))
    if mesh["fsdp"] > 1:
        # Weights are gathered where they are used: at most the head, or the kernels of one layer.
        layer = _nbytes(nnx.state(model.model.layers, nnx.Param)) // config.num_hidden_layers
        shares["gathered weights"] = max(layer // mesh["tp"], _nbytes(nnx.state(model.head())))
    return shares


def device_memory() -> int:
    """Returns the total memory of the device in bytes; on CPU, the memory of the host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def can_replicate(model: CausalLM) -> bool:
    """Returns whether every device has room for `MIN_COPIES` copies of an abstract model's weights.

    The devices of all processes count.
    """
    nbytes = _nbytes(nnx.state(model, nnx.Param))
    return MIN_COPIES * nbytes <= processes.minimum(device_memory())


def free_memory(model: CausalLM, batch: int, length: int) -> float:
    """Returns the device memory in bytes that a step leaves free in every process.

    The arguments are those of `memory`. Returns 0 if a device does not report its memory, like a
    CPU.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    limit = (1 - activations.RESERVED_SHARE) * processes.minimum(limit)
    return max(0.0, limit - sum(memory(model, batch, length).values()))


def _nbytes(state: nnx.State, sharding: DecoderSharding | None = None) -> int:
    """Returns the bytes of a state; with a sharding, those on one device."""
    total = 0
    for path, variable in nnx.to_flat_state(state):
        for leaf in jax.tree.leaves(variable.get_value()):
            shape = leaf.shape
            if sharding is not None:
                shape = sharding("/".join(map(str, path)), shape).shard_shape(shape)
            total += math.prod(shape) * jax.dtypes.itemsize_bits(leaf.dtype)
    return math.ceil(total / 8)
