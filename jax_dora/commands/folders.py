"""A base model's folder and an adapter on it: what several commands begin with."""

import argparse
from pathlib import Path

import jax_dora.peft
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import CONFIG, find_adapter_folder, named_in_errors
from jax_dora.commands.flags import add_formats
from jax_dora.models import CausalLM, load_model


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --model, --adapter, --dtype and --quantize."""
    add = parser.add_argument_group("model").add_argument
    add("--model", type=Path, help="a Hugging Face folder; the one the adapter names by default")
    add("--adapter", type=Path, help="a PEFT folder, or a folder that finetune made")
    add_formats(add)


def adapter_folder(folder: Path) -> Path:
    """Returns the PEFT folder that `folder` is, or that the run in it has exported."""
    if (found := find_adapter_folder(folder)) is None:
        raise FileNotFoundError(f"{folder} has no {CONFIG}; expected a PEFT folder, or a run's")
    return found


def adapter_config(folder: Path) -> AdapterConfig:
    """Returns what a PEFT folder's adapter_config.json says."""
    with named_in_errors(folder / CONFIG):
        return AdapterConfig.from_json((folder / CONFIG).read_text("utf-8"))


def base_folder(args: argparse.Namespace) -> Path:
    """Returns the folder of --model, or else the one that the adapter was trained on."""
    if args.model is not None:
        return args.model
    if args.adapter is None:
        raise ValueError("--model is missing; expected a Hugging Face folder")
    folder = adapter_config(adapter_folder(args.adapter)).base_model_name_or_path
    if folder is None or not Path(folder).is_dir():
        raise FileNotFoundError(
            f"{args.adapter} was trained on {folder!r}, which is no folder here; pass --model"
        )
    return Path(folder)


def adapted_model(args: argparse.Namespace, folder: Path) -> CausalLM:
    """Returns the model of `folder`, with the adapter of --adapter if it is given."""
    model = load_model(folder, quantize=args.quantize, dtype=args.dtype)
    if args.adapter is None:
        return model
    return jax_dora.peft.load_adapter(model, adapter_folder(args.adapter))
