"""Merge an adapter into its base model, and write the result as a Hugging Face folder.

    jax-dora merge --adapter RUN --output MERGED

Each merged kernel is W + ((g-1)∘W + g∘(s·A B)), computed in fp32 and rounded once to the model's
dtype, or with --quantize to bf16. The rounding errors are printed.
"""

import argparse

import jax_dora
from dora_common.disk import check_can_create
from jax_dora.lm.commands import flags
from jax_dora.lm.commands.flags import add_end_token, usage_errors
from jax_dora.lm.commands.folders import adapted_model, add_model_flags, base_folder, text_settings
from jax_dora.lm.models import read_config, save_model
from jax_dora.lm.models.tokenizer import TOKENIZER


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    add_model_flags(parser)
    add_end_token(parser.add_argument)
    parser.add_argument(
        "--output", type=flags.folder, required=True, metavar="FOLDER", help="folder to create"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the merged model, and returns the exit status."""
    with usage_errors():
        if args.adapter is None:
            raise ValueError(
                "--adapter is missing; expected a PEFT folder, or an output folder of finetune"
            )
        if args.output.exists():
            raise FileExistsError(f"--output {args.output} exists already; expected a new folder")
        check_can_create(args.output, "output")
        folder = base_folder(args)
        config = read_config(folder)
        # A folder of weights alone has nothing to say about text.
        has_texts = (folder / TOKENIZER).is_file() or args.end_tokens
        files = text_settings(args, folder).files(config) if has_texts else {}
        model = adapted_model(args, folder)
        merged, report = jax_dora.merge_dora(model, return_report=True)
        save_model(merged, args.output, config, tokenizer_from=folder, files=files)
    print(f"Saved the merged model to {args.output}. Rounding errors of merging:\n{report}")
    return 0
