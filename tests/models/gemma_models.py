"""gemma's linen models, tiny, and what to call them with."""

import importlib
import importlib.machinery
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.whole_models import drawn

TOKENS = jnp.arange(10).reshape(2, 5) * 3 % 28 + 3
EXAMPLE = (TOKENS,)

_SIZES = {"num_embed": 31, "embed_dim": 8, "hidden_dim": 12, "num_heads": 4, "head_dim": 6}
_NORMS = {"use_post_attn_norm": True, "use_post_ffw_norm": True, "sliding_window_size": 4}


def _gemma(name: str) -> Any:
    """Returns a module of the package. It imports kauldron, which imports two packages, one of them
    of 2 GB, of which gemma's models need the name of a class alone."""
    for absent in ("tensorflow", "clu", "clu.data", "clu.data.dataset_iterator"):
        if absent not in sys.modules:
            sys.modules[absent] = module = types.ModuleType(absent)
            module.__spec__ = importlib.machinery.ModuleSpec(absent, None, is_package=True)
            module.__getattr__ = _no_class
    try:
        return importlib.import_module(name)
    finally:
        for absent in ("tensorflow", "clu", "clu.data", "clu.data.dataset_iterator"):
            if isinstance(getattr(sys.modules.get(absent), "__getattr__", None), type(_no_class)):
                del sys.modules[absent]


def _no_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def _transformer(package: str = "gemma.gm.nn", **options: Any) -> nn.Module:
    model, config, modules = (
        _gemma(f"{package}.{name}") for name in ("_transformer", "_config", "_modules")
    )
    kinds = modules.AttentionType
    settings = {
        "attention_types": (kinds.LOCAL_SLIDING, kinds.GLOBAL),
        "final_logit_softcap": None,
        **_SIZES,
        **_NORMS,
        **options,
    }
    return model.Transformer(
        config=config.TransformerConfig(**settings), dtype=jnp.float32, tokens="tokens"
    )


def gemma2() -> nn.Module:
    return _transformer(
        num_kv_heads=4,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        transpose_gating_einsum=True,
    )


def gemma3() -> nn.Module:
    return _transformer(num_kv_heads=2, use_qk_norm=True)


def gemma4(**options: Any) -> nn.Module:
    return _transformer(
        "gemma.gm.nn.gemma4",
        num_kv_heads=2,
        global_key_size=6,
        global_rope_proportion=1.0,
        local_rope_proportion=1.0,
        **options,
    )


def gemma4_moe() -> nn.Module:
    return gemma4(
        enable_moe=True, num_experts=3, expert_dim=5, top_k_experts=2, moe_dense_hidden_dim=7
    )


MODELS = {"Gemma2": gemma2, "Gemma3": gemma3, "Gemma4": gemma4, "Gemma4 MoE": gemma4_moe}


def made(name: str) -> tuple[nn.Module, Any]:
    """Returns a model and its variables, which are random."""
    model = MODELS[name]()
    return model, drawn(jax.eval_shape(model.init, jax.random.key(0), TOKENS))
