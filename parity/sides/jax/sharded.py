"""jax_dora's layer on a mesh of four devices with automatic axes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import Tensor

from jax_dora import ops
from parity.cases import LayerInputs
from parity.sharded import LEARNING_RATE, STEPS, Problem
from parity.sides.jax.operators import (
    in_torch_layout,
    linear_operands,
    to_jax,
    to_torch,
    with_gradients,
)

Axes = tuple[str, ...]
ONE, BOTH = ("x",), ("x", "y")
# The mesh axes that shard: the rows of a batch, the kernel's inputs, the kernel's outputs, and the
# features of x (not sharded under FSDP).
LAYOUTS = {
    "dp": (BOTH, (), (), ()),
    "fsdp": (BOTH, BOTH, (), ()),
    "tp column": ((), (), BOTH, ()),
    "tp row": ((), BOTH, (), BOTH),
    "fsdp×tp column": (ONE, ONE, ("y",), ()),
    "fsdp×tp row": (ONE, ("y",), ONE, ("y",)),
}


def in_each(
    function: Callable[..., Any], names: Sequence[str], device: str, arguments: tuple[Any, ...]
) -> list[Any]:
    """Returns the results of a function of this module in every layout of `names`; "one" is one
    device. The devices are JAX's default devices."""
    return [function(name, *arguments) for name in names]


def layer(name: str, inputs: LayerInputs, scale: float) -> dict[str, Tensor]:
    """Returns y and all gradients as full arrays."""
    place, constrain = _placers(name)
    linear = functools.partial(ops.dora_linear, scale=scale)
    operands = {
        # x is sharded inside the program, where the batch need not be divisible by the mesh.
        operand: place(array, "full" if operand == "x" else operand)
        for operand, array in linear_operands(inputs).items()
    }
    wanted = [operand for operand in operands if operand != "kernel"]

    @jax.jit
    def gradient(operands, dy):
        operands, dy = operands | {"x": constrain(operands["x"], "x")}, constrain(dy, "y")
        return with_gradients({"": linear}, wanted, operands, dy)

    with jax.default_matmul_precision("highest"):
        results = in_torch_layout(gradient(operands, place(to_jax(inputs.dy))))
    results = jax.device_put(results, jax.devices()[0])
    return {name: to_torch(value) for name, value in results.items()}


def losses(name: str, problem: Problem) -> list[float]:
    """Returns the loss of every training step."""
    inputs, target, unit, scale = problem
    place, constrain = _placers(name)
    optimizer = optax.adam(LEARNING_RATE)

    @jax.jit
    def begin(kernel, lora_a):
        lora_b = constrain(jnp.zeros((lora_a.shape[1], kernel.shape[1])), "lora_b")
        norm = ops.factored_norm(kernel, lora_a, lora_b, scale)
        return {"lora_a": lora_a, "lora_b": lora_b, "magnitude": constrain(norm, "magnitude")}

    @jax.jit
    def train(trained, kernel, x, target):
        # Inside the program the batch need not be divisible by the mesh.
        x, target = constrain(x, "x"), constrain(target, "y")

        def loss(trained):
            y = ops.dora_linear(x, kernel, **trained, scale=scale)
            return jnp.mean(jnp.square(y - target)) / jnp.float32(unit)

        def step(carry, _):
            trained, state = carry
            value, gradients = jax.value_and_grad(loss)(trained)
            updates, state = optimizer.update(gradients, state, trained)
            return (optax.apply_updates(trained, updates), state), value

        return jax.lax.scan(step, (trained, optimizer.init(trained)), length=STEPS)[1]

    with jax.default_matmul_precision("highest"):
        operands = linear_operands(inputs)
        kernel = place(operands["kernel"], "kernel")
        trained = begin(kernel, place(operands["lora_a"], "lora_a"))
        values = train(trained, kernel, place(operands["x"]), place(to_jax(target)))
    return np.asarray(values, np.float64).tolist()


def _placers(layout: str) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Returns two functions for a layout: one puts an array on the devices with the sharding of the
    operand `name`, the other constrains an array inside a program. "one" is one device."""
    shardings = {} if layout == "one" else _shardings(*LAYOUTS[layout])

    def place(array, name="full"):
        return jax.device_put(array, shardings.get(name))

    def constrain(array, name):
        return jax.lax.with_sharding_constraint(array, shardings[name]) if shardings else array

    return place, constrain


def _shardings(rows: Axes, into: Axes, out: Axes, features: Axes) -> dict[str, NamedSharding]:
    mesh = jax.make_mesh((2, 2), BOTH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = {
        "kernel": (into, out),
        "lora_a": (into, None),
        "lora_b": (None, out),
        "magnitude": (out,),
        "bias": (out,),
        "x": (rows, features),
        "y": (rows, tuple(axis for axis in out if axis not in rows)),
        "full": (),
    }
    return {name: NamedSharding(mesh, P(*spec)) for name, spec in specs.items()}
