"""The command line of `python -m parity model`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module

from parity import command
from parity.environment import choose_device
from parity.model.sizes import runs

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
        import_module("parity.sides.torch.decoder")  # needs transformers and PEFT
    except ModuleNotFoundError as error:
        sys.exit(f"python -m parity model: {error}; pip install 'jax-dora[dev]'")
    from parity.model.checks import judge
    from parity.model.execute import execute, systems
    from parity.model.weights import draw

    report = command.report(options, device, "model", ("transformers", "peft"))
    sizes = {"layers": options.layers, "tokens": options.sequence}
    for run in runs(device, DTYPES[options.dtype], quick=options.quick, **sizes):
        weights = draw(run, device)
        results, _ = execute(run, weights, systems(run), report)
        judge(report, run, results)
        del weights, results
        gc.collect()
    return report.finish()
