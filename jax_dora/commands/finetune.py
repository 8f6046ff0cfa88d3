"""Fine-tunes a Llama, Mistral or Qwen with DoRA: examples in, an adapter out.

    jax-dora finetune --model FOLDER --data FILE.jsonl --rank 384 --output RUN
    jax-dora finetune --tiny --output RUN        # its own model and data, on a laptop

The model is a Hugging Face folder (config.json, safetensors, tokenizer.json). An example of the
data is {"messages": ...}, {"prompt": ..., "completion": ...}, {"instruction": ..., "output": ...}
or {"text": ...}, in JSON Lines, a JSON list, parquet, or a folder that datasets wrote. RUN gets
checkpoints, metrics.jsonl, a figure of the losses and, at the end, the adapter as a PEFT folder;
with --eval-data the best one so far, and with --merge the merged model as a Hugging Face folder.
Ctrl-C saves; --resume takes up where a run has stopped, and comes to the same result bit for bit;
more --steps prolong the run. On several GPUs, --mesh says how they share the work; of several
processes, each is started with --coordinator.
"""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from dora_common.disk import locked
from jax_dora.commands.flags import (
    UsageError,
    add_formats,
    corrections,
    folder,
    mesh,
    not_negative,
    pattern,
    positive,
    rate,
    whole,
)
from jax_dora.finetune import processes, tiny
from jax_dora.finetune.estimate import report
from jax_dora.finetune.plan import Plan
from jax_dora.finetune.run import Run


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model and data").add_argument
    add("--model", type=Path, help="a Hugging Face folder")
    add("--tiny", action="store_true", help="make a small model, and data unless --data is given")
    add("--data", type=Path, help="what to train on")
    add("--eval-data", type=Path, help="what to evaluate on")
    add("--output", type=folder, default=Path("finetuned"), help="folder of the run (%(default)s)")
    length = whole(1, 2**24)
    add("--length", type=length, default=1024, help="tokens of a packed row (%(default)s)")
    add_formats(add, activations=True)

    add = parser.add_argument_group("devices").add_argument
    add("--mesh", type=mesh, help="dp=N,fsdp=N,tp=N of all devices, or auto; without it, one")
    add("--coordinator", help="HOST:PORT of the first of several processes, or auto")
    add("--processes", type=whole(1), help="how many there are; auto finds out")
    add("--process", type=whole(0), help="which one this is, from 0; auto finds out")

    add = parser.add_argument_group("adapter").add_argument
    add("--rank", type=whole(1, 2**20), default=64, help="columns of A (%(default)s)")
    add("--alpha", type=positive, help="half the rank by default")
    add("--rslora", action="store_true", help="scale by alpha/sqrt(rank)")
    add("--dropout", type=rate, default=0.0, help="of the adapter's input (%(default)s)")
    target = "model/layers/.*_proj"
    add("--target", type=pattern, default=target, help="regular expression (%(default)s)")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=whole(1), help="optimizer steps; those of --epochs by default")
    add("--epochs", type=positive, default=1.0, help="times through the data (%(default)s)")
    add("--batch", type=whole(1, 2**20), default=1, help="rows of a micro-batch (%(default)s)")
    add(
        "--accumulate",
        type=whole(1, 2**20),
        default=8,
        help="micro-batches of a step (%(default)s)",
    )
    add("--learning-rate", type=positive, default=1e-4, help="its highest (%(default)s)")
    schedules = ("cosine", "linear", "constant")
    add("--schedule", choices=schedules, default="cosine", help="after warmup (%(default)s)")
    add("--warmup", type=whole(0), default=0, help="steps (%(default)s)")
    add("--weight-decay", type=not_negative, default=0.0, help="of A and B (%(default)s)")
    add("--clip", type=positive, default=1.0, help="global norm of the gradient (%(default)s)")
    add("--unroll", action="store_true", help="layers apart: faster, and longer to compile")
    seed = whole(0, 2**32 - 1)
    add("--seed", type=seed, default=0, help="of adapter, data order and dropout (%(default)s)")

    add = parser.add_argument_group("what is kept").add_argument
    add("--resume", action="store_true", help="go on from the last checkpoint in the output")
    add("--checkpoint-every", type=whole(1), default=50, help="steps (%(default)s)")
    add("--keep", type=whole(1), default=3, help="so many checkpoints (%(default)s)")
    add("--eval-every", type=whole(1), help="steps; 50 by default")
    add("--patience", type=whole(1), help="stop after so many evaluations without a lower loss")
    add("--samples", type=whole(0), default=3, help="prompts to answer at the end (%(default)s)")
    add("--tensorboard", action="store_true", help="write TensorBoard's files too")
    add("--dry-run", action="store_true", help="tell what the run would take, and stop")
    add("--merge", type=folder, help="write the merged model to this Hugging Face folder")


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit status."""
    with corrections():
        processes.join(args.coordinator, args.processes, args.process)
    console = Console(quiet=not processes.is_first())
    lifeline, is_whole = processes.lifeline(args.coordinator)
    if not is_whole:
        console.print("The processes cannot reach the first on a port of its own choice; whether")
        console.print("one of them is killed is known when JAX notices, after a minute or more")
    with lifeline.held(), _held(args.output):
        with corrections():
            # But for where files lie, which may differ.
            own = ("run", "coordinator", "process")
            flags = {name: one for name, one in vars(args).items() if name not in own}
            processes.compare({n: isinstance(one, Path) or one for n, one in flags.items()})
        with corrections(), _tiny(args):
            plan = Plan(args, console)
            console.print(report(plan))
            if args.dry_run:
                return 0
            one = Run(plan)
            one.take_up()
            lifeline.advice = one.way_on
        try:
            return one.train()
        except (Exception, KeyboardInterrupt) as error:
            error.add_note(one.way_on())
            raise


@contextlib.contextmanager
def _held(output: Path) -> Iterator[None]:
    """Makes the run's folder, and holds it against another run."""
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            output.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(output, wait=False))
            except BlockingIOError:
                raise UsageError(
                    f"--output {output} is in use by another run; wait for it, or choose another"
                ) from None

        with corrections():
            processes.first_does(hold)
        yield


@contextlib.contextmanager
def _tiny(args: argparse.Namespace) -> Iterator[None]:
    """Makes what --tiny asks for, which goes again where the run cannot begin."""
    with contextlib.ExitStack() as stack:
        if args.tiny:
            made = tiny.made(args.output, data=args.data is None)
            processes.first_does(lambda: stack.enter_context(made))
        yield
