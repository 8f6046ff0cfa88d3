"""The decoder on several devices: the sharding of each array on a mesh, and random arrays."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dora
from benchmarks.model.adapters import LoRALinear, dora_rule
from benchmarks.model.decoder import OPTIMIZER, Decoder, Style
from benchmarks.model.protocol import LORA_B_DEVIATION, PROJECTIONS, Protocol

# Tensor parallelism shards the columns of these projections, and the rows of the others.
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
AXIS = "devices"
INNER_AGAIN = "DoRA, inner computed again"
FROZEN = "DoRA, frozen"
NAMED = {f"DoRA, {name}": name for name in ("mosaic", "triton", "xla")}
"""The implementation that a kind of this name uses."""
ROWS_PER_DEVICE = 2
DEVIATION = 0.02


class Layout(NamedTuple):
    """The shardings of arrays on a mesh.

    Attributes:
      rows: the mesh axis that the rows of a batch are sharded over, or None.
      weights: returns the axes of a kernel [in, out], given whether tensor parallelism shards its
        columns.
      axes: the mesh axes. The second one has two devices.
      alone: whether the mesh is one device.
    """

    rows: str | None
    weights: Callable[[bool], tuple[str | None, str | None]]
    axes: tuple[str, ...] = (AXIS,)
    alone: bool = False

    def mesh(self, axes: str, count: int | None = None) -> Mesh:
        """Returns the mesh over `count` devices (None: all), with "auto" or "explicit" axes."""
        kind = AxisType.Explicit if axes == "explicit" else AxisType.Auto
        devices = jax.devices()[: 1 if self.alone else count]
        sizes = (len(devices),) if len(self.axes) == 1 else (len(devices) // 2, 2)
        kinds = (kind,) * len(sizes)
        return jax.make_mesh(sizes, self.axes, axis_types=kinds, devices=devices)


LAYOUTS = {
    "tp": Layout(None, lambda columns: (None, AXIS) if columns else (AXIS, None)),
    "fsdp": Layout(AXIS, lambda columns: (AXIS, None)),
    "dp": Layout(AXIS, lambda columns: (None, None)),
    "alone": Layout(AXIS, lambda columns: (None, None), alone=True),
    "fsdp-tp": Layout(
        "fsdp", lambda columns: ("fsdp", "tp") if columns else ("tp", "fsdp"), ("fsdp", "tp")
    ),
}


class Placed(NamedTuple):
    """A model, the optimizer state and a batch, as shapes with shardings."""

    graphdef: Any
    trained: Any
    frozen: Any
    state: Any
    tokens: Any


def placed(
    kind: str, layout: Layout, mesh: Mesh, sizes: Protocol, device: str, scanned: bool = True
) -> Placed:
    """Returns the decoder of the kind "base", "LoRA", "DoRA", `INNER_AGAIN`, `FROZEN` or one of
    `NAMED`."""
    attention = "cudnn" if device == "cuda" else "xla"
    style = Style(attention=attention, scanned=scanned)
    rows = NamedSharding(mesh, P(layout.rows))
    if AxisType.Explicit in mesh.axis_types:
        style = style._replace(residual=rows)
    elif layout.rows:
        # As in other FSDP models; XLA by itself would move activations instead of weights.
        style = style._replace(rows=rows)
    if kind == "LoRA":
        lora = functools.partial(LoRALinear, rank=sizes.rank, scale=sizes.scale)
        style = style._replace(linear=lora)

    def make() -> Decoder:
        model = Decoder(sizes, style, nnx.Rngs(0))
        if kind.startswith("DoRA"):
            keep_inner = False if kind == INNER_AGAIN else None
            rule = dora_rule(sizes, keep_inner, NAMED.get(kind))
            model = jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(1))
        return jax_dora.freeze(model) if kind == FROZEN else model

    graphdef, state = nnx.split(nnx.eval_shape(make))
    flat = [
        (path, variable.replace(_abstract(mesh, _spec(layout, path, variable.ndim), variable)))
        for path, variable in nnx.to_flat_state(state)
    ]
    model = nnx.merge(graphdef, nnx.from_flat_state(flat))
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    count = ROWS_PER_DEVICE * (mesh.shape[layout.rows] if layout.rows else 1)
    shape = (count, sizes.tokens + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    moments = optax.tree.map_params(
        OPTIMIZER,
        lambda moment, parameter: _abstract(mesh, parameter.sharding.spec, moment),
        jax.eval_shape(OPTIMIZER.init, trained),
        trained,
        transform_non_params=lambda count: _abstract(mesh, P(), count),
    )
    return Placed(graphdef, trained, frozen, moments, tokens)


def _abstract(mesh: Mesh, spec: P, array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))


def _spec(layout: Layout, path: tuple[Any, ...], rank: int) -> P:
    """Returns the sharding of a parameter; in a scan layers are stacked along its first axis."""
    *_, projection, name = path
    if projection not in PROJECTIONS:
        return P()
    n_in, n_out = layout.weights(projection in COLUMNS)
    specs = {"kernel": (n_in, n_out), "lora_a": (n_in, None), "lora_b": (None, n_out)}
    spec = specs.get(name, (n_out,))
    return P(*(None,) * (rank - len(spec)), *spec)


def drawing(placed: Placed, vocabulary: int) -> Any:
    """Returns a jitted function that draws (trained, frozen, state, tokens), each array on its own
    devices; magnitudes are 1, near the norms of the weights."""

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if any(part in name for part in ("magnitude", "scale", "given_g")):
            return jnp.ones(leaf.shape, leaf.dtype)
        deviation = LORA_B_DEVIATION if "lora_b" in name else DEVIATION
        key = jax.random.key(len(name), impl="rbg")  # quick to compile and to draw
        return deviation * jax.random.normal(key, leaf.shape, leaf.dtype)

    def make() -> Any:
        parameters = (placed.trained, placed.frozen)
        key = jax.random.key(2)
        tokens = jax.random.randint(key, placed.tokens.shape, 0, vocabulary)
        moments = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), placed.state)
        return *jax.tree_util.tree_map_with_path(draw, parameters), moments, tokens

    # Drawn on automatic axes, which every function supports.
    mesh: Any = placed.tokens.sharding.mesh
    auto = Mesh(mesh.devices, mesh.axis_names)
    shardings = jax.tree.map(
        lambda leaf: NamedSharding(auto, leaf.sharding.spec), tuple(placed[1:])
    )
    return jax.jit(make, out_shardings=shardings)


def on_own_axes(placed: Placed, drawn: Any) -> tuple[Any, ...]:
    """Returns the arrays of `drawing` with the axes of the model's mesh."""
    return jax.device_put(drawn, jax.tree.map(lambda leaf: leaf.sharding, tuple(placed[1:])))
