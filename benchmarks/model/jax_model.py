"""The model in JAX: scan over layers, checkpointing, cuDNN's attention; `jax_dora.models`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import torch
from flax import nnx

import jax_dora
from benchmarks.check import Check, judge
from benchmarks.model.protocol import Protocol, Task, Variant
from benchmarks.model.worker import Built, Side
from benchmarks.ops.inputs import to_torch
from benchmarks.work import Expectation
from jax_dora.models import CausalLM, DecoderConfig, LoRALinear, Rope, last_tokens_loss, make_model
from jax_dora.reuse import DoRANorm

# Of lora_b, so that s‖A B‖ is about 0.3 of ‖W‖ in a model whose weights have a deviation of 0.02.
LORA_B_DEVIATION = 0.0035
MAGNITUDE_DEVIATION = 0.05
# Two layers and the head, forward and backward, in bf16 where the reference has fp32: some twenty
# roundings of 2⁻⁸ in a chain, which add up like a root.
SAME_MODEL = 2.0**-5
EPS = 1e-6
INNER = "down_inner"
# Of these, inner of the last projection is kept, of this share of the tokens.
KEEP_INNER = {"dora, norm and inner kept": 1.0, "dora, norm and half of inner kept": 0.5}
KEEP_NORM = ("dora, norm kept", *KEEP_INNER)


class XLADoRA(jax_dora.DoRALinear):
    """A DoRA layer without a kernel of ours."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, implementation="xla", **options)


class DenseDoRA(jax_dora.DoRALinear):
    """The reference: W' formed, and the gradient left to autodiff; no formula of the package."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None, **_: Any) -> jax.Array:
        product = self.lora_a[...] @ self.lora_b[...]
        direction = self.kernel[...] + self.scale * product
        norm = jnp.sqrt(jnp.sum(jnp.square(direction), axis=0))
        g = self.magnitude[...] / jnp.maximum(jax.lax.stop_gradient(norm), EPS)
        return inputs @ (direction * g[None, :])


def side(variant: Variant, protocol: Protocol, device: str) -> Side:
    return Side(
        functools.partial(_check, variant, protocol, device),
        _tasks(variant, protocol, device),
    )


def _config(protocol: Protocol, device: str, **changes: Any) -> DecoderConfig:
    config = DecoderConfig(
        vocab_size=protocol.vocabulary,
        hidden_size=protocol.hidden,
        intermediate_size=protocol.intermediate,
        num_hidden_layers=protocol.layers,
        num_attention_heads=protocol.heads,
        num_key_value_heads=protocol.kv_heads,
        head_dim=protocol.head_dim,
        rope=Rope(theta=1_000_000.0),
        qk_norm=True,
        attention="cudnn" if device == "cuda" else "xla",
        remat_keeps=(INNER,),
    )
    return dataclasses.replace(config, **changes)


def _linear(kind: str, protocol: Protocol, adapter_dtype: Any) -> Callable[..., Any]:
    options: dict[str, Any] = {
        "rank": protocol.rank,
        "alpha": protocol.alpha,
        "use_rslora": True,
        "adapter_dtype": adapter_dtype,
        "lora_b_init": nnx.initializers.normal(LORA_B_DEVIATION),
    }
    if kind == "dora" or kind in KEEP_NORM:
        return functools.partial(jax_dora.DoRALinear, **options)
    match kind:
        case "base":
            return nnx.Linear
        case "lora":
            return functools.partial(LoRALinear, **options)
        case "xla" | "xla, norm twice":
            return functools.partial(XLADoRA, **options)
        case "dense":
            return functools.partial(DenseDoRA, **options)
    raise ValueError(f"kind is {kind!r}, no kind of model in JAX")


def _build(config: DecoderConfig, kind: str, protocol: Protocol) -> CausalLM:
    """A model whose magnitudes stray from their norms, as after training."""
    model = make_model(config, linear=_linear(kind, protocol, config.dtype))

    @nnx.jit
    def stray(model: CausalLM) -> None:
        magnitudes = nnx.state(model, jax_dora.DoRAParam)
        leaves, tree = jax.tree.flatten(magnitudes)
        keys = jax.random.split(jax.random.key(1), max(len(leaves), 1))
        moved = [
            leaf * (1 + MAGNITUDE_DEVIATION * jax.random.normal(key, leaf.shape, leaf.dtype))
            for key, leaf in zip(keys, leaves, strict=False)
        ]
        nnx.update(model, jax.tree.unflatten(tree, moved))

    stray(model)
    if kind in KEEP_NORM:
        nnx.jit(jax_dora.keep_norms)(model)
    if kind in KEEP_INNER:
        # The last projection of a rematerialised layer.
        model.model.layers.mlp.down_proj.inner_name = (INNER, KEEP_INNER[kind])
    return model


def _tokens(protocol: Protocol, steps: int) -> jax.Array:
    shape = (steps, 1, protocol.tokens + 1)
    return jax.random.randint(jax.random.key(2), shape, 0, protocol.vocabulary)


def _inference(graphdef: Any, last: int, trained: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
    model = nnx.merge(graphdef, trained, frozen)
    return model.logits(model.model(tokens[:, :-1])[:, -last:])


def _gradient(graphdef: Any, last: int, trained: Any, frozen: Any, tokens: jax.Array):
    """(mean loss, gradients like `trained`)."""

    def loss(trained: Any) -> jax.Array:
        found = last_tokens_loss(nnx.merge(graphdef, trained, frozen), tokens, last)
        return found.total / found.weight

    return jax.value_and_grad(loss)(trained)


def _accumulation(graphdef: Any, last: int, trained: Any, frozen: Any, tokens: jax.Array):
    """The micro-steps' gradients added up, after one look at whether kept norms still hold."""
    model = nnx.merge(graphdef, trained, frozen)
    if jax.tree.leaves(nnx.state(model, DoRANorm)):
        jax_dora.refresh_norms(model)
        frozen = nnx.split(model, nnx.LoRAParam, ...)[2]

    def micro_step(total: Any, tokens: jax.Array):
        loss, gradients = _gradient(graphdef, last, trained, frozen, tokens)
        return jax.tree.map(jnp.add, total, gradients), loss

    total, losses = jax.lax.scan(micro_step, jax.tree.map(jnp.zeros_like, trained), tokens)
    return losses, total


