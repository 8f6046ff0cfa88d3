"""Level `scale`: a decoder on several devices: the base, LoRA and DoRA in one run.

Each layout is a mesh over all devices, and each kind of model is measured on it at a whole training
step and at inference, with automatic and with explicit axes. The programs of a layout are timed in
turns, so that what disturbs one disturbs all.
"""

from __future__ import annotations

import collections
import functools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dora
from benchmarks.collectives import collectives
from benchmarks.model.decoder import Decoder, LoRALinear, Style, loss
from benchmarks.model.protocol import PROJECTIONS, Protocol
from benchmarks.results import Row

OPTIMIZER = optax.adamw(1e-4)
LORA_B_INIT = nnx.initializers.normal(0.0035)
KINDS = ("base", "LoRA", "DoRA")
# The projections whose result is sharded under tensor parallelism; the others take it so.
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class Layout(NamedTuple):
    """How arrays lie on a mesh of one axis, "devices".

    Attributes:
      rows: a batch's rows are sharded.
      weights: how a kernel [in, out] is, by whether its columns are what tensor parallelism shards.
    """

    rows: bool
    weights: Callable[[bool], tuple[str | None, str | None]]


AXIS = "devices"
LAYOUTS = {
    "dp": Layout(True, lambda columns: (None, None)),
    "fsdp": Layout(True, lambda columns: (AXIS, None)),
    "tp": Layout(False, lambda columns: (None, AXIS) if columns else (AXIS, None)),
}


class Program(NamedTuple):
    """A compiled program with its arguments, and what is known of it before it is timed."""

    row: Row
    run: Callable[..., Any] | None
    arguments: tuple[Any, ...]


class Settings(NamedTuple):
    """What is measured on which layouts, and for how long: nothing is built after `seconds`."""

    sizes: Protocol
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    axes: tuple[str, ...] = ("auto", "explicit")
    rounds: int = 15
    seconds: float = 300.0


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement: times, memory, and what travels between the devices."""
    started = time.monotonic()
    for axes in settings.axes:
        for layout in settings.layouts:
            programs: list[Program] = []
            for kind in KINDS:
                if time.monotonic() - started < settings.seconds:
                    programs += _programs(kind, layout, axes, settings.sizes, device)
            yield from _timed(programs, settings.rounds)


def _programs(kind: str, layout: str, axes: str, sizes: Protocol, device: str) -> list[Program]:
    explicit = AxisType.Explicit if axes == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(explicit,))
    graphdef, *arguments = _model(kind, LAYOUTS[layout], mesh, sizes, device)
    found = []
    with jax.set_mesh(mesh):
        for task, function in TASKS.items():
            if kind == "base" and task == "step":
                continue  # It has nothing to train.
            row: Row = {"kind": kind, "layout": layout, "axes": axes, "task": task}
            row |= {"devices": mesh.size, "hidden": sizes.hidden, **sizes.shape()}
            begin = time.monotonic()
            given = arguments[: -1 if task == "inference" else None]
            run = None
            try:
                one = jax.jit(functools.partial(function, graphdef, sizes.last))
                run = one.lower(*given).compile()
                row |= _facts(run, mesh.size)
            except Exception as error:  # One that does not compile costs no other its measurement.
                row["failed"] = f"{type(error).__name__}: {error}"[:600]
            row["compile_s"] = time.monotonic() - begin
            found.append(Program(row, run, tuple(given)))
    return found


def _model(kind: str, layout: Layout, mesh: Any, sizes: Protocol, device: str) -> tuple[Any, ...]:
    """Returns (graphdef, trained, frozen, tokens, the optimizer's state), placed on the mesh."""
    style = Style(attention="cudnn" if device == "cuda" else "xla", fused_swiglu=False)
    if layout.rows and AxisType.Explicit not in mesh.axis_types:
        # As in other FSDP models: what XLA finds by itself moves activations instead of weights.
        style = style._replace(rows=NamedSharding(mesh, P(AXIS)))
    if kind == "LoRA":
        options = {"rank": sizes.rank, "scale": sizes.alpha / sizes.rank, "b_init": LORA_B_INIT}
        style = style._replace(linear=functools.partial(LoRALinear, **options))
    rule = jax_dora.DoRARule(
        rf"layers/({'|'.join(PROJECTIONS)})",
        sizes.rank,
        sizes.alpha,
        adapter_dtype=jnp.bfloat16,
        lora_b_init=LORA_B_INIT,
    )

    def make() -> Decoder:
        model = Decoder(sizes, style, nnx.Rngs(0))
        return jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(1)) if kind == "DoRA" else model

    graphdef, state = nnx.split(nnx.eval_shape(make))
    flat = nnx.to_flat_state(state)
    specs = [_spec(layout, path, variable.get_value().ndim) for path, variable in flat]
    # Made with automatic axes, which every initializer knows.
    auto = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    made = jax.jit(
        lambda: [v.get_value() for _, v in nnx.to_flat_state(nnx.split(make())[1])],
        out_shardings=[NamedSharding(auto, spec) for spec in specs],
    )()
    made = jax.device_put(made, [NamedSharding(mesh, spec) for spec in specs])
    pairs = zip(flat, made, strict=True)
    state = nnx.from_flat_state([(path, var.replace(value)) for (path, var), value in pairs])
    graphdef, trained, frozen = nnx.split(nnx.merge(graphdef, state), nnx.LoRAParam, ...)
    rows = 2 * mesh.size if layout.rows else 2
    tokens = jax.random.randint(jax.random.key(2), (rows, sizes.tokens + 1), 0, sizes.vocabulary)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(AXIS if layout.rows else None)))
    with jax.set_mesh(mesh):
        return graphdef, trained, frozen, tokens, jax.jit(OPTIMIZER.init)(trained)


