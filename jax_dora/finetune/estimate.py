"""Estimates the memory that a run will take, before anything is compiled."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.table import Table

from jax_dora.adapt.tree import find_dora_layers
from jax_dora.finetune import processes
from jax_dora.finetune.training import Parts
from jax_dora.models import CausalLM, DecoderSharding, activations
from jax_dora.ops.quantised import bits, is_quantised

if TYPE_CHECKING:
    from jax_dora.finetune.plan import Plan

# A model is kept whole on every device that has room for its weights so many times: the rest is
# for activations, gradients and the optimizer.
COPIES_TO_SPARE = 4
LOSS_CHUNK = 1024  # tokens whose logits exist at a time, as in next_token_loss


def memory(plan: Plan) -> dict[str, int]:
    """Returns the bytes that a step holds on each device at its peak, by what they are for; about
    right, since XLA decides on the last of them."""
    config, args = plan.config, plan.args
    parts = Parts.of(plan.abstract_model)
    batch = args.batch // config.row_shards
    mesh = {"fsdp": 1, "tp": 1} if plan.sharding is None else dict(plan.sharding.mesh.shape)
    tokens, width = batch * args.length, jnp.dtype(config.dtype).itemsize
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    scores = batch * config.num_attention_heads * args.length**2
    if plan.changes.get("attention") == "cudnn":
        scores = 0
    inner = (heads + 3 * config.intermediate_size) // mesh["tp"]
    shares = {
        "base model": _nbytes(parts.frozen, config.sharding),
        # Themselves, Adam's two moments, the sum of the gradients and one micro-batch's.
        "adapters and optimizer": 5 * _nbytes(parts.adapters, config.sharding),
        "inputs of the layers": config.num_hidden_layers * tokens * config.hidden_size * width,
        # Forward, then backward: each value and its gradient.
        "one layer again": 2 * tokens * (4 * config.hidden_size + inner) * width
        + 3 * 4 * scores // mesh["tp"],
        "logits": 3 * 4 * min(tokens, LOSS_CHUNK) * config.vocab_size,
    }
    kernels = filter(is_quantised, jax.tree.leaves(parts.frozen, is_leaf=is_quantised))
    if largest := max((math.prod(one.shape[-2:]) for one in kernels), default=0):
        shares["a kernel, dequantised"] = width * largest // mesh["tp"]
    if mesh["fsdp"] > 1:
        # The largest that is whole where it is used: the head, or one layer's kernels.
        whole = plan.abstract_model
        layer = _nbytes(nnx.state(whole.model.layers, nnx.Param)) // config.num_hidden_layers
        shares["gathered weights"] = max(layer // mesh["tp"], _nbytes(nnx.state(whole.head())))
    return shares


def device_memory() -> int:
    """Returns the bytes that the device has; on a CPU, the host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def has_room_for_copies(model: CausalLM) -> bool:
    """Returns whether every process's devices have room for an abstract model's weights
    `COPIES_TO_SPARE` times over."""
    taken = _nbytes(nnx.state(model, nnx.Param))
    return COPIES_TO_SPARE * taken <= processes.least(device_memory())


def free_memory(plan: Plan) -> float:
    """Returns the bytes of every process's device that a step leaves free; 0 where a device does
    not say what it has, as a CPU."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    limit = (1 - activations.RESERVED_SHARE) * processes.least(limit)
    return max(0.0, limit - sum(memory(plan).values()))


def report(plan: Plan) -> Table:
    """Returns a table of parameters, data, steps and memory."""
    parts = Parts.of(plan.abstract_model)
    trained, rest = _size(parts.adapters), _size(parts.frozen)
    layers = [found.module for found in find_dora_layers(plan.abstract_model)]
    covered = sum(math.prod(layer.kernel_param.shape) for layer in layers)
    rows = plan.rows
    step = math.prod(plan.step_rows)
    shares = memory(plan)
    total, there = sum(shares.values()), device_memory()
    table = Table(show_header=False, box=None)
    for name, told in {
        "parameters": f"{trained + rest:,}, of which {trained:,} are trained "
        f"({trained / (trained + rest):.2%})",
        "adapted": f"{covered / rest:.1%} of the base's, by --target {plan.args.target}",
        "data": f"{len(rows.tokens):,} rows of {plan.args.length:,} tokens: "
        f"{(rows.segment_ids > 0).sum():,} tokens, {int(rows.weights.sum()):,} of them learned",
        "steps": f"{plan.steps:,} of {step:,} rows, {plan.steps * step / len(rows.tokens):.2f} "
        "epochs",
        "memory": f"about {_gib(total)} of the {_gib(there)} of {_told(plan)}",
    }.items():
        table.add_row(name, told)
    for name, share in shares.items():
        table.add_row("", f"{_gib(share)} {name}")
    if total > there:
        table.add_row("", "More than there is: lower --batch (and raise --accumulate) or --length")
    return table


def _told(plan: Plan) -> str:
    kind = jax.devices()[0].device_kind
    if plan.sharding is None:
        return kind
    mesh = plan.sharding.mesh
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"each of {mesh.size} × {kind} ({sizes})"


def _size(state: Any) -> int:
    arrays = jax.tree.leaves(state, is_leaf=is_quantised)
    return sum(math.prod(array.shape) for array in arrays)


def _nbytes(state: nnx.State, sharding: DecoderSharding | None = None) -> int:
    """Returns the bytes of a state, or of a device's part of it."""
    total = 0
    for path, variable in nnx.to_flat_state(state):
        for leaf in jax.tree.leaves(variable.get_value()):
            shape = leaf.shape
            if sharding is not None:
                shape = sharding("/".join(map(str, path)), shape).shard_shape(shape)
            total += math.prod(shape) * bits(leaf.dtype)
    return math.ceil(total / 8)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
