"""jax_dora's layer on a mesh of four devices with automatic axes."""

from __future__ import annotations

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
# Over which axes of the mesh are sharded: a batch's rows, a kernel's inputs, its outputs, and the
# features of x, which under FSDP are whole.
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
    """Returns the results of a function of this module in every layout that is named; "one" is one
    device. The devices are JAX's default ones."""
    return [function(name, *arguments) for name in names]


def layer(name: str, inputs: LayerInputs, scale: float) -> dict[str, Tensor]:
    """Returns y and all gradients, whole."""
    place, constrain = _places(name)
    linear = functools.partial(ops.dora_linear, scale=scale)
    operands = {
        # x inside the program, where a batch need not divide over the mesh.
        operand: place(array, "whole" if operand == "x" else operand)
        for operand, array in linear_operands(inputs).items()
    }
    wanted = [operand for operand in operands if operand != "kernel"]

    @jax.jit
    def gradient(operands, dy):
        operands, dy = operands | {"x": constrain(operands["x"], "x")}, constrain(dy, "y")
        return with_gradients({"": linear}, wanted, operands, dy)

    with jax.default_matmul_precision("highest"):
        found = in_torch_layout(gradient(operands, place(to_jax(inputs.dy))))
    whole = jax.device_put(found, jax.devices()[0])
    return {name: to_torch(value) for name, value in whole.items()}


def losses(name: str, problem: Problem) -> list[float]:
    """Returns the loss of every step of training."""
    inputs, target, unit, scale = problem
    place, constrain = _places(name)
    optimizer = optax.adam(LEARNING_RATE)

    @jax.jit
    def begin(kernel, lora_a):
        lora_b = constrain(jnp.zeros((lora_a.shape[1], kernel.shape[1])), "lora_b")
        norm = ops.factored_norm(kernel, lora_a, lora_b, scale)
        return {"lora_a": lora_a, "lora_b": lora_b, "magnitude": constrain(norm, "magnitude")}

    @jax.jit
    def train(trained, kernel, x, target):
        # Inside the program, where a batch need not divide over the mesh.
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

    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        operands = linear_operands(inputs)
        kernel = place(operands["kernel"], "kernel")
        trained = begin(kernel, place(operands["lora_a"], "lora_a"))
        found = train(trained, kernel, place(operands["x"]), place(to_jax(target)))
    return np.asarray(found, np.float64).tolist()


def _places(layout: str) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Returns a function that puts an array where the one of a name lies in a layout, and a
    function that constrains an array of a program to lie there; on one device for "one"."""
    lies = {} if layout == "one" else _shardings(*LAYOUTS[layout])

    def place(array, name="whole"):
        return jax.device_put(array, lies.get(name))

    def constrain(array, name):
        return jax.lax.with_sharding_constraint(array, lies[name]) if lies else array

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
        "whole": (),
    }
    return {name: NamedSharding(mesh, P(*spec)) for name, spec in specs.items()}
