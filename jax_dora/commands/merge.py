"""Merges an adapter into its base model, and writes the result as a Hugging Face folder.

    jax-dora merge --adapter RUN --output MERGED

Each kernel becomes W + ((g-1)∘W + g∘(s·A B)) in fp32, cast once; what that cast costs is printed.
"""

import argparse

import jax_dora
from jax_dora.commands import flags
from jax_dora.commands.flags import corrections
from jax_dora.commands.folders import adapted_model, add_model_flags, base_folder
from jax_dora.models import read_config, save_model


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--output", type=flags.folder, required=True, help="the folder to be made")


def run(args: argparse.Namespace) -> int:
    """Writes the folder; returns the exit status."""
    with corrections():
        if args.adapter is None:
            raise ValueError("--adapter is missing; expected a PEFT folder, or a run's")
        if args.output.exists():
            raise FileExistsError(f"--output {args.output} exists; expected a folder to be made")
        folder = base_folder(args)
        model = adapted_model(args, folder)
        if model.lm_head is None and isinstance(model.model.embed_tokens, jax_dora.DoRALayer):
            raise NotImplementedError(
                f"--adapter {args.adapter} adapts the embedding, to which this model's head is "
                "tied; expected an adapter without it: PEFT leaves the head as it is, and a merged "
                "folder of a tied model has one array for both"
            )
        merged, report = jax_dora.merge_dora(model, return_report=True)
        save_model(merged, args.output, read_config(folder), tokenizer_from=folder)
    print(f"The merged model is in {args.output}; what rounding cost:\n{report}")
    return 0
