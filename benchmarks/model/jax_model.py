"""The model in JAX: the plain decoder, adapted by `jax_dora.apply_dora`, or with LoRA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx

import jax_dora
from benchmarks.arrays import to_torch
from benchmarks.check import judge
from benchmarks.model.decoder import OPTIMIZER, Decoder, Dense, LoRALinear, Style, loss
from benchmarks.model.protocol import (
    CHECKED_LAYERS,
    LORA_B_DEVIATION,
    MAGNITUDE_DEVIATION,
    PROJECTIONS,
    SAME_MODEL,
    Kind,
    Protocol,
    Task,
)
from benchmarks.results import Row
from benchmarks.work import Expectation, Variant

LORA_B_INIT = nnx.initializers.normal(LORA_B_DEVIATION)


def variant(kind: Kind, task: Task, protocol: Protocol, device: str) -> Variant:
    """Returns a task of `kind`, with a model of its own."""
    model = build(kind, protocol, device)
    norms = nnx.jit(jax_dora.norms)(model) if kind.keeps_norms else None
    if task == "inference" and kind.keeps_norms:
        model, norms = jax_dora.freeze(model), None
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    arguments = (trained, frozen, norms, _tokens(protocol))
    if task == "step":
        arguments += (OPTIMIZER.init(trained),)
    return Variant(
        "jax",
        kind.name,
        functools.partial(TASKS[task], graphdef, protocol.last),
        [arguments],
        check=functools.partial(_check, kind, protocol, device),
        compiler_options={"xla_gpu_enable_triton_gemm": kind.triton},
        whole=True,
    )


def build(kind: Kind, protocol: Protocol, device: str) -> Decoder:
    """Returns a model whose magnitudes stray from their norms, as after training."""
    style = Style(
        attention="cudnn" if device == "cuda" else "xla",
        fused_swiglu=kind.fused_swiglu,
    )
    if kind.method == "LoRA":
        style = style._replace(linear=functools.partial(LoRALinear, **_lora(protocol)))
    model = nnx.jit(lambda: Decoder(protocol, style, nnx.Rngs(0)))()
    if kind.method != "DoRA":
        return model
    rule = jax_dora.DoRARule(
        rf"layers/({'|'.join(PROJECTIONS)})",
        protocol.rank,
        protocol.alpha,
        use_rslora=True,
        adapter_dtype=jnp.bfloat16,
        lora_b_init=LORA_B_INIT,
    )
    rules = [rule]
    if kind.keeps_inner:
        # The last projection of a rematerialised layer, whose result nothing in the layer reads.
        others = rf"layers/({'|'.join(PROJECTIONS[:-1])})"
        rules = [dataclasses.replace(rule, path="layers/down_proj", keep_inner=True)]
        rules.append(dataclasses.replace(rule, path=others))
    model = jax_dora.apply_dora(model, rules, rngs=nnx.Rngs(1))
    magnitudes = nnx.state(model, jax_dora.DoRAParam)
    leaves, tree = jax.tree.flatten(magnitudes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        leaf * (1 + MAGNITUDE_DEVIATION * jax.random.normal(key, leaf.shape, leaf.dtype))
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(tree, moved))
    return model


def _lora(protocol: Protocol) -> dict[str, Any]:
    return {
        "rank": protocol.rank,
        "scale": protocol.alpha / protocol.rank**0.5,
        "b_init": LORA_B_INIT,
    }


def _tokens(protocol: Protocol) -> jax.Array:
    shape = (1, protocol.tokens + 1)
    return jax.random.randint(jax.random.key(2), shape, 0, protocol.vocabulary)


def _merge(graphdef: Any, trained: Any, frozen: Any, norms: Any) -> Decoder:
    model = nnx.merge(graphdef, trained, frozen)
    return model if norms is None else jax_dora.with_norms(model, norms)


def _inference(graphdef: Any, last: int, trained: Any, frozen: Any, norms: Any, tokens: jax.Array):
    model = _merge(graphdef, trained, frozen, norms)
    return model(tokens[:, :-1], last)


def _gradient(graphdef: Any, last: int, trained: Any, frozen: Any, norms: Any, tokens: jax.Array):
    """Returns the mean loss, and gradients like `trained`."""

    def of_adapters(trained: Any) -> jax.Array:
        return loss(_merge(graphdef, trained, frozen, norms), tokens, last)

    return jax.value_and_grad(of_adapters)(trained)


def _step(graphdef, last, trained, frozen, norms, tokens, optimizer):
    """Returns the loss, and adapters and optimizer after one update."""
    value, gradients = _gradient(graphdef, last, trained, frozen, norms, tokens)
    updates, optimizer = OPTIMIZER.update(gradients, optimizer, trained)
    return value, optax.apply_updates(trained, updates), optimizer


TASKS: dict[Task, Callable] = {"inference": _inference, "gradient": _gradient, "step": _step}


@functools.cache
def _check(kind: Kind, protocol: Protocol, device: str) -> Row:
    """Holds logits and adapters' gradients of a few layers against fp32, DoRA's weights formed."""
    protocol = dataclasses.replace(protocol, layers=CHECKED_LAYERS)
    model = build(kind, protocol, device)
    tokens = _tokens(protocol)
    style = Style(dtype=jnp.float32, fused_swiglu=False)
    if kind.method != "base":
        dense = functools.partial(Dense, dora=kind.method == "DoRA", **_lora(protocol))
        style = style._replace(linear=dense)
    reference = nnx.eval_shape(lambda: Decoder(protocol, style, nnx.Rngs(0)))
    values = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    filled = [
        (path, variable.replace(values[path][...].astype(jnp.float32)))
        for path, variable in nnx.to_flat_state(nnx.state(reference))
    ]
    reference = nnx.merge(nnx.graphdef(reference), nnx.from_flat_state(filled))

    norms = nnx.jit(jax_dora.norms)(model) if kind.keeps_norms else None
    found = _outcome(model, norms, protocol.last, tokens)
    with jax.default_matmul_precision("highest"):
        wanted = _outcome(reference, None, protocol.last, tokens)
    expected = {name: Expectation(value.double()) for name, value in wanted.items()}
    return judge(found, expected, exact=False, same=SAME_MODEL)


def _outcome(model: Decoder, norms: Any, last: int, tokens: jax.Array) -> dict[str, torch.Tensor]:
    """Returns logits, and the gradients of one kind of parameter in one vector, where they were
    computed: the host takes many seconds for as many numbers."""
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    def run(trained: Any, frozen: Any, norms: Any):
        arguments = (graphdef, last, trained, frozen, norms, tokens)
        return _inference(*arguments), _gradient(*arguments)[1]

    logits, gradients = run(trained, frozen, norms)
    parts: dict[str, list[torch.Tensor]] = {"logits": [to_torch(logits).float().flatten()]}
    for path, leaf in nnx.to_flat_state(gradients):
        parts.setdefault(f"d_{path[-1]}", []).append(to_torch(leaf[...]).float().flatten())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}
