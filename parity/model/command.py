"""The command line of `python -m parity model`."""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from parity import command
from parity.environment import choose_device
from parity.report import Report

DTYPES = {"bf16": ("bfloat16",), "fp32": ("float32",), "both": ("bfloat16", "float32")}


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if every check of every run passed, else 1."""
    parser = command.parser(
        "model",
        "Runs one decoder with one DoRA adapter through Flax and jax_dora, through transformers "
        "and torch_dora, through transformers and PEFT, and densely in fp64, and compares logits "
        "and the adapter's gradients.",
    )
    parser.add_argument("--layers", type=command.positive, help="of every run, in place of its own")
    parser.add_argument("--sequence", type=command.positive, help="tokens of every run")
    parser.add_argument("--dtype", choices=DTYPES, default="both")
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    try:
        from parity.model.execute import execute, free_memory, systems

        import_module("parity.sides.torch.decoder")  # needs transformers and PEFT
    except ModuleNotFoundError as error:
        sys.exit(f"python -m parity model: {error}; pip install 'jax-dora[dev]'")
    from parity.model.sizes import runs
    from parity.model.weights import draw

    start = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {line}", file=sys.stderr, flush=True)

    report = command.report(options, device, "model", ("transformers", "peft"))
    chosen = runs(
        device,
        DTYPES[options.dtype],
        quick=options.quick,
        layers=options.layers,
        tokens=options.sequence,
    )
    for run in chosen:
        say(run.name)
        weights = draw(run, device)
        free = free_memory(weights.tokens.device)
        say("  weights drawn" + ("" if free is None else f", {free:.1f} GiB free"))
        executed = execute(run, weights, systems(run), say)
        _write(report, run, executed)
        say("  compared")
        del weights, executed
        gc.collect()
    return report.finish()


def _write(report: Report, run, executed) -> None:
    """Adds every system's loss, the checks, and how far each pair of systems is apart."""
    from parity.model.checks import judge

    losses = {name: result.loss for name, result in executed.results.items()}
    report.add(
        run.name,
        "loss",
        side=list(losses),
        value=list(losses.values()),
        seconds=[executed.seconds[name] for name in losses],
        free_gib=[executed.free[name] for name in losses],
        run=dataclasses.asdict(run),
    )
    for name, error in executed.errors.items():
        report.add(run.name, "result", side=name, ok=False, note=error)
    pairs, checks = judge(run, executed.results)
    for check in checks:
        report.add(
            run.name,
            check.quantity,
            side=check.systems,
            error=check.value,
            bound=check.allowed,
            ok=check.passed,
            **({"note": check.note} if check.note else {}),
        )
    for pair in pairs:
        found = {k: v for k, v in dataclasses.asdict(pair).items() if v not in (None, {})}
        sides = f"{found.pop('first')}, {found.pop('second')}"
        report.add(run.name, "distance", side=sides, **found)
