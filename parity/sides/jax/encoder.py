"""The encoder in flax.nnx: BERT (arXiv 1810.04805), mean pooling, unit-length embeddings.

Its projections are `jax_dora.DoRALinear`, or the same computation in plain jnp.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

from jax_dora import DoRALinear
from parity import minilm
from parity.minilm import ADAPTER, Adapter, Evaluation
from parity.sides.jax.operators import plain_linear

Project = Callable[[str, nnx.Linear], nnx.Module]


class Encoder(nnx.Module):
    """The sentence encoder; `project(name, linear)` creates the module for each of the 36
    projections."""

    def __init__(self, project: Project, dtype: str = "float32") -> None:
        arrays = {
            name: jnp.asarray(array, dtype)
            for name, array in minilm.weights().items()
            if array.dtype.kind == "f"
        }
        names = minilm.projection_names()
        self.weights = nnx.Dict(
            {
                name: nnx.Param(array)
                for name, array in arrays.items()
                if not name.startswith("pooler") and name.rpartition(".")[0] not in names
            }
        )
        self.projections = nnx.Dict(
            {
                name: project(name, _linear(arrays[f"{name}.weight"].T, arrays[f"{name}.bias"]))
                for name in names
            }
        )

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns fp32 embeddings `[sentences, hidden]` for ids and mask `[sentences, tokens]`."""
        hidden = self.hidden(ids, mask).astype(jnp.float32)
        weight = mask[:, :, None].astype(jnp.float32)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    def hidden(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the hidden states of the last layer, `[sentences, tokens, hidden]`."""
        words, positions, types = (
            self.weights[f"embeddings.{name}_embeddings.weight"][...]
            for name in ("word", "position", "token_type")
        )
        x = words[ids] + types[None, :1] + positions[None, : ids.shape[1]]
        x = self._layer_norm("embeddings", x)
        attend = mask[:, None, None, :].astype(bool)
        for layer in range(minilm.config().num_hidden_layers):
            x = self._layer(f"encoder.layer.{layer}", x, attend)
        return x

    def _layer(self, prefix: str, x: jax.Array, attend: jax.Array) -> jax.Array:
        def project(name: str, value: jax.Array) -> jax.Array:
            return self.projections[f"{prefix}.{name}"](value)

        split = (*x.shape[:2], minilm.config().num_attention_heads, -1)
        q, k, v = (
            project(f"attention.self.{name}", x).reshape(split)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(q, k, v, mask=attend).reshape(x.shape)
        mixed = project("attention.output.dense", mixed)
        x = self._layer_norm(f"{prefix}.attention.output", x + mixed)
        wide = jax.nn.gelu(project("intermediate.dense", x), approximate=False)
        return self._layer_norm(f"{prefix}.output", x + project("output.dense", wide))

    def _layer_norm(self, prefix: str, x: jax.Array) -> jax.Array:
        # nnx.LayerNorm rounds to the parameters' dtype between its steps; torch rounds once.
        scale, shift = (
            self.weights[f"{prefix}.LayerNorm.{name}"][...].astype(jnp.float32)
            for name in ("weight", "bias")
        )
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + minilm.config().layer_norm_eps)
        return (normal * scale[None, None] + shift[None, None]).astype(x.dtype)


class PlainDoRA(DoRALinear):
    """An adapted projection in plain jnp."""

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore
        assert self.bias is not None
        adapter = (self.lora_a[...], self.lora_b[...], self.magnitude[...])
        return plain_linear(inputs, self.kernel[...], *adapter, minilm.SCALE, self.bias[...])


def adapted(
    adapter: Adapter,
    dtype: str,
    implementation: str | Mapping[str, str] | None,
    device: str = "cpu",
) -> Encoder:
    """Returns an encoder with the adapter, on JAX's default device.

    `implementation` is one for all projections, or a mapping from projections to implementations.
    """
    names = minilm.by_projection(implementation)
    options = {"rank": minilm.RANK, "alpha": minilm.SCALE * minilm.RANK, "rngs": nnx.Rngs(0)}

    def project(name: str, linear: nnx.Linear) -> nnx.Module:
        if names.get(name) == "plain":
            layer = PlainDoRA.from_linear(linear, **options)
        else:
            layer = DoRALinear.from_linear(linear, **options, implementation=names.get(name))
        for key, value in adapter[name].items():
            getattr(layer, key)[...] = jnp.asarray(value.T.numpy() if value.ndim == 2 else value)
        return layer

    return Encoder(project, dtype)


def evaluate(encoder: Encoder, batch: minilm.Batch, gradients: bool) -> Evaluation:
    """Runs a forward pass and, if `gradients` is set, a backward pass."""
    vectors = {}
    with jax.default_matmul_precision("highest"):
        if gradients:
            (_, embeddings), cotangents = _loss_and_gradients(encoder, *_arrays(batch))
            by_name = _adapter_of(cotangents).values()
            for key in ADAPTER:
                vectors[key] = torch.cat([values[key].double().flatten() for values in by_name])
        else:
            embeddings = nnx.jit(Encoder.__call__)(encoder, *_arrays(batch))
    return Evaluation(torch.tensor(np.asarray(embeddings, np.float64)), vectors)


def train(encoder: Encoder, batch: minilm.Batch, steps: int) -> tuple[list[float], Adapter]:
    """Returns the loss before every step, and the adapter after the last step."""
    adamw = optax.adamw(
        minilm.LEARNING_RATE, *minilm.BETAS, eps=minilm.ADAM_EPS, weight_decay=minilm.WEIGHT_DECAY
    )
    optimizer = nnx.Optimizer(encoder, adamw, wrt=nnx.LoRAParam)
    update, losses = nnx.jit(nnx.Optimizer.update), []
    for _ in range(steps):
        with jax.default_matmul_precision("highest"):
            (loss, _), gradients = _loss_and_gradients(encoder, *_arrays(batch))
        update(optimizer, encoder, gradients)
        losses.append(float(loss))
    return losses, _adapter_of(nnx.state(encoder, nnx.LoRAParam))


@nnx.jit
def _loss_and_gradients(encoder: Encoder, ids: jax.Array, mask: jax.Array) -> Any:
    def loss(encoder):
        embeddings = encoder(ids, mask)
        firsts, seconds = jnp.split(embeddings, 2)
        logits = firsts @ seconds.T / minilm.TEMPERATURE
        targets = jnp.arange(len(logits))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), embeddings

    adapter = nnx.DiffState(0, nnx.LoRAParam)
    return nnx.value_and_grad(loss, argnums=adapter, has_aux=True)(encoder)


def _arrays(batch: minilm.Batch) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(batch.ids, jnp.int32), jnp.asarray(batch.mask, jnp.int32)


def _adapter_of(state: nnx.State) -> Adapter:
    """Returns the adapters of a state, as torch tensors in torch's layout."""
    projections = state["projections"]
    return {
        name: {k: torch.tensor(np.asarray(projections[name][k][...]).T) for k in ADAPTER}
        for name in minilm.projection_names()
    }


def _linear(kernel: jax.Array, bias: jax.Array) -> nnx.Linear:
    linear = nnx.eval_shape(lambda: nnx.Linear(*kernel.shape, rngs=nnx.Rngs(0)))
    linear.kernel, linear.bias = nnx.Param(kernel), nnx.Param(bias)
    return linear
