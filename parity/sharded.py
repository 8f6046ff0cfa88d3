"""`python -m parity sharded`: a layer on several devices, in every layout, against fp64.

y and all gradients of one projection are held to the materialised fp64 computation by the bounds of
`parity.tolerances`, which know no device: JAX's on a mesh of four devices with automatic axes,
torch's in four processes, by DDP, FSDP2 and DTensor. Among the cases are batches and ranks that do
not divide over the devices. Then a fresh adapter learns another one in 200 steps, in every layout
as on one device (`parity.sharded_training`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from parity import command
from parity.environment import choose_device

if TYPE_CHECKING:
    from parity.cases import Case
    from parity.report import Report

# Rows, in and out of what is sharded, over the mesh's two axes.
ONE, BOTH = ("x",), ("x", "y")


class Layout(NamedTuple):
    """Over which axes of the mesh a batch's rows, and a kernel's inputs and outputs, are sharded.

    Attributes:
      features: x's; under FSDP the kernel's inputs are sharded, and x's are not.
    """

    rows: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


LAYOUTS = {
    "dp": Layout(rows=BOTH),
    "fsdp": Layout(rows=BOTH, inputs=BOTH),
    "tp column": Layout(outputs=BOTH),
    "tp row": Layout(inputs=BOTH, features=BOTH),
    "fsdp×tp column": Layout(rows=ONE, inputs=ONE, outputs=("y",)),
    "fsdp×tp row": Layout(rows=ONE, inputs=("y",), outputs=ONE, features=("y",)),
}


def cases(quick: bool) -> list[Case]:
    """Returns layers whose rows and rank divide over four devices, and layers where they do not."""
    from parity.cases import layer

    regimes = ("trained", "near_unity", "zero_rows")[: 1 if quick else None]
    sizes = [(32, 96, 64, 16), (33, 96, 64, 7)]
    return [layer("float32", *size, regime=regime) for size in sizes for regime in regimes]


def run(report: Report, case: Case, name: str, device: str) -> None:
    """Adds a line for every quantity of a case in a layout, on JAX's side."""
    _judge(report, case, name, device, "jax", _results(case, LAYOUTS[name], device))


def run_torch(
    report: Report,
    case: Case,
    names: Sequence[str],
    device: str,
    processes: int = 4,
    *,
    spoilt: bool = False,
) -> None:
    """Adds a line for every quantity of a case in every layout that is named, on torch's side;
    where `spoilt`, every process takes the norm of the rows that it has."""
    from parity.cases import layer_inputs
    from parity.sides.torch import processes as launched
    from parity.sides.torch import sharded as torch_side

    arguments = (layer_inputs(case, "cpu"), case.scale, tuple(names), device, spoilt)
    found = launched.run(torch_side.layers, processes, device, *arguments)
    for name, results in zip(names, found, strict=True):
        _judge(report, case, name, "cpu", "torch", results)


def _judge(
    report: Report, case: Case, name: str, device: str, side: str, found: dict[str, Any]
) -> None:
    from parity.compare import judge, prepare_layer

    for quantity, exact in prepare_layer(case, device)[0].items():
        arrays = found[quantity], exact.want, exact.bound
        judge(report, f"{name}: {case.name}", quantity, side, *arrays)


def places(layout: Layout) -> dict[str, Any]:
    """Returns how JAX's arrays lie, by name, on a mesh of four devices."""
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2, 2), BOTH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    into, out = (axes or None for axes in (layout.inputs, layout.outputs))
    rows, features = (axes or None for axes in (layout.rows, layout.features))
    columns = tuple(axis for axis in layout.outputs if axis not in layout.rows) or None
    specs = {
        "kernel": (into, out),
        "lora_a": (into, None),
        "lora_b": (None, out),
        "magnitude": (out,),
        "bias": (out,),
        "x": (rows, features),
        "y": (rows, columns),
        "whole": (),
    }
    return {name: NamedSharding(mesh, P(*spec)) for name, spec in specs.items()}


def _results(case: Case, layout: Layout, device: str) -> dict[str, Any]:
    import jax

    from jax_dora import ops
    from parity.cases import layer_inputs
    from parity.sides.jax.operators import to_jax, to_torch

    inputs, lies = layer_inputs(case, device), places(layout)

    def place(array, name="whole"):
        return jax.device_put(array, lies[name])

    trained = {
        "lora_a": place(to_jax(inputs.lora_a.T), "lora_a"),
        "lora_b": place(to_jax(inputs.lora_b.T), "lora_b"),
        "magnitude": place(to_jax(inputs.magnitude), "magnitude"),
        "bias": place(to_jax(inputs.bias), "bias") if inputs.bias is not None else None,
    }
    kernel = place(to_jax(inputs.weight.T), "kernel")

    @jax.jit
    def gradient(trained, x, kernel, dy):
        # Inside the program, where a batch need not divide over the mesh.
        x = jax.lax.with_sharding_constraint(x, lies["x"])
        dy = jax.lax.with_sharding_constraint(dy, lies["y"])

        def call(trained, x):
            return ops.dora_linear(x, kernel, **trained, scale=case.scale)

        y, pull = jax.vjp(call, trained, x)
        return y, pull(dy)

    with jax.default_matmul_precision("highest"):
        x, dy = place(to_jax(inputs.x)), place(to_jax(inputs.dy))
        y, (found, d_x) = gradient(trained, x, kernel, dy)
    found = {f"d_{name}": value for name, value in found.items() if value is not None}
    found |= {"y": y, "d_x": d_x}
    for name in ("d_lora_a", "d_lora_b"):
        found[name] = found[name].T
    whole = jax.device_put(found, jax.devices()[0])
    return {name: to_torch(value) for name, value in whole.items()}


def main(arguments: Sequence[str]) -> int:
    parser = command.parser("sharded", "Holds a layer on four devices to fp64, in every layout.")
    options = parser.parse_args(list(arguments))
    device = choose_device(options.device)
    import jax

    if device == "cpu":
        jax.config.update("jax_num_cpu_devices", 4)
    if jax.device_count() < 4:
        sys.exit(f"python -m parity sharded takes 4 devices, and there are {jax.device_count()}")
    report = command.report(options, device, "sharded")
    for case in cases(options.quick):
        for name in LAYOUTS:
            run(report, case, name, device)
        run_torch(report, case, tuple(LAYOUTS), device)
    if not options.quick:
        from parity import sharded_training

        sharded_training.run(report, tuple(LAYOUTS))
        sharded_training.run_torch(report, tuple(LAYOUTS), device)
    return report.finish()


def of_its_own_shard(norm: Any) -> Any:
    """Returns the operator of the norm, spoilt: the norm of the rows that a device has, as some
    row-parallel layers take it. At initialisation, where the magnitude is such a norm, no result
    tells."""

    def spoilt(static, shard, operands):
        return norm.run(static, dataclasses.replace(shard, summed=()), operands)

    return norm._replace(run=spoilt)
