"""The tasks of the model: the decoder with `jax_dora.apply_dora`, or with LoRA."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx

import jax_dora
from benchmarks.model import decoder
from benchmarks.model.adapters import Dense, LoRALinear, dora_rule
from benchmarks.model.decoder import OPTIMIZER, Decoder, Style
from benchmarks.model.protocol import Kind, Protocol, Task
from benchmarks.results import Row
from benchmarks.work import Expectation, Variant, judge
from parity.sides.jax.operators import to_torch

# The correctness check runs this many layers of the full width, in bf16 and in fp32.
CHECKED_LAYERS = 2
MAGNITUDE_DEVIATION = 0.05


def variant(kind: Kind, task: Task, protocol: Protocol, device: str) -> Variant:
    """Returns a task of `kind`, with a new model."""
    model = build(kind, protocol, device)
    norms = nnx.jit(jax_dora.norms)(model) if kind.keeps_norms else None
    if task == "inference" and kind.keeps_norms:
        model, norms = jax_dora.freeze(model), None
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    loss = functools.partial(_loss, last=protocol.last)
    step, optimizer = functools.partial(_inference, graphdef, protocol.last), ()
    if task != "inference":
        of_task = decoder.gradient if task == "gradient" else decoder.update
        step = functools.partial(of_task, graphdef, loss)
        optimizer = () if task == "gradient" else (OPTIMIZER.init(trained),)
    return Variant(
        "jax",
        kind.name,
        step,
        [(trained, frozen, *optimizer, norms, _tokens(protocol))],
        check=functools.partial(_check, kind, protocol, device),
        compiler_options={"xla_gpu_enable_triton_gemm": kind.triton},
        peak_memory=True,
    )


def build(kind: Kind, protocol: Protocol, device: str) -> Decoder:
    """Returns a model whose magnitudes differ from the norms, as after training."""
    attention = "cudnn" if device == "cuda" else "xla"
    style = Style(attention=attention, fused_swiglu=kind.fused_swiglu)
    if kind.method == "LoRA":
        lora = functools.partial(LoRALinear, rank=protocol.rank, scale=protocol.scale)
        style = style._replace(linear=lora)
    model = nnx.jit(lambda: Decoder(protocol, style, nnx.Rngs(0)))()
    if kind.method == "LoRA":
        return model
    rule = dora_rule(protocol, None if kind.keeps_inner else False)
    model = jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(1))
    magnitudes = nnx.state(model, jax_dora.DoRAParam)
    leaves, tree = jax.tree.flatten(magnitudes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        leaf * (1 + MAGNITUDE_DEVIATION * jax.random.normal(key, leaf.shape, leaf.dtype))
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(tree, moved))
    return model


def _tokens(protocol: Protocol) -> jax.Array:
    shape = (1, protocol.tokens + 1)
    return jax.random.randint(jax.random.key(2), shape, 0, protocol.vocabulary)


def _with_norms(model: Decoder, norms: Any) -> Decoder:
    return model if norms is None else jax_dora.with_norms(model, norms)


def _inference(graphdef: Any, last: int, trained: Any, frozen: Any, norms: Any, tokens: jax.Array):
    model = _with_norms(nnx.merge(graphdef, trained, frozen), norms)
    return model(tokens[:, :-1], last)


def _loss(model: Decoder, norms: Any, tokens: jax.Array, last: int) -> jax.Array:
    return decoder.loss(_with_norms(model, norms), tokens, last)


@functools.cache
def _check(kind: Kind, protocol: Protocol, device: str) -> Row:
    """Returns the verdict on the logits and the adapters' gradients of a few layers, compared with
    an fp32 model that forms the adapted weights."""
    protocol = dataclasses.replace(protocol, layers=CHECKED_LAYERS)
    model = build(kind, protocol, device)
    tokens = _tokens(protocol)
    options = {"rank": protocol.rank, "scale": protocol.scale, "dora": kind.method == "DoRA"}
    dense = functools.partial(Dense, **options)
    style = Style(dtype=jnp.float32, fused_swiglu=False, linear=dense)
    reference = nnx.eval_shape(lambda: Decoder(protocol, style, nnx.Rngs(0)))
    values = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    filled = [
        (path, variable.replace(values[path][...].astype(jnp.float32)))
        for path, variable in nnx.to_flat_state(nnx.state(reference))
    ]
    reference = nnx.merge(nnx.graphdef(reference), nnx.from_flat_state(filled))

    norms = nnx.jit(jax_dora.norms)(model) if kind.keeps_norms else None
    found = _logits_and_gradients(model, norms, protocol.last, tokens)
    with jax.default_matmul_precision("highest"):
        wanted = _logits_and_gradients(reference, None, protocol.last, tokens)
    expected = {name: Expectation(value.double()) for name, value in wanted.items()}
    return judge(found, expected, exact=False)


def _logits_and_gradients(
    model: Decoder, norms: Any, last: int, tokens: jax.Array
) -> dict[str, torch.Tensor]:
    """Returns the logits, and one vector of gradients for each kind of parameter.

    All stay on the device: the host would take many seconds for this many numbers.
    """
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    def run(*arrays: Any):
        loss = functools.partial(_loss, last=last)
        gradients = decoder.gradient(graphdef, loss, *arrays)[1]
        return _inference(graphdef, last, *arrays), gradients

    logits, gradients = run(trained, frozen, norms, tokens)
    parts: dict[str, list[torch.Tensor]] = {"logits": [to_torch(logits).float().flatten()]}
    for path, leaf in nnx.to_flat_state(gradients):
        parts.setdefault(f"d_{path[-1]}", []).append(to_torch(leaf[...]).float().flatten())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}
