"""The levels of `python -m benchmarks`: what each measures, with the settings that it is asked for.

What a level imports it imports when it runs: its programs' settings have to be made before.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

type Measure = Callable[[argparse.Namespace, str, Any], bool]


# Which levels read an option. Others refuse it: it would change nothing.
READ_BY = {
    "only": (
        *("ops", "layer", "sizes", "model", "tune", "quantised", "bank", "bank --torch", "serve"),
        *("serve --torch", "step --table", "against"),
    ),
    "seconds": (
        *("sizes", "scale", "quantised", "bank", "serve", "against", "step", "step --table"),
        *("step --torch", "scale --torch", "serve --torch", "bank --torch"),
    ),
    "layers": (
        *("scale", "bank", "serve", "step --table"),
        *("step --torch", "scale --torch", "serve --torch"),
    ),
    "rank": ("step", "step --torch", "scale --torch"),
    **dict.fromkeys(("hidden", "tokens"), ("scale", "step --torch", "scale --torch")),
    **dict.fromkeys(
        ("model", "ranks", "layouts", "axes", "devices", "rounds", "threads"), ("scale",)
    ),
}


class Level(NamedTuple):
    """What a level measures, in words, and how, by itself and with --torch: of the options, the
    device and a console, returning whether all that was timed is correct."""

    told: str
    measure: Measure
    with_torch: Measure | None = None


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
    return _rows(options, device, console, bank.measure(settings), bank.line)


def _torch_bank(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import torch_bank

    rows = torch_bank.measure(_settings(options, torch_bank), device)
    return _rows(options, device, console, rows, torch_bank.line)


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


def _sizes(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import sizes

    rows = sizes.measure(_settings(options, sizes), device)
    return _rows(options, device, console, rows, sizes.line)


def _quality(options: argparse.Namespace, device: str, console: Any) -> bool:
    from benchmarks import quality

    settings = quality.TINY if options.quick else quality.Settings()
    return _rows(options, device, console, quality.measure(settings), quality.line)


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


LEVELS = {
    "ops": Level(
        "the public operators of both packages over shapes, beside a copy, PEFT and the paper's",
        _measure,
    ),
    "layer": Level("one adapted projection, forward and backward, beside LoRA and PEFT", _measure),
    "sizes": Level("one layer at the sizes that models have, and of decoding", _sizes),
    "model": Level("inference and gradient of a decoder of Qwen3-8B's dimensions", _measure),
    "tune": Level("each Mosaic kernel with candidate launch configs, beside XLA", _measure),
    "scale": Level(
        "a decoder on several devices: base, LoRA and DoRA, and what they send", _scale, _torch_step
    ),
    "quantised": Level(
        "norm, projections and whole steps over quantised kernels, beside bf16", _quantised
    ),
    "step": Level(
        "an optimizer step of Llama 3 8B's dimensions, by what is kept in memory",
        _step,
        _torch_step,
    ),
    "quality": Level(
        "what quantising costs an encoder and a decoder, and adapters trained over it", _quality
    ),
    "serve": Level(
        "the server's engine against the number of adapters: base, LoRA and DoRA",
        _serve,
        _torch_serve,
    ),
    "bank": Level(
        "many adapters in one batch of Llama 3 8B's projections, and loading one",
        _bank,
        _torch_bank,
    ),
    "against": Level(
        "layers and a small model of this checkout and another one, in turns", _compare
    ),
}
