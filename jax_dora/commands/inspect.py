"""Shows what a PEFT folder holds, and how far it takes the model from its base.

    jax-dora inspect RUN
    jax-dora inspect ADAPTER --model FOLDER

Every line is a projection, of all layers together: its largest rank and scale, and, if the base
model is there, how long the change s·A B is beside W, and the smallest and largest magnitude beside
the norm of W + s·A B of its own output feature. Untrained adapters have 0, 1 and 1.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Column, Table
from safetensors import safe_open

import jax_dora
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import TENSORS, named_in_errors
from jax_dora.adapt.tree import find_dora_layers
from jax_dora.commands.flags import add_formats, corrections
from jax_dora.commands.folders import adapted_model, adapter_config, adapter_folder, base_folder
from jax_dora.models import read_config
from jax_dora.ops.quantised import dense


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path, metavar="FOLDER", help="a PEFT folder, or a run's")
    parser.add_argument("--model", type=Path, help="its base; the one it names by default")
    add_formats(parser.add_argument)


def run(args: argparse.Namespace) -> int:
    """Prints the tables; returns the exit status."""
    console = Console()
    with corrections():
        folder = adapter_folder(args.adapter)
        config = adapter_config(folder)
        _print_folder(console, folder, config)
        try:
            base = base_folder(args)
        except FileNotFoundError as error:
            console.print(f"Without its base: {error}", markup=False, soft_wrap=True)
            return 0
        model = adapted_model(args, base)
        console.print(f"It fits {base}, a {read_config(base)['model_type']}", markup=False)
    console.print(_layers(model))
    return 0


def _print_folder(console: Console, folder: Path, config: AdapterConfig) -> None:
    path = folder / TENSORS
    with named_in_errors(path), safe_open(path, framework="numpy") as tensors:
        slices = {key: tensors.get_slice(key) for key in tensors.keys()}
        dtypes = sorted({one.get_dtype() for one in slices.values()})
        numbers = sum(math.prod(one.get_shape()) for one in slices.values())
    kind = "DoRA" if config.use_dora else "LoRA"
    ranks = sorted({config.r, *config.rank_pattern.values()})
    table = Table(show_header=False, box=None)
    rows = {
        "folder": folder,
        "adapter": f"{kind}, rank {', '.join(map(str, ranks))}, alpha {config.lora_alpha:g}"
        + ", rsLoRA" * config.use_rslora,
        "base": config.base_model_name_or_path or "not named",
        "targets": _short(config.target_modules),
        "tensors": f"{len(slices):,} of {', '.join(dtypes)}: {numbers:,} numbers, "
        f"{(folder / TENSORS).stat().st_size / 2**20:,.1f} MiB",
        "whole modules": _short(config.modules_to_save or "none"),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table, markup=False)


def _layers(model: nnx.Module) -> Table:
    # Whole names in 80 columns, and on more lines in fewer.
    first = Column("projection", overflow="fold")
    rest = ("rank", "scale", "‖sAB‖ / ‖W‖", "magnitude / norm")
    table = Table(first, *rest, show_edge=False)
    norms = jax_dora.norms(model)
    for found in find_dora_layers(model):
        path, layer = found.paths[0], found.module
        change = layer.scale * _length_of_product(layer.lora_a[...], layer.lora_b[...])
        length = jnp.linalg.norm(dense(layer.kernel_param[...], jnp.float32).ravel())
        ratio = layer.magnitude[...] / norms[path]
        limits = f"{float(jnp.min(ratio)):.4f} to {float(jnp.max(ratio)):.4f}"
        table.add_row(path, str(layer.rank), f"{layer.scale:.4g}", f"{change / length:.2%}", limits)
    return table


def _length_of_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the Frobenius norm of the product a b of every layer of a stack, without making the
    product."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(jnp.einsum("...ir,...is,...rj,...sj->...rs", a, a, b, b)))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else ", ".join(sorted(value))
    return text if len(text) <= 100 else f"{text[:97]}..."
