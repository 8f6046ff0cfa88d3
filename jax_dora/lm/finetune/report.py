"""Describes a run in a table before it starts."""

import math
from typing import Any

import jax
from flax import nnx
from rich.table import Table

import jax_dora
from jax_dora.lm.finetune import estimate
from jax_dora.lm.finetune.adapter import SavedParam
from jax_dora.lm.finetune.plan import Plan
from jax_dora.lm.finetune.training import Parts
from jax_dora.ops import is_quantised


def report(plan: Plan) -> Table:
    """Returns a table of the run's parameters, data, steps and memory."""
    frozen = _size(Parts.of(plan.abstract_model).frozen)
    trained = _size(nnx.state(plan.abstract_model, SavedParam))
    covered = 0
    for _, layer in nnx.iter_modules(plan.abstract_model):
        if isinstance(layer, jax_dora.DoRALayer):
            share = 1.0
            if layer.stack.shape and plan.settings.layers:
                share = len(plan.settings.layers) / math.prod(layer.stack.shape)
            names = ("lora_a", "lora_b", "magnitude")[: 3 if plan.settings.method == "dora" else 2]
            sizes = (math.prod(getattr(layer, name).shape) for name in names)
            trained += round(share * sum(sizes))
            covered += share * math.prod(layer.kernel_param.shape)
    rows = plan.rows
    step = math.prod(plan.step_rows)
    shares = estimate.memory(plan.abstract_model, plan.settings.batch, plan.settings.length)
    total, available = sum(shares.values()), estimate.device_memory()
    table = Table(show_header=False, box=None)
    for name, value in {
        "parameters": f"{trained + frozen:,}, of which {trained:,} are trained "
        f"({trained / (trained + frozen):.2%})",
        "adapted": f"{covered / frozen:.1%} of the base parameters ({_target(plan)})",
        "data": f"{len(rows.tokens):,} rows of {plan.settings.length:,} tokens: "
        f"{(rows.segment_ids > 0).sum():,} tokens, {int(rows.weights.sum()):,} of them learned",
        "steps": f"{plan.steps:,} of {step:,} rows, {plan.steps * step / len(rows.tokens):.2f} "
        "epochs",
        "memory": f"about {_gib(total)} of the {_gib(available)} of {_device_name(plan)}",
    }.items():
        table.add_row(name, value)
    for name, share in shares.items():
        table.add_row("", f"{_gib(share)} {name}")
    if total > available:
        table.add_row("", "Too much: lower batch (and raise accumulate), or lower length")
    return table


def _target(plan: Plan) -> str:
    settings = plan.settings
    layers = f", layers {', '.join(map(str, settings.layers))}" if settings.layers else ""
    return f"{settings.target or f'as in {settings.from_adapter}'}{layers}"


def _device_name(plan: Plan) -> str:
    kind = jax.devices()[0].device_kind
    if plan.sharding is None:
        return kind
    mesh = plan.sharding.mesh
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"each of {mesh.size} × {kind} ({sizes})"


def _size(state: Any) -> int:
    arrays = jax.tree.leaves(state, is_leaf=is_quantised)
    return sum(math.prod(array.shape) for array in arrays)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
