"""Measures one level; prints tables and writes DIR/<level>.jsonl, line by line.

    python -m benchmarks ops|layer|model|tune [--out DIR] [--only PATTERN …] [--quick]
    python -m benchmarks step [--table] [--out DIR] [--seconds S] [--quick]
    python -m benchmarks quantised [--out DIR] [--seconds S] [--only WORK …] [--quick]
    python -m benchmarks quality [--out DIR] [--quick]
    python -m benchmarks bank|serve [--layers N] [--only KIND …] [--quick]
    python -m benchmarks scale [--model qwen3|llama3] [--ranks 64 384] [--layouts tp fsdp dp alone]
                               [--axes auto explicit] [--layers N] [--seconds S] [--quick]
    python -m benchmarks step|scale|serve --torch [--layers N] [--rank N] [--quick]
    python -m benchmarks against CHECKOUT [--out DIR] [--only PATTERN …] [--quick]

`ops` measures the operators, `layer` one projection beside LoRA and PEFT, `model` a decoder of
Qwen3-8B's dimensions, `tune` the kernels with candidate launch configs, `step` a whole optimizer
step of Llama 3 8B's dimensions by what it keeps and, with --table, part by part, `bank` many
adapters in one batch of its projections, `quantised` kernels and steps over quantised bases,
`quality` what these bases cost a model's results, `serve` the server's engine, `scale` a decoder on
several devices. `step --torch` and `scale --torch` measure a step of transformers' Llama by
torch_dora and by PEFT, on one GPU, and on all under FSDP2, and `serve --torch` what transformers
answers the same requests with. `against` measures layers and a model with this checkout and with
another one in turns, and prints the ratios of their times.

Exits 1 if anything that was timed is not correct, or failed; ratios of it are withheld.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MEASURES = {
    "ops": "the public operators of both packages over shapes, beside a copy, PEFT and the paper's",
    "layer": "one adapted projection, forward and backward, beside LoRA and PEFT",
    "model": "inference and gradient of a decoder of Qwen3-8B's dimensions",
    "tune": "each Mosaic kernel with candidate launch configs, beside XLA",
    "scale": "a decoder on several devices: base, LoRA and DoRA, and what they send",
    "quantised": "norm, projections and whole steps over quantised kernels, beside bf16",
    "step": "an optimizer step of Llama 3 8B's dimensions, by what is kept in memory",
    "quality": "what quantising costs an encoder and a decoder, and adapters trained over it",
    "serve": "the server's engine against the number of adapters: base, LoRA and DoRA",
    "bank": "many adapters in one batch of Llama 3 8B's projections, and loading one",
    "against": "layers and a small model of this checkout and another one, in turns",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure one level; print tables, write results."
    )
    made.add_argument("level", choices=tuple(MEASURES))
    made.add_argument("checkout", nargs="?", type=Path, help="level against: the other one")
    made.add_argument("--out", type=Path, help="a .jsonl file, or a folder for <level>.jsonl")
    made.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    made.add_argument("--quick", action="store_true", help="tiny shapes and few steps")
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="measure only what begins so, such as 'norm*jax' or 'model gradient*jax DoRA'",
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=420.0,
        help="start nothing after this long; against stops what runs",
    )
    made.add_argument(
        "--torch", action="store_true", help="levels step, scale, serve: torch_dora beside PEFT"
    )
    made.add_argument(
        "--table", action="store_true", help="level step: each part of a step with it and without"
    )
    sizes = made.add_argument_group("levels scale, bank, serve and step")
    for name in ("layers", "rank", "hidden", "tokens"):
        sizes.add_argument(f"--{name}", type=int, help="of the decoder, instead of the usual")
    scale = made.add_argument_group("level scale")
    scale.add_argument(
        "--model",
        choices=("qwen3", "llama3"),
        help="12 layers of Qwen3-8B's width (the default), or a whole Llama-3-8B",
    )
    scale.add_argument("--ranks", nargs="+", type=int, help="of the adapters; default: 64 384")
    scale.add_argument("--layouts", nargs="+", choices=("tp", "fsdp", "dp", "alone"))
    scale.add_argument("--axes", nargs="+", choices=("auto", "explicit"))
    scale.add_argument("--devices", type=int, help="how many of them; default: all")
    scale.add_argument("--rounds", type=int, help="of every program; default: 15")
    scale.add_argument("--threads", type=int, help="programs that compile at a time; default: 8")
    made.add_argument("--commit", help="the commit, where git cannot tell")
    return made


def main(arguments: list[str] | None = None) -> int:
    parsing = parser()
    options = parsing.parse_args(arguments)
    if options.torch and options.level not in ("step", "scale", "serve"):
        parsing.error(f"--torch is for levels step, scale and serve, not {options.level}")
    if options.table and (options.level != "step" or options.torch):
        parsing.error("--table is for level step, without --torch")
    if (options.level == "against") != bool(options.checkout):
        parsing.error("level against, and no other, takes another checkout's folder")
    if options.level in ("bank", "quantised", "serve", "step"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    else:  # Both frameworks allocate on the one card: JAX must not take most of it at once.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch
    from rich.console import Console

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parsing.error("--device is cuda, and torch sees no GPU; use --device cpu to try the code")
    real = (device == "cuda" or options.level == "quality") and not options.quick
    out = options.out
    if out and out.suffix != ".jsonl":
        suffix = "_torch" * options.torch + "_table" * options.table
        options.out = out = out / f"{options.level}{suffix}.jsonl"
    if not real and out and out.resolve().is_relative_to(RESULTS.resolve()):
        parsing.error(f"--out is {out}; a quick or CPU run measures nothing worth keeping")
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(f"{options.level}: {MEASURES[options.level]}, on {device}", highlight=False)
    if device == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")
        console.print(
            "There is no GPU here: kernels are interpreted or left out, and times mean nothing. "
            + ("" if options.quick else "Add --quick for tiny shapes; the real ones take hours.")
        )
    measure = {
        "against": _compare,
        "scale": _scale,
        "step": _step,
        "bank": _bank,
        "quantised": _quantised,
        "quality": _quality,
        "serve": _serve,
    }.get(options.level, _measure)
    if options.torch:
        measure = _torch_serve if options.level == "serve" else _torch_step
    return 0 if measure(options, device, console) else 1


def _measure(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import layer, model, ops, tune
    from benchmarks.measure import Bench, ceilings, measure_all
    from benchmarks.report import Report

    level, quick, only = options.level, options.quick, tuple(options.only)
    report = Report(level, _environment(options, device), console=console)
    bench = Bench.on(device, quick, only)
    if device == "cuda":
        report.ceilings = ceilings(bench)
    if options.out:
        report.begin(options.out, **({"quick": True} if quick else {}))
    if level == "model":
        works = model.works(device, quick, only)
    else:
        works = {"ops": ops, "layer": layer, "tune": tune}[level].works(device, quick)
    measure_all(bench, report, works)
    report.show()
    return report.passed


def _compare(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import against, results

    there = options.checkout
    if refusal := against.check(there):
        parser().error(refusal)
    environment = _environment(options, device)
    header = {"kind": "comparison", "level": "against", "environment": environment}
    # In a folder without a git of its own, git would tell of the folder around it.
    header["against"] = _commit(there) if (there / ".git").exists() else there.name
    writer = results.Writer(options.out, header) if options.out else None
    spec = {"device": device, "quick": options.quick, "only": options.only}
    return against.run(there, spec, options.seconds, writer, console)


def _scale(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import scale
    from benchmarks.model.protocol import Protocol

    name = options.model or "qwen3"
    usual = {"qwen3": Protocol(layers=12, tokens=2048), "llama3": Protocol.llama(tokens=2048)}
    sizes = Protocol.quick() if options.quick else usual[name]
    given = {name: getattr(options, name) for name in ("layers", "hidden", "tokens")}
    sizes = dataclasses.replace(sizes, **{name: size for name, size in given.items() if size})
    settings = scale.Settings(sizes, name, seconds=options.seconds)
    if options.quick:
        settings = settings._replace(rounds=1, ranks=(8,))
    for field in ("layouts", "axes", "ranks"):
        if chosen := getattr(options, field):
            settings = settings._replace(**{field: tuple(chosen)})
    for field in ("rounds", "threads", "devices"):
        if chosen := getattr(options, field):
            settings = settings._replace(**{field: chosen})
    return _rows(options, device, console, scale.measure(settings, device), scale.line)


def _step(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import step, step_table

    if options.table:
        chosen = _settings(options, step_table)
        if options.layers:
            chosen = chosen._replace(layers=options.layers)
        return _rows(options, device, console, step_table.measure(chosen, device), step_table.line)
    settings = step.Settings(seconds=options.seconds, rank=options.rank or 16)
    if options.quick:
        settings = settings._replace(config=step.TINY, shape=(2, 32), rounds=1)
    return _rows(options, device, console, step.measure(settings, device), step.line)


def _torch_step(options: argparse.Namespace, device: str, console: Any) -> bool:
    import torch

    from benchmarks import torch_step

    settings = torch_step.TINY if options.quick else torch_step.Settings()
    given = {name: getattr(options, name) for name in ("layers", "rank", "hidden")}
    settings = settings._replace(**{name: size for name, size in given.items() if size})
    settings = settings._replace(seconds=min(settings.seconds, options.seconds))
    if options.tokens:
        settings = settings._replace(shape=(settings.shape[0], options.tokens))
    count = 0
    if options.level == "scale":
        count = torch.cuda.device_count() if device == "cuda" else 2
    rows = torch_step.measure(settings, device, count)
    return _rows(options, device, console, rows, torch_step.line)


def _bank(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import bank

    settings = _settings(options, bank)
    if options.layers:
        settings = settings._replace(layers=options.layers)
    return _rows(options, device, console, bank.measure(settings, device), bank.line)


def _serve(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import serve

    settings = _settings(options, serve)
    if options.layers:
        config = dataclasses.replace(settings.config, num_hidden_layers=options.layers)
        settings = settings._replace(config=config)
    return _rows(options, device, console, serve.measure(settings, device), serve.line)


def _torch_serve(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import torch_serve

    settings = _settings(options, torch_serve)
    if options.layers:
        settings = settings._replace(model=settings.model._replace(layers=options.layers))
    return _rows(options, device, console, torch_serve.measure(settings, device), torch_serve.line)


def _quantised(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import quantised

    rows = quantised.measure(_settings(options, quantised), device)
    return _rows(options, device, console, rows, quantised.line)


def _quality(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import quality

    settings = quality.TINY if options.quick else quality.Settings()
    return _rows(options, device, console, quality.measure(settings, device), quality.line)


def _settings(options: argparse.Namespace, level: Any) -> Any:
    """Returns a level's settings, with the time and the kinds that are asked for."""
    settings = level.TINY if options.quick else level.Settings()
    if options.only:
        field = "kinds" if "kinds" in settings._fields else "only"
        settings = settings._replace(**{field: tuple(options.only)})
    return settings._replace(seconds=options.seconds)


def _rows(
    options: argparse.Namespace,
    device: str,
    console: Any,
    rows: Iterable[dict[str, Any]],
    line: Callable[[dict[str, Any]], str],
) -> bool:
    from benchmarks import results

    environment = _environment(options, device)
    header = {"kind": "measurements", "level": options.level, "environment": environment}
    writer = results.Writer(options.out, header) if options.out else None
    failed = False
    for row in rows:
        console.print(line(row), highlight=False)
        failed = failed or "failed" in row
        if writer:
            writer.add(row)
    return not failed


def _environment(options: argparse.Namespace, device: str) -> dict[str, str]:
    from parity.environment import environment

    return environment(device, options.commit, ("peft", "transformers"))


def _commit(root: Path) -> str:
    from parity.environment import environment

    return environment("cpu", root=root)["commit"]


if __name__ == "__main__":
    sys.exit(main())
