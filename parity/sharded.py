"""`python -m parity sharded`: a layer on several devices, in every layout, against fp64.

y and all gradients of one projection are held to the materialised fp64 computation by the bounds of
`parity.tolerances`, which know no device: JAX's on a mesh of four devices with automatic axes,
torch's in four processes, by DDP, FSDP2 and DTensor. Among the cases are batches and ranks that do
not divide over the devices.

Then a fresh adapter, whose magnitude is the norm that is taken in the layout itself, learns by Adam
what a trained one computes, in every layout as on one device; fp32 throughout, so that only the
order of sums differs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parity import command
from parity.environment import choose_device

if TYPE_CHECKING:
    import torch

    from parity.cases import Case, LayerInputs
    from parity.report import Report
    from parity.sides import Backend

LAYOUTS = ("dp", "fsdp", "tp column", "tp row", "fsdp×tp column", "fsdp×tp row")
STEPS, LEARNING_RATE = 200, 3e-3


class Problem(NamedTuple):
    """A result that a fresh adapter learns.

    Attributes:
      inputs: x, the base, and lora_a as it starts.
      target: f32[rows, out].
      unit: the loss of the base alone, in which losses are told.
      scale: the adapter's.
    """

    inputs: LayerInputs
    target: torch.Tensor
    unit: float
    scale: float


def cases(quick: bool) -> list[Case]:
    """Returns layers whose rows and rank divide over four devices, and layers where they do not."""
    from parity.cases import layer

    regimes = ("trained", "near_unity", "zero_rows")[: 1 if quick else None]
    sizes = [(32, 96, 64, 16), (33, 96, 64, 7)]
    return [layer("float32", *size, regime=regime) for size in sizes for regime in regimes]


def run(
    report: Report, side: Backend, case: Case, names: Sequence[str], device: str, **options: Any
) -> None:
    """Adds a line for every quantity of a case in every layout that is named; `options` are those
    of torch's processes."""
    from parity.cases import layer_inputs
    from parity.compare import judge, prepare_layer

    where = device if side == "jax" else "cpu"
    arguments = layer_inputs(case, where), case.scale, tuple(names)
    exact = prepare_layer(case, where)[0]
    for name, found in zip(
        names, _results(side, "layers", arguments, device, **options), strict=True
    ):
        for quantity, one in exact.items():
            arrays = found[quantity], one.want, one.bound
            judge(report, f"{name}: {case.name}", quantity, side, *arrays)


def train(report: Report, side: Backend, names: Sequence[str], device: str, **options: Any) -> None:
    """Adds a line for training in each layout that is named."""
    from parity import tolerances

    arguments = problem(), ("one", *names)
    found = np.array(_results(side, "losses", arguments, device, **options))
    alone = found[0]
    limit = tolerances.caps.TRAINING_FP32_WORST_LOSS_DIFFERENCE
    for name, apart in zip(names, np.abs(found[1:] - alone), strict=True):
        report.add(
            f"{name}: {STEPS} steps",
            ("first |Δloss|", "worst |Δloss|"),
            side=side,
            error=(float(apart[0]), float(apart.max())),
            bound=(limit, limit),
            # A loss that does not fall would agree with any other.
            ok=[bool(apart[0] <= limit), bool(apart.max() <= limit and alone[-1] < 0.1)],
        )


def _results(
    side: Backend,
    function: str,
    arguments: tuple[Any, ...],
    device: str,
    *,
    processes: int = 4,
    spoilt: bool = False,
) -> list[Any]:
    """Returns what a function of a side's module `sharded` gives.

    Args:
      processes: of torch's side.
      spoilt: each of them takes the norm of the rows that it has.
    """
    if side == "jax":
        from parity.sides.jax import sharded

        return getattr(sharded, function)(*arguments, device)
    from parity.sides.torch import processes as launched
    from parity.sides.torch import sharded

    call = getattr(sharded, function)
    return launched.run(call, processes, device, *arguments, device, spoilt)


def problem() -> Problem:
    """Returns what a trained adapter computes, to be learned."""
    from parity import oracle
    from parity.cases import layer, layer_inputs

    # Rows and a rank that do not divide over four devices.
    case = layer("float32", 33, 96, 64, 7, bias=False)
    inputs, s = layer_inputs(case, "cpu"), case.scale
    adapter = (inputs.weight, inputs.lora_a, inputs.lora_b)
    wanted = oracle.dora_linear(inputs.x, *adapter, inputs.magnitude, s)
    unit = (wanted - inputs.x.double() @ inputs.weight.double().T).square().mean()
    return Problem(inputs, wanted.float(), float(unit), s)


def main(arguments: Sequence[str]) -> int:
    parser = command.parser("sharded", "Holds a layer on four devices to fp64, in every layout.")
    options = parser.parse_args(list(arguments))
    device = choose_device(options.device)
    import jax

    if device == "cpu":
        jax.config.update("jax_num_cpu_devices", 4)
    if jax.device_count() < 4:
        sys.exit(f"python -m parity sharded takes 4 devices, and there are {jax.device_count()}")
    from parity.sides import SIDES

    report = command.report(options, device, "sharded")
    for side in SIDES:
        for case in cases(options.quick):
            run(report, side, case, LAYOUTS, device)
        if not options.quick:
            train(report, side, LAYOUTS, device)
    return report.finish()
