"""Fine-tune a Llama, Mistral or Qwen model with DoRA.

    jax-dora finetune --model FOLDER --data FILE.jsonl --rank 384 --output RUN
    jax-dora finetune --settings FILE.yaml --rank 16
    jax-dora finetune --tiny --output RUN        # makes its own model and data, runs on a laptop

The model is a Hugging Face folder with config.json, safetensors or .bin files, and tokenizer.json.
The data is JSON Lines, a JSON list, CSV, parquet, or a folder written by datasets. A record is
{"messages": ...}, {"conversations": ...}, {"prompt": ..., "completion": ...},
{"instruction": ..., "output": ...} or {"text": ...}; --columns names fields that have other names.
Several files, as in --data A B or --data A --data B, are read one after the other.

RUN gets checkpoints, metrics.jsonl, a figure of the losses and, at the end, the adapter as a PEFT
folder, with --eval-data also that with the lowest evaluation loss.

Ctrl-C saves a checkpoint and stops. --resume continues the run, with the same result, bit for bit,
as without the stop; with more --steps it extends a finished one. With several processes, start each
with --coordinator.
"""

import argparse
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_dora.lm.commands.flags import (
    INTERRUPTED,
    add_end_token,
    add_formats,
    add_setting,
    columns,
    in_domain,
    make_settings,
    mesh,
    usage_errors,
    with_flag_names,
)
from jax_dora.lm.domains import integers
from jax_dora.lm.finetune import Settings, processes, tiny
from jax_dora.lm.finetune.output import locked_output
from jax_dora.lm.finetune.plan import Plan
from jax_dora.lm.finetune.report import report
from jax_dora.lm.finetune.run import Run
from jax_dora.lm.models.sharding import AXES


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    # Settings parses paths, since Path would take an empty one for the current folder.
    files: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "FILE"}
    folder = {"metavar": "FOLDER"}

    def group(title: str) -> tuple[Any, Any]:
        add = parser.add_argument_group(title).add_argument
        return add, functools.partial(add_setting, add, Settings)

    add, setting = group("model and data")
    help_text = "YAML file of flags without dashes, such as rank: 16; flags given here replace its"
    add("--settings", type=Path, metavar="FILE", help=help_text)
    setting("model", required=False, **folder)
    add("--tiny", action="store_true", help="make a tiny model, and its data without --data")
    setting("data", required=False, **files)
    setting("eval_data", **files)
    setting("columns", type=columns, metavar="FIELD=NAME,...")
    setting("output", **folder)
    setting("length")
    setting("split", nargs="?", const="all")
    add_formats(add, activations=True)
    setting("bwd_qtype", "--gradients")
    add_end_token(add)

    add, setting = group("devices")
    setting("mesh", type=mesh(*AXES), metavar="AXIS=N,...")
    add("--coordinator", metavar="ADDRESS", help="HOST:PORT of the first process, or auto")
    count, index = in_domain(integers(1)), in_domain(integers(0))
    add("--processes", type=count, metavar="N", help="number of processes; not with auto")
    add("--process", type=index, metavar="N", help="number of this process, from 0; not with auto")

    _, setting = group("adapter")
    setting("from_adapter", **folder)
    setting("method")
    setting("rank")
    setting("alpha")
    setting("use_rslora", "--rslora")
    setting("dropout")
    setting("target", metavar="REGEX")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    setting("layers", type=in_domain(integers(0)), metavar="N", **several)
    setting("modules_to_save", metavar="NAME", **several)

    _, setting = group("training")
    for name in ("steps", "epochs", "batch", "accumulate", "learning_rate", "optimizer"):
        setting(name)
    for name in ("schedule", "final_rate", "warmup", "weight_decay", "clip", "unroll", "seed"):
        setting(name)

    add, setting = group("checkpoints and results")
    for name in ("resume", "checkpoint_every", "keep", "eval_every", "patience", "samples"):
        setting(name)
    setting("report_to")
    add("--dry-run", action="store_true", help="print an estimate of the run and stop")
    setting("merge", **folder)


def run(args: argparse.Namespace) -> int:
    """Trains, and returns the exit status."""
    with usage_errors():
        settings = _settings(args)
        processes.join(args.coordinator, args.processes, args.process)
    console = _Console(args, quiet=not processes.is_first())
    with contextlib.ExitStack() as stack:
        with usage_errors():
            stack.enter_context(locked_output(settings.output))
            processes.check_equal({"tiny": args.tiny, "dry_run": args.dry_run})
            with _tiny_inputs(args):
                plan = Plan(settings, console)
                console.print(report(plan))
                if args.dry_run:
                    return 0
                finetuning = Run(plan)
        return INTERRUPTED if finetuning.train().is_interrupted else 0


class _Console(Console):
    """A console that prints flags instead of the names of settings."""

    def __init__(self, args: argparse.Namespace, **options: Any) -> None:
        super().__init__(**options)
        self._flags = args.flags

    def print(self, *objects: Any, **options: Any) -> None:
        texts = (with_flag_names(x, self._flags) if isinstance(x, str) else x for x in objects)
        super().print(*texts, **options)


def _settings(args: argparse.Namespace) -> Settings:
    """Returns the settings that the flags give.

    Raises:
      ValueError: a flag is invalid, or needs another one.
    """
    inputs = {"model": args.model, "data": args.data}
    if args.tiny:
        if args.model is not None:
            raise ValueError("--model and --tiny are both given; expected one of them")
        output = Path(args.output)
        inputs = {"model": output / tiny.MODEL, "data": args.data or [output / tiny.DATA]}
    if None in inputs.values():
        raise ValueError("--model or --data is missing; pass both, or --tiny, which makes them")
    return make_settings(Settings, argparse.Namespace(**vars(args) | inputs))


@contextlib.contextmanager
def _tiny_inputs(args: argparse.Namespace) -> Iterator[None]:
    """Makes the inputs for --tiny, and removes them again if the run cannot start."""
    with contextlib.ExitStack() as stack:
        if args.tiny:
            inputs = tiny.make_tiny_inputs(Path(args.output), data=args.data is None)
            processes.run_on_first(lambda: stack.enter_context(inputs))
        yield
