"""Measures one level; prints tables and writes DIR/<level>.jsonl, line by line.

    python -m benchmarks ops|layer|model|tune [--out DIR] [--only PATTERN …] [--quick]
    python -m benchmarks layer|model --against CHECKOUT

`ops` measures the operators, `layer` one projection beside LoRA and PEFT, `model` a decoder of
Qwen3-8B's dimensions, `tune` the kernels with candidate launch configs. `--against` measures this
checkout and another one in turns and prints the ratios of their times.

Exits 1 if anything that was timed is not correct, or failed; ratios of it are withheld.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# What is left of ten minutes when a process has started.
MODEL_SECONDS = 560.0
MEASURES = {
    "ops": "the public operators of both packages over shapes, beside a copy, PEFT and the paper's",
    "layer": "one adapted projection, forward and backward, beside LoRA, the base and PEFT",
    "model": "inference and gradient of a decoder, each variant in a process of its own",
    "tune": "each Mosaic kernel with candidate launch configs, beside XLA",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure one level; print tables, write results."
    )
    made.add_argument("level", choices=tuple(MEASURES))
    made.add_argument("--out", type=Path, metavar="DIR", help="folder for <level>.jsonl")
    made.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    made.add_argument("--quick", action="store_true", help="tiny shapes and few steps")
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="measure only what begins so, such as 'norm*jax', or 'jax DoRA' of a model",
    )
    made.add_argument(
        "--task",
        action="append",
        default=[],
        choices=("inference", "gradient", "step", "accumulation"),
        help="level model: measure only this; repeatable",
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=MODEL_SECONDS,
        help="level model and --against: start nothing, and stop what runs, after this long",
    )
    made.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="measure it too, in turns, and compare"
    )
    made.add_argument("--commit", help="the commit, where git cannot tell")
    return made


def main(arguments: list[str] | None = None) -> int:
    parsing = parser()
    options = parsing.parse_args(arguments)
    if options.against and options.level not in ("layer", "model"):
        parsing.error("--against compares the levels layer and model")
    # Both frameworks allocate on the one card: JAX must not take most of it at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch
    from rich.console import Console

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parsing.error("--device is cuda, and torch sees no GPU; use --device cpu to try the code")
    real = device == "cuda" and not options.quick
    out = options.out
    if not real and out and out.resolve().is_relative_to(RESULTS.resolve()):
        parsing.error(f"--out is {out}; a quick or CPU run measures nothing worth keeping")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"{options.level}: {MEASURES[options.level]}, on {device}", highlight=False)
    if device == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")
        console.print(
            "There is no GPU here: kernels are interpreted or left out, and times mean nothing. "
            + ("" if options.quick else "Add --quick for tiny shapes; the real ones take hours.")
        )
    return 0 if _measure(options, device, console) else 1


def _measure(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import against, layer, model, ops, tune
    from benchmarks.environment import describe
    from benchmarks.measure import Bench, ceilings, measure_all
    from benchmarks.report import Ceilings, Report
    from benchmarks.worker import Deadline, Worker

    level, quick, only = options.level, options.quick, tuple(options.only)
    report = Report(level, describe(device, options.commit), console=console)
    header: dict[str, Any] = {"quick": True} if quick else {}
    if options.against:
        if refusal := against.check(options.against):
            parser().error(refusal)
        header["against"] = describe(device, root=options.against)["commit"]
    spec = {"level": level, "device": device, "quick": quick, "only": only}
    bench = None
    if device == "cuda" and not options.against:
        if level == "model":
            with Worker(spec | {"kind": {"tasks": ()}}, Deadline(options.seconds)) as worker:
                report.ceilings = Ceilings(**worker.ask("ceilings"))
        else:
            bench = Bench.on(device, quick, only)
            report.ceilings = ceilings(bench)
    if options.out:
        report.begin(options.out / f"{level}.jsonl", **header)
    if options.against:
        against.run(report, options.against, spec, tuple(options.task), options.seconds)
        return report.passed
    if level == "model":
        model.run(report, device, quick, list(model.chosen(only, options.task)), options.seconds)
    else:
        works = {"ops": ops, "layer": layer, "tune": tune}[level].works(device, quick)
        measure_all(bench or Bench.on(device, quick, only), report, works)
    report.show()
    return report.passed


if __name__ == "__main__":
    sys.exit(main())
