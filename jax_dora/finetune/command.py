"""Fine-tunes a Llama or Qwen with DoRA: prompts and completions in, an adapter out.

    python -m jax_dora.finetune --model FOLDER --data FILE.jsonl --rank 384 --output RUN
    python -m jax_dora.finetune --tiny --output RUN        # its own model and data, on a laptop

The model is a Hugging Face folder (config.json, safetensors, tokenizer.json); each line of the data
is {"prompt": ..., "completion": ...}, with the loss on the completion, or {"text": ...}. RUN gets
checkpoints, metrics.jsonl and, at the end, the adapter as a PEFT folder and, if asked for, the
merged model as a Hugging Face folder. Ctrl-C saves; --resume takes up where a run has stopped, and
comes to the same result bit for bit.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from jax_dora.finetune.guard import DivergedError
from jax_dora.finetune.run import Run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("model and data").add_argument
    add("--model", type=Path, help="a Hugging Face folder")
    add("--tiny", action="store_true", help="make a small model, and data unless --data is given")
    add("--data", type=Path, help="JSONL to train on")
    add("--eval-data", type=Path, help="JSONL to evaluate on")
    add("--output", type=Path, default=Path("finetuned"), help="folder of the run (%(default)s)")
    add("--length", type=int, default=1024, help="tokens of a packed row (%(default)s)")
    add("--dtype", choices=("bfloat16", "float32"), help="of the base; config.json's by default")

    add = parser.add_argument_group("adapter").add_argument
    add("--rank", type=int, default=64, help="%(default)s")
    add("--alpha", type=float, help="half the rank by default")
    add("--rslora", action="store_true", help="scale by alpha/sqrt(rank)")
    add("--dropout", type=float, default=0.0, help="of the adapter's input (%(default)s)")
    add("--target", default="model/layers/.*_proj", help="regular expression (%(default)s)")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, help="optimizer steps; those of --epochs by default")
    add("--epochs", type=float, default=1.0, help="%(default)s")
    add("--batch", type=int, default=1, help="rows of a micro-batch (%(default)s)")
    add("--accumulate", type=int, default=8, help="micro-batches of a step (%(default)s)")
    add("--learning-rate", type=float, default=1e-4, help="%(default)s")
    add("--schedule", choices=("cosine", "linear", "constant"), default="cosine")
    add("--warmup", type=int, default=0, help="steps (%(default)s)")
    add("--weight-decay", type=float, default=0.0, help="%(default)s")
    add("--clip", type=float, default=1.0, help="global norm of the gradient (%(default)s)")
    add("--seed", type=int, default=0, help="of adapter, data order and dropout (%(default)s)")

    add = parser.add_argument_group("what is kept").add_argument
    add("--resume", action="store_true", help="go on from the last checkpoint in the output")
    add("--checkpoint-every", type=int, default=50, help="steps (%(default)s)")
    add("--keep", type=int, default=3, help="so many checkpoints (%(default)s)")
    add("--eval-every", type=int, default=50, help="steps (%(default)s)")
    add("--merge", type=Path, help="write the merged model to this Hugging Face folder")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a run that diverged, 2 for bad input, 130 for Ctrl-C."""
    args = parser().parse_args(argv)
    console = Console()
    try:
        run = Run(args, console)
        run.take_up()
    except (ValueError, OSError, NotImplementedError) as error:
        console.print("[red]Error:[/]", end=" ")
        console.print(str(error), markup=False, soft_wrap=True)
        return 2
    try:
        return run.train()
    except DivergedError as error:
        console.print(
            f"[red]Stopped:[/] {error}.\nThe last good checkpoint is in {args.output}; take it up "
            "with --resume, or start again with a lower --learning-rate.",
            soft_wrap=True,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
