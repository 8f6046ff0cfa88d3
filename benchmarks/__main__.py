"""Measures one level; prints a line a measurement and writes DIR/<level>.jsonl, line by line.

    python -m benchmarks LEVEL [--out DIR] [--seconds S] [--quick] …
    python -m benchmarks step [--table]
    python -m benchmarks step|scale|quantised|bank|serve --torch
    python -m benchmarks against CHECKOUT

`ops` measures the operators, `layer` one projection beside LoRA and PEFT, `sizes` one layer of the
widths that models have and of few rows, `model` a decoder of Qwen3-8B's dimensions, `tune` the
kernels with candidate launch configs, `step` a whole optimizer step of Llama 3 8B's dimensions by
what it keeps or part by part, `bank` many adapters in one batch of its projections, `quantised`
kernels and steps over quantised bases, `quality` what these bases cost a model's results, `serve`
the server's engine, `scale` a decoder on several devices, and `against` layers and a model with
this checkout and with another one in turns. With --torch it is torch_dora that is measured, beside
PEFT; the docstring of each level's module says what its rows are.

A level is a module with `Settings`, those of a quick run `TINY`, and `measure`, which yields rows;
or one whose `works` are checked and timed by `benchmarks.measure`. It may have `refuses`, why its
settings cannot be, `facts` for the header, and a `summary`. An option sets the field of its name.
Exits 1 if anything that was timed is not correct, or failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# A level's module, and its file of results, is named after it: step_torch for "step --torch".
LEVELS = (
    "ops",
    "layer",
    "sizes",
    "model",
    "tune",
    "step",
    "step --table",
    "step --torch",
    "against",
    "scale",
    "scale --torch",
    "quantised",
    "quantised --torch",
    "quality",
    "bank",
    "bank --torch",
    "serve",
    "serve --torch",
)
# Flags that set a field of a level's settings, where they are given.
FIELDS = ("checkout", "only", "layers", "rank", "model", "ranks", "layouts", "axes")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure one level; print lines, write results."
    )
    made.add_argument("level", choices=[name for name in LEVELS if " " not in name])
    made.add_argument("checkout", nargs="?", type=Path, help="level against: the other one")
    made.add_argument("--out", type=Path, help="a .jsonl file, or a folder for <level>.jsonl")
    made.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    made.add_argument("--quick", action="store_true", help="tiny shapes and few steps")
    made.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="measure only what begins so, such as 'norm*jax' or 'model gradient*jax DoRA'",
    )
    made.add_argument("--seconds", type=float, help="start nothing after this long")
    made.add_argument("--torch", action="store_true", help="torch_dora beside PEFT")
    made.add_argument("--table", action="store_true", help="each part of a step, and without it")
    made.add_argument("--layers", type=int, help="of the decoder")
    made.add_argument("--rank", type=int, help="of the adapters")
    scale = made.add_argument_group("level scale")
    scale.add_argument(
        "--model",
        choices=("qwen3", "llama3"),
        help="12 layers of Qwen3-8B's width (the default), or a whole Llama-3-8B",
    )
    scale.add_argument("--ranks", nargs="+", type=int, help="of the adapters; default: 64 384")
    scale.add_argument("--layouts", nargs="+", choices=("tp", "fsdp", "dp", "alone"))
    scale.add_argument("--axes", nargs="+", choices=("auto", "explicit"))
    made.add_argument("--commit", help="the commit, where git cannot tell")
    return made


def main(arguments: list[str] | None = None) -> int:
    parsing = parser()
    options = parsing.parse_args(arguments)
    called = options.level + " --table" * options.table + " --torch" * options.torch
    if called not in LEVELS:
        parsing.error(f"there is no level {called}; expected one of {', '.join(LEVELS)}")
    if options.level in ("bank", "quantised", "serve", "step"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    else:  # Both frameworks allocate on the one card: JAX must not take most of it at once.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parsing.error("--device is cuda, and torch sees no GPU; use --device cpu to try the code")
    real = (device == "cuda" or called == "quality") and not options.quick
    out = options.out
    module = called.replace(" --", "_")
    if out and out.suffix != ".jsonl":
        out = out / f"{module}.jsonl"
    if not real and out and out.resolve().is_relative_to(RESULTS.resolve()):
        parsing.error(f"--out is {out}; a quick or CPU run measures nothing worth keeping")
    if device == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")
        print("There is no GPU here: kernels are interpreted or left out, and times mean nothing.")
        if not options.quick:
            print("Add --quick for tiny shapes; the real ones take hours.")

    from benchmarks import measure, results
    from parity.environment import environment

    level: Any = importlib.import_module(f"benchmarks.{module}")
    if hasattr(level, "works"):
        level, settings = measure, measure.Settings(level.works, options.quick)
    else:
        settings = level.TINY if options.quick else level.Settings()
    for name in FIELDS:
        value = getattr(options, name)
        if value is not None:
            settings = _with(settings, name, tuple(value) if isinstance(value, list) else value)
            if settings is None:
                parsing.error(f"level {called} has no {name}")
    if hasattr(level, "refuses") and (refusal := level.refuses(settings)):
        parsing.error(refusal)
    header = {"kind": getattr(level, "KIND", "measurements"), "level": options.level}
    header |= {"quick": True} if options.quick else {}
    header |= {"environment": environment(device, options.commit, ("peft", "transformers"))}
    header |= level.facts(settings, device) if hasattr(level, "facts") else {}
    writer = results.Writer(out, header) if out else None
    started, rows = time.monotonic(), []
    for row in level.measure(settings, device):
        print(results.shown(row), flush=True)
        rows.append(row)
        if writer:
            writer.add(row)
        if options.seconds is not None and time.monotonic() - started > options.seconds:
            break
    if hasattr(level, "summary"):
        print(level.summary(header, rows))
    return 1 if any(map(results.failed, rows)) else 0


def _with(settings: Any, name: str, value: Any) -> Any:
    """Returns settings with the field of an option, or None if they have none."""
    if name == "layers" and "config" in settings._fields:
        name, config = "config", settings.config
        value = dataclasses.replace(config, num_hidden_layers=value)
    return settings._replace(**{name: value}) if name in settings._fields else None


if __name__ == "__main__":
    sys.exit(main())
