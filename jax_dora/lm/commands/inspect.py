"""Show the contents of a PEFT folder, and how far the adapter changes the base model.

    jax-dora inspect RUN
    jax-dora inspect ADAPTER --model FOLDER

If the base model is available, a table has one row for each projection, over all layers: its
largest rank and scale, the norm of the update s·A B relative to the norm of W, and the smallest and
largest ratio of an output feature's magnitude to its norm in W + s·A B. An untrained adapter has
the values 0, 1 and 1.
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

import jax_dora
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import TENSORS, named_in_errors, open_tensors
from jax_dora.lm.commands.flags import add_formats, usage_errors
from jax_dora.lm.commands.folders import adapted_model, adapter_config, adapter_folder, base_folder
from jax_dora.lm.models import read_config
from jax_dora.quantisation import dense


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument(
        "adapter", type=Path, metavar="FOLDER", help="PEFT folder, or output folder of finetune"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="Hugging Face folder of the base model; the adapter's base model by default",
    )
    add_formats(parser.add_argument)


def run(args: argparse.Namespace) -> int:
    """Prints the tables, and returns the exit status."""
    console = Console()
    with usage_errors():
        folder = adapter_folder(args.adapter)
        config = adapter_config(folder)
        _print_folder(console, folder, config)
        try:
            base = base_folder(args)
        except FileNotFoundError as error:
            console.print(f"The base model was not found: {error}", markup=False, soft_wrap=True)
            return 0
        model = adapted_model(args, base)
        console.print(f"The adapter fits {base} ({read_config(base)['model_type']})", markup=False)
    console.print(_layers(model))
    return 0


def _print_folder(console: Console, folder: Path, config: AdapterConfig) -> None:
    path = folder / TENSORS
    with named_in_errors(path), open_tensors(path, "np") as tensors:
        slices = [tensors.get_slice(key) for key in tensors.keys()]
        dtypes = sorted({one.get_dtype() for one in slices})
        count = sum(math.prod(one.get_shape()) for one in slices)
    kind = "DoRA" if config.use_dora else "LoRA"
    ranks = sorted({config.r, *config.rank_pattern.values()})
    table = Table(show_header=False, box=None)
    rows = {
        "folder": folder,
        "adapter": f"{kind}, rank {', '.join(map(str, ranks))}, alpha {config.lora_alpha:g}"
        + ", rsLoRA" * config.use_rslora,
        "base": config.base_model_name_or_path or "not named",
        "targets": _short(config.target_modules),
        "tensors": f"{len(slices):,} of {', '.join(dtypes)}: {count:,} numbers, "
        f"{path.stat().st_size / 2**20:,.1f} MiB",
        "whole modules": _short(config.modules_to_save or "none"),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table, markup=False)


def _layers(model: nnx.Module) -> Table:
    # Names fit into 80 columns. In narrower terminals, they continue on the next line.
    first = Column("projection", overflow="fold")
    rest = ("rank", "scale", "‖sAB‖ / ‖W‖", "magnitude / norm")
    table = Table(first, *rest, show_edge=False)
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    for path, layer_norm in jax_dora.norms(model).items():
        layer: Any = modules[path]
        update = layer.scale * _product_norm(layer.lora_a[...], layer.lora_b[...])
        norm = jnp.linalg.norm(dense(layer.kernel_param[...], jnp.float32).ravel())
        ratio = layer.magnitude[...] / layer_norm
        limits = f"{float(jnp.min(ratio)):.4f} to {float(jnp.max(ratio)):.4f}"
        table.add_row(path, str(layer.rank), f"{layer.scale:.4g}", f"{update / norm:.2%}", limits)
    return table


def _product_norm(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the Frobenius norm of a b, for all layers of a stack together.

    The product itself is not computed, only [rank, rank] matrices.
    """
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(jnp.einsum("...ir,...is,...rj,...sj->...rs", a, a, b, b)))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else ", ".join(sorted(value))
    return text if len(text) <= 100 else f"{text[:97]}..."
