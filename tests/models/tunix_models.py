"""Tunix's models, tiny, and what to call them with."""

import importlib
from typing import Any

import jax.numpy as jnp
from flax import nnx

from tests.whole_models import drawn

TOKENS = jnp.arange(10).reshape(2, 5) * 3 % 31
POSITIONS = jnp.broadcast_to(jnp.arange(5), (2, 5))
MASK = jnp.broadcast_to(jnp.tril(jnp.ones((5, 5), bool)), (2, 5, 5))
EXAMPLE = (TOKENS, POSITIONS, None, MASK)

_SIZES = {"num_layers": 1, "embed_dim": 8, "hidden_dim": 12, "num_heads": 4, "num_kv_heads": 2}
_HEADS = {"head_dim": 6, "vocab_size": 31, "rope_theta": 10_000, "norm_eps": 1e-6}
_GEMMA = {"head_dim": 8, "num_embed": 31}


def qwen3(**options: Any) -> nnx.Module:
    model = importlib.import_module("tunix.models.qwen3.model")
    return model.Qwen3(model.ModelConfig(**_SIZES | _HEADS | options), rngs=nnx.Rngs(0))


def qwen3_moe() -> nnx.Module:
    return qwen3(num_experts=3, num_experts_per_tok=2)


def llama3() -> nnx.Module:
    model = importlib.import_module("tunix.models.llama3.model")
    return model.Llama3(model.ModelConfig(**_SIZES, **_HEADS), rngs=nnx.Rngs(0))


def qwen2() -> nnx.Module:
    model = importlib.import_module("tunix.models.qwen2.model")
    return model.Qwen2(model.ModelConfig(**_SIZES, **_HEADS), rngs=nnx.Rngs(0))


def gemma2() -> nnx.Module:
    model = importlib.import_module("tunix.models.gemma.model")
    config = model.ModelConfig(
        **_SIZES,
        **_GEMMA,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=[model.AttentionType.GLOBAL],
        attn_logits_soft_cap=50.0,
    )
    return model.Gemma(config, rngs=nnx.Rngs(0))


def gemma3() -> nnx.Module:
    model = importlib.import_module("tunix.models.gemma3.model")
    config = model.ModelConfig(**_SIZES, **_GEMMA, sliding_window_size=4, param_dtype=jnp.float32)
    return model.Gemma3(config, rngs=nnx.Rngs(0))


def gemma4(**options: Any) -> nnx.Module:
    model = importlib.import_module("tunix.models.gemma4.model")
    settings = {
        "sliding_window_size": 4,
        "per_layer_input_dim": 4,
        "global_key_size": 8,
        "attention_pattern": (model.AttentionType.GLOBAL,),
    }
    config = model.ModelConfig(**_SIZES, **_GEMMA, **settings, **options)
    return model.Gemma4(config, rngs=nnx.Rngs(0))


def gemma4_moe() -> nnx.Module:
    return gemma4(
        enable_moe=True, num_experts=3, num_experts_per_tok=2, expert_dim=6, moe_dense_hidden_dim=10
    )


# The model, and how many of its weights are adapted or looked up, of how many.
MODELS = {
    "Qwen3": qwen3,
    "Qwen3 MoE": qwen3_moe,
    "Llama3": llama3,
    "Qwen2": qwen2,
    "Gemma2": gemma2,
    "Gemma3": gemma3,
    "Gemma4": gemma4,
    "Gemma4 MoE": gemma4_moe,
}


def made(name: str) -> nnx.Module:
    """Returns a model whose parameters are random: Tunix leaves some weights zero."""
    graphdef, state = nnx.split(nnx.eval_shape(MODELS[name]))
    return nnx.merge(graphdef, drawn(state))
