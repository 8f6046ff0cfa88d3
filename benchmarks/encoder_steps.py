"""Training steps of DeBERTa and BERT, by transformers and by `jax_dora.lm.encoder`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from flax import nnx

from benchmarks.clock import synchronise
from jax_dora.lm.encoder import DebertaConfig, SequenceClassifier

LEARNING_RATE = 1e-5


class Encoder(NamedTuple):
    """The dimensions of an encoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int = 128_100
    buckets: int = 256


class Side(NamedTuple):
    """What computes a step.

    Attributes:
      model: "deberta" or "bert".
      attention: the implementation of the attention in jax_dora; None in transformers.
      compiled: what torch.compile compiles, "whole" models or, once for all of them, "layers".
      has_options: whether jax_dora's step is compiled with the model's `step_options`.
      keeps_scores: whether a step keeps the scores of all layers in memory.
    """

    name: str
    model: str
    attention: str | None = None
    compiled: str | None = None
    has_options: bool = True
    keeps_scores: bool = False


def _config(encoder: Encoder, model: str) -> dict[str, Any]:
    positions = {
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": encoder.buckets,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    }
    return {
        "vocab_size": encoder.vocabulary,
        "hidden_size": encoder.hidden,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "intermediate_size": 4 * encoder.hidden,
        "max_position_embeddings": 512,
        **(positions if model == "deberta" else {}),
    }


def _inputs(encoder: Encoder, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, encoder.vocabulary, shape)
    return tokens.astype(np.int32), rng.integers(0, 2, shape[0]).astype(np.int32)


def torch_step(
    encoder: Encoder, side: Side, shape: tuple[int, int], device: str
) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    kind = "DebertaV2" if side.model == "deberta" else "Bert"
    config = getattr(transformers, f"{kind}Config")(**_config(encoder, side.model))
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForSequenceClassification")(config).train()
        tokens, labels = (torch.tensor(one).long() for one in _inputs(encoder, shape))
        mask = torch.ones_like(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=device == "cuda")
    forward: Any = torch.compile(model) if side.compiled == "whole" else model
    if side.compiled == "layers":
        for layer in getattr(model, model.base_model_prefix).encoder.layer:
            layer.compile()

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _deberta(encoder: Encoder, side: Side) -> DebertaConfig:
    config = DebertaConfig.from_hf({"model_type": "deberta-v2", **_config(encoder, side.model)})
    options: dict[str, Any] = {"attention": side.attention}
    options |= {"type_vocab_size": 2} if side.model == "bert" else {}
    return dataclasses.replace(config, dtype=jnp.bfloat16, param_dtype=jnp.float32, **options)


def jax_step(
    encoder: Encoder, side: Side, shape: tuple[int, int], device: str
) -> Callable[[], jax.Array]:
    config = _deberta(encoder, side)
    # Not in one program, which would take as long to compile as the step.
    model = SequenceClassifier(config, rngs=nnx.Rngs(0))
    model.train()
    options = dict(model.step_options) if side.has_options else {}
    graphdef, parameters, streams = nnx.split(model, nnx.Param, ...)
    del model
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.01)
    tokens, labels = map(jnp.asarray, _inputs(encoder, shape))
    mask = jnp.ones(tokens.shape, bool)

    def train(parameters: Any, state: Any, streams: Any) -> Any:
        def loss_of(parameters: Any) -> Any:
            model = nnx.merge(graphdef, parameters, streams, copy=True)
            logits = model(tokens, mask).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), nnx.state(model, nnx.RngState)

        (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return loss, optax.apply_updates(parameters, updates), state, new

    held = [parameters, jax.jit(optimizer.init)(parameters), streams]
    del parameters, streams
    jitted = jax.jit(train, donate_argnums=(0, 1, 2), compiler_options=options)
    compiled = jitted.lower(*held).compile()

    def step() -> jax.Array:
        loss, *held[:] = compiled(*held)
        return loss

    synchronise(held)
    return step
