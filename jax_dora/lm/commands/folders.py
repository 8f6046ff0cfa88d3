"""Loads the base model of --model with the adapter of --adapter, for several commands."""

import argparse
import sys
from pathlib import Path

import jax_dora.peft
from dora_common.peft import formats
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import CONFIG, find_adapter_folder, named_in_errors
from jax_dora.lm.commands.flags import add_formats
from jax_dora.lm.finetune.checkpoints import Checkpoints
from jax_dora.lm.models import CausalLM, load_model, read_config
from jax_dora.lm.models.tokenizer import TextSettings


def add_model_flags(parser: argparse.ArgumentParser, *, activations: bool = False) -> None:
    """Adds the flags --model, --adapter, --dtype and --quantize, and --activations if asked to."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="Hugging Face folder of the base model; the adapter's base model by default",
    )
    add("--adapter", type=Path, metavar="FOLDER", help="PEFT folder, or output folder of finetune")
    add_formats(add, activations=activations)


def adapter_folder(folder: Path) -> Path:
    """Returns the PEFT folder: `folder` itself, or the adapter in the run `folder`."""
    if (found := find_adapter_folder(folder)) is None:
        raise FileNotFoundError(
            f"{folder} has no {CONFIG}; expected a PEFT folder, or an output folder of finetune"
            f"{formats.hint(folder)}"
        )
    return found


def adapter_config(folder: Path) -> AdapterConfig:
    """Returns the contents of a PEFT folder's adapter_config.json."""
    with named_in_errors(folder / CONFIG):
        return AdapterConfig.from_json((folder / CONFIG).read_text("utf-8"))


def base_folder(args: argparse.Namespace) -> Path:
    """Returns the folder of --model, or by default the folder that the adapter was trained on."""
    if args.model is not None:
        return args.model
    if args.adapter is None:
        raise ValueError("--model is missing; expected a Hugging Face folder")
    folder = adapter_config(adapter_folder(args.adapter)).base_model_name_or_path
    if folder is None or not Path(folder).is_dir():
        raise FileNotFoundError(
            f"{args.adapter} was trained on {folder!r}, which is not a folder here; pass --model"
        )
    return Path(folder)


def text_settings(args: argparse.Namespace, folder: Path) -> TextSettings:
    """Returns the text settings of the model in `folder` with the adapter of --adapter."""
    adapter = None if args.adapter is None else adapter_folder(args.adapter)
    return TextSettings.of(
        folder, read_config(folder), adapter=adapter, end_tokens=args.end_tokens or ()
    )


def adapted_model(args: argparse.Namespace, folder: Path) -> CausalLM:
    """Returns the model in `folder`, with the adapter of --adapter if it is given.

    Prints a warning if the adapter is from a run over a base in another format.
    """
    act_qtype = getattr(args, "act_qtype", None)
    model = load_model(folder, quantize=args.quantize, act_qtype=act_qtype, dtype=args.dtype)
    if args.adapter is None:
        return model
    adapted = jax_dora.peft.load_adapter(model, adapter_folder(args.adapter))
    trained = _trained_format(args.adapter)
    if trained not in (None, _named_format(args.quantize)):
        print(
            f"Warning: {args.adapter} was trained {trained} and is used "
            f"{_named_format(args.quantize)}; its magnitudes belong to the weights that it was "
            "trained on",
            file=sys.stderr,
        )
    return adapted


def _trained_format(folder: Path) -> str | None:
    """Returns the `_named_format` of the run in a folder, or None if it is not known.

    Only the facts of the last checkpoint are read, not its arrays.
    """
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        return _named_format(checkpoints.facts(checkpoints.steps()[-1])["settings"]["quantize"])
    except (OSError, ValueError, LookupError):  # no checkpoint, or a damaged one
        return None


def _named_format(qtype: str | None) -> str:
    return f"with --quantize {qtype}" if qtype else "without --quantize"
