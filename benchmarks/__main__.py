"""Measures one level; prints tables and writes DIR/<level>.jsonl, line by line.

    python -m benchmarks ops|layer|model|tune [--out DIR] [--only PATTERN …] [--quick]
    python -m benchmarks step [--table] [--out DIR] [--seconds S] [--quick]
    python -m benchmarks quantised|sizes [--out DIR] [--seconds S] [--only WORK …] [--quick]
    python -m benchmarks quality [--out DIR] [--quick]
    python -m benchmarks bank|serve [--layers N] [--only KIND …] [--quick]
    python -m benchmarks scale [--model qwen3|llama3] [--ranks 64 384] [--layouts tp fsdp dp alone]
                               [--axes auto explicit] [--layers N] [--seconds S] [--quick]
    python -m benchmarks step|scale|bank|serve --torch [--layers N] [--rank N] [--quick]
    python -m benchmarks against CHECKOUT [--out DIR] [--only PATTERN …] [--quick]

`ops` measures the operators, `layer` one projection beside LoRA and PEFT, `sizes` one layer of the
widths that models have and of few rows, `model` a decoder of Qwen3-8B's dimensions, `tune` the
kernels with candidate launch configs, `step` a whole optimizer step of Llama 3 8B's dimensions by
what it keeps and, with --table, part by part, `bank` many adapters in one batch of its projections,
`quantised` kernels and steps over quantised bases, `quality` what these bases cost a model's
results, `serve` the server's engine, `scale` a decoder on several devices. `step --torch` and
`scale --torch` measure a step of transformers' Llama by torch_dora and by PEFT, on one GPU, and on
all under FSDP2, `bank --torch` torch_dora's bank beside PEFT's mixed batches, and `serve --torch`
what transformers answers the same requests with. `against` measures layers and a model with this
checkout and with another one in turns, and prints the ratios of their times.

Exits 1 if anything that was timed is not correct, or failed; ratios of it are withheld.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.levels import LEVELS, READ_BY

RESULTS = Path(__file__).parent / "results"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure one level; print tables, write results."
    )
    made.add_argument("level", choices=tuple(LEVELS))
    made.add_argument("checkout", nargs="?", type=Path, help="level against: the other one")
    made.add_argument("--out", type=Path, help="a .jsonl file, or a folder for <level>.jsonl")
    made.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    made.add_argument("--quick", action="store_true", help="tiny shapes and few steps")
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="measure only what begins so, such as 'norm*jax' or 'model gradient*jax DoRA'; "
        + _levels("only"),
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=420.0,
        help="start nothing after this long; against stops what runs; " + _levels("seconds"),
    )
    made.add_argument(
        "--torch",
        action="store_true",
        help="levels step, scale, bank, serve: torch_dora beside PEFT",
    )
    made.add_argument(
        "--table", action="store_true", help="level step: each part of a step with it and without"
    )
    sizes = made.add_argument_group("of the decoder, instead of the usual")
    for name in ("layers", "rank", "hidden", "tokens"):
        sizes.add_argument(f"--{name}", type=int, help=_levels(name))
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


def _levels(option: str) -> str:
    return f"levels {', '.join(READ_BY[option])}"


def main(arguments: list[str] | None = None) -> int:
    parsing = parser()
    options = parsing.parse_args(arguments)
    level = LEVELS[options.level]
    measure = level.with_torch if options.torch else level.measure
    if measure is None:
        parsing.error(f"--torch is for levels step, scale, bank and serve, not {options.level}")
    if options.table and (options.level != "step" or options.torch):
        parsing.error("--table is for level step, without --torch")
    if (options.level == "against") != bool(options.checkout):
        parsing.error("level against, and no other, takes another checkout's folder")
    called = options.level + " --table" * options.table + " --torch" * options.torch
    for name, levels in READ_BY.items():
        if getattr(options, name) != parsing.get_default(name) and called not in levels:
            parsing.error(f"--{name} is for {_levels(name)}, not {called}")
    if options.level in ("bank", "quantised", "serve", "step"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    else:  # Both frameworks allocate on the one card: JAX must not take most of it at once.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch
    from rich.console import Console

    from benchmarks import against

    if options.checkout and (refusal := against.check(options.checkout)):
        parsing.error(refusal)
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
    console.print(f"{options.level}: {level.told}, on {device}", highlight=False)
    if device == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")
        console.print(
            "There is no GPU here: kernels are interpreted or left out, and times mean nothing. "
            + ("" if options.quick else "Add --quick for tiny shapes; the real ones take hours.")
        )
    return 0 if measure(options, device, console) else 1


if __name__ == "__main__":
    sys.exit(main())
