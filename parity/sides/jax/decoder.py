"""`jax_dora.models` with jax_dora, or without an adapter, on weights it is given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch import Tensor

import jax_dora
from jax_dora.models import CausalLM, DecoderConfig, Rope, rope
from parity.model.sizes import ADAPTER, Run
from parity.model.weights import Layer, Result, Weights, rope_frequencies
from parity.sides.jax.operators import interpreted, to_jax, to_torch


def compute(run: Run, weights: Weights, implementation: str | None) -> Result:
    """Returns what the decoder computes, `jax_dora.DoRALinear` being every projection; "base" is
    the decoder without adapters."""
    kernels = implementation == "mosaic"
    linear: Any = functools.partial(
        jax_dora.DoRALinear,
        rank=run.sizes.rank,
        alpha=run.sizes.alpha,
        use_rslora=True,
        adapter_dtype=jnp.dtype(run.dtype),
        implementation=implementation,
    )
    if implementation == "base":
        linear = nnx.Linear
    config = _config(run, weights.tokens.is_cuda)
    abstract = nnx.eval_shape(lambda: CausalLM(config, linear=linear, rngs=nnx.Rngs(0)))
    graphdef, adapter, frozen = nnx.split(abstract, nnx.LoRAParam, ...)
    values = _Values(weights)
    adapter, frozen = values.fill(adapter), values.fill(frozen)
    tokens = to_jax(weights.tokens.int())

    def loss(adapter: Any, frozen: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, adapter, frozen)
        logits = model.logits(model.model(tokens[:, :-1])[0, -run.last :])
        scores = jax.nn.log_softmax(logits.astype(jnp.float32))
        targets = tokens[0, -run.last :, None]
        return -jnp.take_along_axis(scores, targets, axis=-1).mean(), logits

    program = jax.value_and_grad(loss, has_aux=True) if jax.tree.leaves(adapter) else loss
    with _surroundings(run, weights, interpret=kernels and not weights.tokens.is_cuda):
        # Triton's matrix products take XLA long to tune, and none of ours is among them.
        options = {"xla_gpu_enable_triton_gemm": False} if weights.tokens.is_cuda else {}
        arguments = (adapter, frozen, tokens)
        compiled = jax.jit(program).lower(*arguments).compile(compiler_options=options)
        found = jax.block_until_ready(compiled(*arguments))
    (value, logits), gradients = found if jax.tree.leaves(adapter) else (found, {})
    return Result(to_torch(logits), float(value), _gradients(gradients))


@contextlib.contextmanager
def _surroundings(run: Run, weights: Weights, *, interpret: bool) -> Iterator[None]:
    # A last place of a frequency is 10⁻⁴ of a radian at position 4096.
    frequencies = rope_frequencies(run.sizes, weights.tokens.device).cpu().numpy()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(rope, "rotate", _rotate))
        stack.enter_context(mock.patch.object(rope, "frequencies", return_value=frequencies))
        # jax.nn.dot_product_attention's own need in bf16.
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        if run.dtype == "float32":
            stack.enter_context(jax.default_matmul_precision("highest"))
        if interpret:
            stack.enter_context(interpreted())
        yield


def _rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotates as transformers does, with cosine and sine rounded to the activations' dtype: in bf16
    that is a larger error than all other rounding of the rotation, and no difference between the
    frameworks."""
    if x.dtype == jnp.bfloat16:
        # A cast there and back XLA may drop.
        cosine, sine = (jax.lax.reduce_precision(v, 8, 7) for v in (cosine, sine))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(halves, axis=-1).astype(x.dtype)


def _config(run: Run, cuda: bool) -> DecoderConfig:
    sizes = run.sizes
    return DecoderConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=run.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=sizes.epsilon,
        rope=Rope(theta=sizes.rope_theta),
        qk_norm=True,
        dtype=jnp.dtype(run.dtype),
        attention="cudnn" if cuda and run.dtype == "bfloat16" else "xla",
        # The interpreter's callbacks are no part of what can be computed again.
        remat=cuda,
    )


class _Values:
    """The arrays of the decoder's state: Flax's layout, the layers stacked."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def fill(self, state: Any) -> Any:
        """The abstract `state` with its values."""
        flat = nnx.to_flat_state(state)
        filled = []
        for path, variable in flat:
            array = to_jax(self._tensor(path))
            if array.shape != variable.shape or array.dtype != variable.dtype:
                raise ValueError(
                    f"{'/'.join(map(str, path))} is {array.dtype}{array.shape} here and "
                    f"{variable.dtype}{variable.shape} in the decoder"
                )
            filled.append((path, variable.replace(array)))
        return nnx.from_flat_state(filled)

    def _tensor(self, path: tuple[Any, ...]) -> Tensor:
        match path:
            case ("model", "embed_tokens", "embedding"):
                return self._weights.embedding
            case ("model", "norm", "scale"):
                return self._weights.norm
            case ("lm_head", "kernel"):
                return self._weights.head.T
            case ("model", "layers", *_, name, "scale"):
                return self._stacked(lambda layer: layer.norms[name])
            case ("model", "layers", _, name, "kernel"):
                return self._stacked(lambda layer: layer.projections[name].weight.T)
            case ("model", "layers", _, name, "magnitude"):
                return self._stacked(lambda layer: layer.projections[name].magnitude)
            case ("model", "layers", _, name, kind) if kind in ADAPTER:
                return self._stacked(lambda layer: getattr(layer.projections[name], kind).T)
        raise ValueError(f"the decoder has {'/'.join(map(str, path))}, and the weights have not")

    def _stacked(self, of: Callable[[Layer], Tensor]) -> Tensor:
        return torch.stack([of(layer) for layer in self._weights.layers])


def _gradients(state: Any) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for path, variable in nnx.to_flat_state(state) if state else ():
        *_, name, kind = path
        stacked = to_torch(variable[...])
        found[f"{name}.{kind}"] = [
            gradient.T if gradient.ndim == 2 else gradient for gradient in stacked
        ]
    return found