def _spec(layout: Layout, path: tuple[Any, ...], rank: int) -> jax.sharding.PartitionSpec:
    """Returns how a parameter is sharded; those of the layers are stacked."""
    if path[0] != "layers" or path[1] not in PROJECTIONS:
        return P()
    into, out = layout.weights(path[1] in COLUMNS)
    named = {"kernel": (into, out), "lora_a": (into, None), "lora_b": (None, out)}
    spec = named.get(path[2], (out,))
    return P(*(None,) * (rank - len(spec)), *spec)


def _inference(graphdef: Any, last: int, trained: Any, frozen: Any, tokens: jax.Array) -> Any:
    return nnx.merge(graphdef, trained, frozen)(tokens[:, :-1], last)


def _step(
    graphdef: Any, last: int, trained: Any, frozen: Any, tokens: jax.Array, state: Any
) -> Any:
    def of_adapters(trained: Any) -> jax.Array:
        return loss(nnx.merge(graphdef, trained, frozen), tokens, last)

    value, gradients = jax.value_and_grad(of_adapters)(trained)
    updates, state = OPTIMIZER.update(gradients, state, trained)
    return value, optax.apply_updates(trained, updates), state


TASKS = {"inference": _inference, "step": _step}


def _facts(program: Any, devices: int) -> Row:
    """Returns the memory of a compiled program and what it sends."""
    memory, sent = program.memory_analysis(), collectives(program.as_text(), devices)
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": getattr(memory, "peak_memory_in_bytes", None),
        "kernels": len(re.findall(r'custom_call_target="mosaic_gpu', program.as_text())),
        "sent_bytes": sum(one.bytes for one in sent),
        "sent": dict(collections.Counter(one.kind for one in sent)),
    }


def _timed(programs: list[Program], rounds: int) -> Iterator[Row]:
    """Yields the programs' rows with their median wall times, taken in turns."""
    times: list[list[float]] = [[] for _ in programs]
    for turn in range(rounds + 1):
        for program, taken in zip(programs, times, strict=True):
            if program.run is None:
                continue
            begin = time.perf_counter()
            jax.block_until_ready(program.run(*program.arguments))
            if turn:  # The first warms up.
                taken.append(1e3 * (time.perf_counter() - begin))
    medians = {}
    for program, taken in zip(programs, times, strict=True):
        row = dict(program.row)
        if taken:
            row["ms"] = medians[row["kind"], row["task"]] = statistics.median(taken)
            row["spread_ms"] = max(taken) - min(taken)
        if row["kind"] == "DoRA" and ("LoRA", row["task"]) in medians and taken:
            row["over_lora"] = row["ms"] / medians["LoRA", row["task"]]
        yield row


def line(row: Row) -> str:
    """Returns a row as a line to read."""
    name = f"{row['axes']:8} {row['layout']:5} {row['kind']:4} {row['task']:9}"
    if "failed" in row:
        return f"{name} failed: {row['failed'][:150]}"
    ratio = f"  {row['over_lora']:.3f} of LoRA" if "over_lora" in row else ""
    return (
        f"{name} {row.get('ms', 0):8.2f} ms  temporaries {row['temp_bytes'] / 2**30:6.2f} GiB  "
        f"sent {row['sent_bytes'] / 2**20:8.1f} MiB in {sum(row['sent'].values()):3}  "
        f"{row['kernels']:2} kernels{ratio}"
    )
