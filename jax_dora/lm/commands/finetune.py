"""Fine-tune a Llama, Mistral or Qwen model with DoRA.

    jax-dora finetune --model FOLDER --data FILE.jsonl --rank 384 --output RUN
    jax-dora finetune --tiny --output RUN        # makes its own model and data, runs on a laptop

The model is a Hugging Face folder with config.json, safetensors files and tokenizer.json. The data
is JSON Lines, a JSON list, parquet, or a folder written by datasets. A record is {"messages": ...},
{"prompt": ..., "completion": ...}, {"instruction": ..., "output": ...} or {"text": ...}. Several
files, as in --data A B or --data A --data B, are read one after the other.

RUN gets checkpoints, metrics.jsonl, a figure of the losses and, at the end, the adapter as a PEFT
folder. With --eval-data it also gets the adapter with the lowest evaluation loss. --merge also
writes the merged model as a Hugging Face folder.

Ctrl-C saves a checkpoint and stops. --resume continues the run; the result is the same, bit for
bit, as without the stop. With more --steps, --resume extends a finished run. --mesh splits the work
among several GPUs. With several processes, start each process with --coordinator.
"""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from dora_common.disk import locked
from jax_dora.lm.commands.flags import (
    AXES,
    UsageError,
    add_end_token,
    add_formats,
    folder,
    integer,
    mesh,
    not_negative,
    pattern,
    positive,
    rate,
    usage_errors,
)
from jax_dora.lm.finetune import processes, tiny
from jax_dora.lm.finetune.plan import Plan
from jax_dora.lm.finetune.report import report
from jax_dora.lm.finetune.run import Run


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    count = integer(1)
    add = parser.add_argument_group("model and data").add_argument
    add("--model", type=Path, metavar="FOLDER", help="Hugging Face folder of the base model")
    add("--tiny", action="store_true", help="make a tiny model, and its data without --data")
    files: dict[str, Any] = {"type": Path, "nargs": "+", "action": "extend", "metavar": "FILE"}
    add("--data", **files, help="examples to train on, in one or more files")
    add("--eval-data", **files, help="examples to evaluate on, in one or more files")
    output = Path("finetuned")
    add("--output", type=folder, default=output, metavar="FOLDER", help="folder of the run")
    length = integer(1, 2**24)
    add("--length", type=length, default=1024, metavar="N", help="tokens in a packed row")
    add(
        "--split",
        choices=("text", "all", "none"),
        nargs="?",
        const="all",
        default="text",
        help="records that continue in further rows if they are longer than a row: those with "
        '"text", all, or none; others are truncated',
    )
    add_formats(add, activations=True)
    add_end_token(add, more="; completions end with the first")

    add = parser.add_argument_group("devices").add_argument
    add(
        "--mesh",
        type=mesh(*AXES),
        help="use all devices, as dp=N,fsdp=N,tp=N or auto; one device by default",
    )
    add("--coordinator", metavar="ADDRESS", help="HOST:PORT of the first process, or auto")
    add("--processes", type=count, metavar="N", help="number of processes; not with auto")
    add(
        "--process",
        type=integer(0),
        metavar="N",
        help="number of this process, from 0; not with auto",
    )

    add = parser.add_argument_group("adapter").add_argument
    small = integer(1, 2**20)
    add("--rank", type=small, default=64, metavar="N", help="rank of the adapter")
    add(
        "--alpha",
        type=positive,
        metavar="X",
        help="numerator of the scale alpha/rank; rank/2 by default",
    )
    add("--rslora", action="store_true", help="use the scale alpha/sqrt(rank) instead")
    add(
        "--dropout",
        type=rate,
        default=0.0,
        metavar="X",
        help="dropout rate of adapter inputs; an embedding's adapter has none",
    )
    target = "model/layers/.*_proj"
    add(
        "--target",
        type=pattern,
        default=target,
        metavar="REGEX",
        help="regular expression for the paths of layers to adapt",
    )

    training = parser.add_argument_group("training")
    add = training.add_mutually_exclusive_group().add_argument
    add("--steps", type=count, metavar="N", help="optimizer steps; set by --epochs by default")
    add("--epochs", type=positive, default=1.0, metavar="X", help="passes over the data")
    add = training.add_argument
    add("--batch", type=small, default=1, metavar="N", help="rows in a micro-batch")
    add("--accumulate", type=small, default=8, metavar="N", help="micro-batches in a step")
    add("--learning-rate", type=positive, default=1e-4, metavar="X", help="peak learning rate")
    schedules = ("cosine", "linear", "constant")
    add("--schedule", choices=schedules, default="cosine", help="learning rate after warmup")
    add("--warmup", type=integer(0), default=0, metavar="N", help="warmup steps")
    add(
        "--weight-decay",
        type=not_negative,
        default=0.0,
        metavar="X",
        help="weight decay of A and B; magnitudes have none",
    )
    add("--clip", type=positive, default=1.0, metavar="X", help="maximum norm of the gradient")
    add("--unroll", action="store_true", help="unroll the layers: faster steps, longer compilation")
    add(
        "--seed",
        type=integer(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="random seed of the adapter, data order and dropout",
    )

    add = parser.add_argument_group("checkpoints and results").add_argument
    add("--resume", action="store_true", help="continue from the latest checkpoint in --output")
    add("--checkpoint-every", type=count, default=50, metavar="N", help="steps between checkpoints")
    add("--keep", type=count, default=3, metavar="N", help="number of checkpoints to keep")
    add("--eval-every", type=count, metavar="N", help="steps between evaluations; 50 by default")
    add(
        "--patience",
        type=count,
        metavar="N",
        help="stop after N evaluations without a lower loss",
    )
    add(
        "--samples",
        type=integer(0),
        default=3,
        metavar="N",
        help="prompts of the data to complete at the end",
    )
    add("--tensorboard", action="store_true", help="also write TensorBoard files")
    add("--dry-run", action="store_true", help="print an estimate of the run and stop")
    add("--merge", type=folder, metavar="FOLDER", help="also write the merged model to this folder")


def run(args: argparse.Namespace) -> int:
    """Trains, and returns the exit status."""
    with usage_errors():
        processes.join(args.coordinator, args.processes, args.process)
    console = Console(quiet=not processes.is_first())
    monitor, is_connected = processes.monitor_peers(args.coordinator)
    if not is_connected:
        console.print(
            "Warning: some processes cannot reach a free port of the first process. If a process "
            "is killed, the others will notice only after a minute or more.",
            soft_wrap=True,
        )
    with monitor.reporting(), _locked_output(args.output):
        with usage_errors():
            # Paths can differ between processes.
            own = ("run", "coordinator", "process")
            flags = {name: value for name, value in vars(args).items() if name not in own}
            processes.check_equal({name: _without_paths(value) for name, value in flags.items()})
        with usage_errors(), _tiny_inputs(args):
            plan = Plan(args, console)
            console.print(report(plan))
            if args.dry_run:
                return 0
            finetuning = Run(plan)
            finetuning.resume()
            monitor.advice = finetuning.how_to_resume
        try:
            return finetuning.train()
        except (Exception, KeyboardInterrupt) as error:
            error.add_note(finetuning.how_to_resume())
            raise


def _without_paths(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return isinstance(value, Path) or value


@contextlib.contextmanager
def _locked_output(output: Path) -> Iterator[None]:
    """Makes the run's folder, and locks it against other runs."""
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            output.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(output, wait=False))
            except BlockingIOError:
                raise UsageError(
                    f"--output {output} is in use by another run; wait for it, or choose another "
                    "folder"
                ) from None

        with usage_errors():
            processes.run_on_first(lock)
        yield


@contextlib.contextmanager
def _tiny_inputs(args: argparse.Namespace) -> Iterator[None]:
    """Makes the inputs for --tiny, and removes them again if the run cannot start."""
    with contextlib.ExitStack() as stack:
        if args.tiny:
            inputs = tiny.make_tiny_inputs(args.output, data=args.data is None)
            processes.run_on_first(lambda: stack.enter_context(inputs))
        yield
