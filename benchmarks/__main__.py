"""Measures one level and writes JSON, a table and figures.

    python -m benchmarks ops|layer|model|tune --out DIR [--only PATTERN …] [--quick] [--device cpu]
    python -m benchmarks tune --ops REPORT --out DIR

Level `tune` writes a tuning table too, DIR/<device kind>.json; with --ops it measures nothing and
derives the table from reports of the levels `ops` and `tune`.

Exits 1 if anything that was timed is not correct, or failed; speed-ups of it are withheld.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
# What is left of ten minutes when a process has started and a report is drawn.
MODEL_SECONDS = 560.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure one level; write JSON, tables and figures.",
    )
    parser.add_argument("level", choices=("ops", "layer", "model", "tune"))
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and figures")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few steps")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="measure only what begins so, such as 'norm*jax'; repeatable",
    )
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        choices=("inference", "gradient", "accumulation"),
        help="level model: measure only this; repeatable",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=MODEL_SECONDS,
        help="level model: start no variant, and stop a running one, after this long",
    )
    parser.add_argument("--commit", help="the commit, where git cannot tell")
    parser.add_argument(
        "--ops",
        action="append",
        default=[],
        type=Path,
        metavar="REPORT",
        help="level tune: derive the table from this report, measure nothing; repeatable",
    )
    options = parser.parse_args(arguments)
    if options.ops:
        if options.level != "tune":
            parser.error("--ops belongs to the level tune")
        return _derive(parser, options.ops, options.out)

    # Both frameworks allocate on the one card: JAX must not take most of it at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch
    from rich.console import Console

    from benchmarks import clock, figures, table, tune
    from benchmarks.environment import card, environment
    from benchmarks.report import Report

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and torch sees no GPU; use --device cpu to try the code")
    real = device == "cuda" and not options.quick
    if not real and options.out.resolve().is_relative_to(RESULTS.resolve()):
        parser.error(f"--out is {options.out}; a quick or CPU run measures nothing worth keeping")
    if device == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")

    console = Console(width=None if sys.stdout.isatty() else 160)
    report = Report(
        options.level,
        environment(device, options.commit),
        wall_only=device == "cpu",
        quick=options.quick,
    )
    if options.level == "model":
        from benchmarks import model

        model.run(
            report,
            device,
            options.quick,
            tuple(options.only),
            tuple(options.task),
            options.seconds,
            options.out,
            console,
        )
    else:
        from benchmarks import layer, ops
        from benchmarks.measure import Bench, ceilings, measure_all

        bench = Bench(
            device,
            clock.DeviceClock() if device == "cuda" else None,
            clock.QUICK if options.quick else clock.Effort(),
            tuple(options.only),
        )
        if bench.clock is not None:
            report.ceilings = ceilings(bench)
        level = {"ops": ops, "layer": layer, "tune": tune}[options.level]
        measure_all(bench, report, level.works(device, options.quick), options.out, console)
    if device == "cuda":
        # Clocks rise under load: those of the start say what the card rested at.
        report.environment |= {f"{name} after": value for name, value in card().items()}
        report.write(options.out)
    table.show(report, options.out, console)
    if options.level == "tune":
        tune.write_table({"tune.json": report.as_dict()}, options.out, console)
    else:
        figures.draw(report, options.out)
    return 0 if report.passed else 1


def _derive(parser: argparse.ArgumentParser, reports: list[Path], folder: Path) -> int:
    from rich.console import Console

    from benchmarks import tune

    try:
        tune.write_table(tune.read_reports(reports), folder, Console())
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