TASKS: dict[Task, Callable] = {
    "inference": _inference,
    "gradient": _gradient,
    "accumulation": _accumulation,
}


def _compile(variant: Variant, function: Callable, *arguments: Any) -> jax.stages.Compiled:
    options = {}
    if arguments and jax.default_backend() == "gpu":
        options = {"xla_gpu_enable_triton_gemm": variant.triton}
    with _remat_keeps(variant.kind):
        return jax.jit(function).lower(*arguments).compile(compiler_options=options)


@contextlib.contextmanager
def _remat_keeps(kind: str) -> Iterator[None]:
    """ "norm twice" is checkpointing that does not know of the norm."""
    if kind != "xla, norm twice":
        yield
        return
    nothing = jax.checkpoint_policies.nothing_saveable
    with mock.patch.object(jax_dora, "remat_policy", return_value=nothing, create=True):
        yield


def _tasks(variant: Variant, protocol: Protocol, device: str) -> Iterator[Built]:
    model = _build(_config(protocol, device), variant.kind, protocol)
    micro_steps = _tokens(protocol, protocol.micro_steps)
    for task in variant.tasks:
        freezes = task == "inference" and variant.kind in KEEP_NORM
        measured = jax_dora.freeze(model) if freezes else model
        graphdef, trained, frozen = nnx.split(measured, nnx.LoRAParam, ...)
        tokens = micro_steps if task == "accumulation" else micro_steps[0]
        arguments = (trained, frozen, tokens)
        function = functools.partial(TASKS[task], graphdef, protocol.last)
        compiled = _compile(variant, function, *arguments)
        yield Built(
            task,
            functools.partial(compiled, *arguments),
            functools.partial(_planned_bytes, compiled),
        )


def _planned_bytes(compiled: jax.stages.Compiled) -> int | None:
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _check(variant: Variant, protocol: Protocol, device: str) -> Check:
    """Logits and adapters' gradients of the first layers against fp32, DoRA's weights formed."""
    config = _config(protocol, device, num_hidden_layers=protocol.checked_layers)
    model = _build(config, variant.kind, protocol)
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    tokens = _tokens(protocol, 1)[0]

    wide_config = dataclasses.replace(config, dtype=jnp.float32, attention="xla")
    wide_kind = "dense" if variant.method == "DoRA" else variant.kind
    wide_model = nnx.eval_shape(
        lambda: CausalLM(
            wide_config, linear=_linear(wide_kind, protocol, jnp.float32), rngs=nnx.Rngs(0)
        )
    )
    wide_graphdef = nnx.graphdef(wide_model)

    def run(graphdef: Any, trained: Any, frozen: Any, tokens: jax.Array):
        logits = _inference(graphdef, protocol.last, trained, frozen, tokens)
        _, gradients = _gradient(graphdef, protocol.last, trained, frozen, tokens)
        return logits, gradients

    compiled = _compile(variant, functools.partial(run, graphdef), trained, frozen, tokens)
    found = _named(*compiled(trained, frozen, tokens))

    frozen = nnx.filter_state(frozen, nnx.Not(DoRANorm))
    trained, frozen = _widened(trained), _widened(frozen)
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(functools.partial(run, wide_graphdef))(trained, frozen, tokens)
    wanted = {name: Expectation(value.double()) for name, value in _named(*reference).items()}
    return judge(found, wanted, exact=False, same=SAME_MODEL)


def _widened(state: Any) -> Any:
    def widen(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(widen, state)


def _named(logits: jax.Array, gradients: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of one kind of parameter in one vector, where they were computed:
    the host takes many seconds for as many numbers."""
    parts: dict[str, list[torch.Tensor]] = {"logits": [to_torch(logits).float().flatten()]}
    for path, leaf in nnx.to_flat_state(gradients):
        parts.setdefault(f"d_{path[-1]}", []).append(to_torch(leaf[...]).float().flatten())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}
