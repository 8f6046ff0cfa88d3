"""MaxText's models, tiny, and what to call them with; and a linen decoder of its layers. Layers are
stacked along axis 1, as MaxText does (`param_scan_axis`)."""

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

WIDTH = 6
TOKENS = jnp.arange(10).reshape(2, 5) * 3 % 31
_INPUTS = (TOKENS, jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.ones((2, 5), jnp.int32))

_SIZES = {
    "base_emb_dim": 8,
    "base_mlp_dim": 12,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 6,
    "max_target_length": 5,
    "per_device_batch_size": 2,
    "vocab_size": 31,
}
_HERE = {
    "attention": "dot_product",
    "dtype": "float32",
    "enable_checkpointing": False,
    "hardware": "cpu",
    "log_config": False,
    "matmul_precision": "highest",
    "run_name": "tiny",
    "skip_jax_distributed_system": True,
    "weight_dtype": "float32",
}
_EXPERTS = {
    "base_moe_mlp_dim": 12,
    "capacity_factor": -1,
    "decoder_block": "mixtral",
    "megablox": False,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "sparse_matmul": False,
}
# As Llama and as Mixtral; scanned and rematerialised. DeepSeek's dense layers are a stack of one,
# and the local layers of Qwen3-Next and Gemma 4 are a stack in each layer of a stack.
MODELS = {
    "decoder": {},
    "MoE": _EXPERTS,
    "DeepSeek": _EXPERTS
    | {
        "attention_type": "mla",
        "base_num_decoder_layers": 3,
        "base_num_kv_heads": 4,
        "decoder_block": "deepseek",
        "first_num_dense_layers": 1,
        "kv_lora_rank": 4,
        "q_lora_rank": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "shared_experts": 1,
        "v_head_dim": 4,
    },
    "Qwen3-Next": _EXPERTS
    | {
        "base_num_decoder_layers": 4,
        "decoder_block": "qwen3_next",
        "gdn_key_head_dim": 4,
        "gdn_num_key_heads": 2,
        "gdn_num_value_heads": 2,
        "gdn_value_head_dim": 4,
        "head_dim": 8,
        "inhomogeneous_layer_cycle_interval": 2,
        "partial_rotary_factor": 0.5,
    },
    "Gemma 4": {
        "base_num_decoder_layers": 12,
        "decoder_block": "gemma4",
        "global_head_dim": 8,
        "head_dim": 8,
        "sliding_window_size": 4,
    },
}


def _config(**options: Any) -> Any:
    maxtext, pyconfig = (
        importlib.import_module(n) for n in ("maxtext", "maxtext.configs.pyconfig")
    )
    base = Path(maxtext.__file__).with_name("configs") / "base.yml"
    return pyconfig.initialize(["", str(base)], **(_SIZES | _HERE | options))


def _mesh(config: Any) -> Any:
    return importlib.import_module("maxtext.utils.maxtext_utils").get_mesh_from_config(config)


def made(name: str) -> nnx.Module:
    """Returns a whole model."""
    return _model(_config(**MODELS[name]))


def _model(config: Any) -> nnx.Module:
    models = importlib.import_module("maxtext.models.models")
    return models.Transformer(config, _mesh(config), None, rngs=nnx.Rngs(0))


def by_provider(**lora: Any) -> tuple[nnx.Module, nnx.Module]:
    """Returns a decoder, and what MaxText's trainer makes of it with this `lora` in its
    configuration."""
    config = _config(lora={"enable_lora": True, "lora_rank": 4, "lora_alpha": 8.0, **lora})
    base, utils = _model(config), importlib.import_module("maxtext.utils.lora_utils")
    return base, utils.apply_lora_to_model(base, _mesh(config), config)


def call(model: Any) -> jax.Array:
    """Returns a model's logits."""
    return model(*_INPUTS, enable_dropout=False)


def experts(**options: Any) -> nnx.Module:
    """Returns MaxText's experts with their gate, `RoutedMoE`."""
    moe, initializers = (
        importlib.import_module(f"maxtext.layers.{n}") for n in ("moe", "initializers")
    )
    config = _config(**_EXPERTS | options)
    return moe.RoutedMoE(
        config=config,
        num_experts=3,
        num_experts_per_tok=2,
        mesh=_mesh(config),
        kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
        kernel_axes=("embed", None),
        intermediate_dim=12,
        rngs=nnx.Rngs(0),
    )


def dense(features: Any, names: tuple[str, ...], **options: Any) -> nn.Module:
    """Returns MaxText's `DenseGeneral` as it stands in a linen module."""
    linears = importlib.import_module("maxtext.layers.linears")
    return linears.dense_general(
        in_features_shape=options.pop("shape", WIDTH),
        out_features_shape=features,
        kernel_axes=names,
        **options,
    )


class Mlp(nn.Module):
    """A gate alone."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = dense(5, ("embed", "mlp"), name="wi_0")(x)
        return dense(WIDTH, ("mlp", "embed"), shape=5, name="wo")(nn.silu(gate))


class Layer(nn.Module):
    """Projections into heads and back, and the MLP."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        heads = dense((2, 4), ("embed", "heads", "kv"), name="query")(x)
        out = dense(WIDTH, ("heads", "kv", "embed"), shape=(2, 4), axis=(-2, -1), name="out")
        x = x + out(nn.tanh(heads))
        return x + Mlp(name="mlp")(x), None


class Decoder(nn.Module):
    """Three layers, scanned and rematerialised."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stack = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return stack(name="layers")(x, None)[0]
