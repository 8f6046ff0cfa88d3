"""200 steps of one projection on several devices, beside the same steps on one.

A fresh adapter, whose magnitude is the norm that is taken in the layout itself, learns by Adam what
a trained one computes. The loss begins at 1. fp32 throughout, so that only the order of sums
differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from parity import oracle, sharded, tolerances
from parity.cases import Case, LayerInputs, layer_inputs

if TYPE_CHECKING:
    from parity.report import Report

STEPS, LEARNING_RATE = 200, 3e-3
# Rows and a rank that do not divide over four devices.
CASE = Case("layer", "float32", 64, 33, 96, 7, "trained", bias=False)


def problem() -> tuple[LayerInputs, torch.Tensor, float]:
    """Returns the inputs, the results f32[rows, out] to learn, and the loss of the base alone."""
    inputs = layer_inputs(CASE, "cpu")
    weight, lora_a, lora_b = (one.double() for one in (inputs.weight, inputs.lora_a, inputs.lora_b))
    g = inputs.magnitude.double() / oracle.norm(weight, lora_a, lora_b, CASE.scale)
    x = inputs.x.double()
    wanted = x @ (g[:, None] * (weight + CASE.scale * lora_b @ lora_a)).T
    return inputs, wanted.float(), float((wanted - x @ weight.T).square().mean())


def run(report: Report, names: Sequence[str]) -> None:
    """Adds a line for each layout that is named, on JAX's side."""
    alone = losses(None)
    for name in names:
        _judge(report, name, "jax", losses(name), alone)


def run_torch(
    report: Report, names: Sequence[str], device: str, processes: int = 4, *, spoilt: bool = False
) -> None:
    """Adds a line for each layout that is named, on torch's side; `spoilt` with every process' norm
    that of the rows it has."""
    from parity.sides.torch import processes as launched
    from parity.sides.torch import sharded as torch_side

    settings = (*problem(), CASE.scale, STEPS, LEARNING_RATE)
    arguments = (settings, ("one", *names), device, spoilt)
    alone, *found = launched.run(torch_side.losses, processes, device, *arguments)
    for name, its in zip(names, found, strict=True):
        _judge(report, name, "torch", np.array(its), np.array(alone))


def _judge(report: Report, name: str, side: str, found: np.ndarray, alone: np.ndarray) -> None:
    apart = np.abs(found - alone)
    limit = tolerances.caps.TRAINING_FP32_WORST_LOSS_DIFFERENCE
    report.add(
        f"{name}: {STEPS} steps",
        ("first |Δloss|", "worst |Δloss|"),
        side=side,
        error=(float(apart[0]), float(apart.max())),
        bound=(limit, limit),
        # A loss that does not fall would agree with any other.
        ok=[bool(apart[0] <= limit), bool(apart.max() <= limit and alone[-1] < 0.1)],
    )


def losses(name: str | None) -> np.ndarray:
    """Returns JAX's losses f64[steps] in a layout; on one device for None."""
    import jax
    import jax.numpy as jnp
    import optax

    from jax_dora import ops
    from parity.sides.jax.operators import to_jax

    inputs, target, unit = problem()
    lies: dict[str, Any] = sharded.places(sharded.LAYOUTS[name]) if name else {}

    def place(array, name="whole"):
        return jax.device_put(to_jax(array), lies.get(name))

    def constrain(array, name):
        return jax.lax.with_sharding_constraint(array, lies[name]) if lies else array

    optimizer = optax.adam(LEARNING_RATE)

    @jax.jit
    def begin(kernel, lora_a):
        lora_b = constrain(jnp.zeros((lora_a.shape[1], kernel.shape[1])), "lora_b")
        norm = ops.factored_norm(kernel, lora_a, lora_b, CASE.scale)
        return {"lora_a": lora_a, "lora_b": lora_b, "magnitude": constrain(norm, "magnitude")}

    @jax.jit
    def train(trained, kernel, x, target):
        # Inside the program, where a batch need not divide over the mesh.
        x, target = constrain(x, "x"), constrain(target, "y")

        def loss(trained):
            y = ops.dora_linear(x, kernel, **trained, scale=CASE.scale)
            return jnp.mean(jnp.square(y - target)) / jnp.float32(unit)

        def step(carry, _):
            trained, state = carry
            value, gradients = jax.value_and_grad(loss)(trained)
            updates, state = optimizer.update(gradients, state, trained)
            return (optax.apply_updates(trained, updates), state), value

        return jax.lax.scan(step, (trained, optimizer.init(trained)), length=STEPS)[1]

    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        kernel = place(inputs.weight.T, "kernel")
        trained = begin(kernel, place(inputs.lora_a.T, "lora_a"))
        found = train(trained, kernel, place(inputs.x), place(target))
    return np.asarray(found, np.float64)
