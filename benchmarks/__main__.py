"""Runs one benchmark level: prints a line for each measurement and writes DIR/<level>.jsonl.

    python -m benchmarks LEVEL [--out DIR] [--seconds S] [--quick] ...

Levels:

    ops                 the operators: the norm, compose, and the gradient of SwiGLU
    layer               one projection, compared with LoRA and PEFT
    sizes               one layer at the sizes of public models, and decoding with few rows
    vlm                 vision-language models, torch_dora compared with PEFT
    method_comparison   PEFT's own benchmark, with its DoRA accelerated
    triton              the Triton kernels of jax_dora, compared with Mosaic's
    tune                each kernel of this card with several launch configs
    step                an optimizer step of Llama 3 8B's dimensions, for several memory budgets
    bank                many adapters in one batch
    quantised           kernels and optimizer steps over quantised bases
    quality             how much each quantised format changes the results of a model
    fp8_training        training with activations and gradients in FP8, compared with bf16
    encoder             a training step of DeBERTa, compared with transformers
    serve               the engine of the server
    kv_cache            decoding with keys and values in FP8, compared with bf16
    kv_quality          how much a KV cache in FP8 changes the logits of a model
    scale               a decoder on several devices
    compile             the time until a user's model can run, on one device and on several

step, scale and quantised also exist with --torch: torch_dora compared with PEFT; step also with
--tunix: a step of Tunix's trainer; serve also with --vllm: torch_dora's plugin in vLLM. The
docstring of each level's module says what is compared, what is timed and how, and what one line of
the result file means.

A level is a module in one of two forms:

- `Settings`, `TINY` (the settings of --quick) and `measure(settings, device)`, which yields rows;
- `works`, whose pieces of work `benchmarks.measure` checks and times.

A level may also define `refuses` (an error message about its settings) and `facts` (for the
header). A command line option sets the field of the same name in the level's settings. The
exit status is 1 if a measurement failed or its result is wrong.
"""

import argparse
import dataclasses
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

LEVELS = (
    *("ops", "layer", "sizes", "triton", "tune", "step", "step --torch", "step --tunix"),
    *("scale", "scale --torch", "compile", "quantised", "quantised --torch", "quality"),
    *("fp8_training", "encoder"),
    *("vlm", "method_comparison", "bank"),
    *("serve", "serve --vllm", "kv_cache", "kv_quality"),
)
# Options that set a field of the level's settings.
FIELDS = ("only", "layers", "rank", "rounds", "model", "ranks", "sides", "layouts", "axes", "tasks")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure one level; print lines, write results."
    )
    add = parser.add_argument
    add("level", choices=list(dict.fromkeys(name.split()[0] for name in LEVELS)))
    add("--out", type=Path, help="a .jsonl file, or a folder for <level>.jsonl")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    add("--quick", action="store_true", help="tiny shapes and few steps")
    add(
        "--only",
        action="append",
        metavar="PATTERN",
        help="measure only names that begin with this pattern, such as 'norm*jax'",
    )
    add("--seconds", type=float, help="start no further measurement after this time")
    add("--torch", action="store_true", help="measure torch_dora and PEFT")
    add("--tunix", action="store_true", help="level step: measure a step of Tunix's trainer")
    add("--vllm", action="store_true", help="level serve: measure torch_dora's plugin in vLLM")
    add("--layers", type=int, help="number of decoder layers")
    add("--rank", type=int, help="rank of the adapters")
    add("--rounds", type=int, help="number of timed calls of each side, which take turns")
    add("--sides", nargs="+", help="level vlm: eager or compiled; default: both")
    scale = parser.add_argument_group("level scale")
    scale.add_argument(
        "--model",
        choices=("qwen3", "llama3", "list", "list of small layers"),
        help="12 layers of Qwen3-8B's width (the default), all of Llama-3-8B, or a list of layers",
    )
    scale.add_argument("--ranks", nargs="+", type=int, help="of the adapters; default: 64 384")
    scale.add_argument("--layouts", nargs="+", choices=("tp", "fsdp", "dp", "alone", "fsdp-tp"))
    scale.add_argument("--axes", nargs="+", choices=("auto", "explicit"))
    add("--tasks", nargs="+", help="levels compile, method_comparison and vlm; default: all")
    add("--commit", help="commit to record, if this is not a git checkout")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parsing = parser()
    options = parsing.parse_args(arguments)
    name = options.level + " --torch" * options.torch
    name += " --tunix" * options.tunix + " --vllm" * options.vllm
    if name not in LEVELS:
        parsing.error(f"there is no level {name}; expected one of {', '.join(LEVELS)}")
    if options.level in ("bank", "quantised", "serve", "step", "kv_cache"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    else:  # Both frameworks allocate on the same GPU, so JAX must not reserve most of its memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch

    from benchmarks import measure, results
    from parity.environment import environment

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parsing.error("--device is cuda, and torch sees no GPU; use --device cpu to try the code")
    file_name, out = name.replace(" --", "_"), options.out
    if out and out.suffix != ".jsonl":
        out = out / f"{file_name}.jsonl"
    meaningful = (
        device == "cuda" or name in ("quality", "kv_quality", "fp8_training")
    ) and not options.quick
    if not meaningful and out and out.resolve().is_relative_to(results.FOLDER):
        parsing.error(f"--out is {out}; a quick or CPU run measures nothing worth keeping")
    if device == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")
        print("There is no GPU: kernels are interpreted or left out, and times mean nothing.")
        if not options.quick:
            print("Add --quick for tiny shapes; the full sizes take hours.")

    # Three levels of PyTorch steps share a module.
    module = "step_torch" if name in ("scale --torch", "quantised --torch") else file_name
    level: Any = importlib.import_module(f"benchmarks.{module}")
    if hasattr(level, "works"):
        level, settings = measure, measure.Settings(level.works, options.quick)
    elif module == "step_torch":
        settings = level.settings(options.level, options.quick)
    else:
        settings = level.TINY if options.quick else level.Settings()
    for field in FIELDS:
        value = getattr(options, field)
        if value is not None:
            settings = _replace(settings, field, tuple(value) if isinstance(value, list) else value)
            if settings is None:
                parsing.error(f"level {name} has no {field}")
    if hasattr(level, "refuses") and (error := level.refuses(settings)):
        parsing.error(error)
    header = {"kind": getattr(level, "KIND", "measurements"), "level": options.level}
    header |= {"quick": True} if options.quick else {}
    header |= {"environment": environment(device, options.commit, ("peft", "transformers"))}
    header |= level.facts(settings, device) if hasattr(level, "facts") else {}
    writer = results.Writer(out, header) if out else None
    started, rows = time.monotonic(), []
    for row in level.measure(settings, device):
        print(results.describe(row), flush=True)
        rows.append(row)
        if writer:
            writer.add(row)
        if options.seconds is not None and time.monotonic() - started > options.seconds:
            break
    if options.level == "tune" and device == "cuda":
        sent = out or "these lines, or a file of --out,"
        print(f"On a card that docs/measured/which-gpu.md calls not measured, please send {sent}")
        print("in an issue.")
    return 1 if any(map(results.failed, rows)) else 0


def _replace(settings: Any, field: str, value: Any) -> Any:
    """Returns settings with another value of a field, or None if there is no such field."""
    if field == "layers" and "config" in settings._fields:
        field, config = "config", settings.config
        value = dataclasses.replace(config, num_hidden_layers=value)
    return settings._replace(**{field: value}) if field in settings._fields else None


if __name__ == "__main__":
    sys.exit(main())
