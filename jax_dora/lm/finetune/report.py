"""Describes a run in a table before it starts."""

import math
from typing import Any

import jax
from flax import nnx
from rich.table import Table

import jax_dora
from jax_dora.lm.finetune import estimate
from jax_dora.lm.finetune.plan import Plan
from jax_dora.lm.finetune.training import Parts
from jax_dora.ops import is_quantised


def report(plan: Plan) -> Table:
    """Returns a table of the run's parameters, data, steps and memory."""
    parts = Parts.of(plan.abstract_model)
    trained, frozen = _size(parts.adapters), _size(parts.frozen)
    modules = (module for _, module in nnx.iter_modules(plan.abstract_model))
    layers = (module for module in modules if isinstance(module, jax_dora.DoRALayer))
    covered = sum(math.prod(layer.kernel_param.shape) for layer in layers)
    rows = plan.rows
    step = math.prod(plan.step_rows)
    shares = estimate.memory(plan.abstract_model, plan.settings.batch, plan.settings.length)
    total, available = sum(shares.values()), estimate.device_memory()
    table = Table(show_header=False, box=None)
    for name, value in {
        "parameters": f"{trained + frozen:,}, of which {trained:,} are trained "
        f"({trained / (trained + frozen):.2%})",
        "adapted": f"{covered / frozen:.1%} of the base parameters ({plan.settings.target})",
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
