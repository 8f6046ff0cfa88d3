"""Layers of public model libraries that `jax_dora` knows by name, importing none of them."""

from typing import Any

from jax_dora.layers.stack import stacked_axes


def _einsum(module: Any) -> str | None:
    from jax_dora.weights.registry import einsum_axes

    return einsum_axes(module.einsum_str)


def _dense_general(module: Any) -> str | None:
    letters = "i" * len(module.in_features_shape) + "o" * len(module.out_features_shape)
    single = (*module.in_features_shape, *module.out_features_shape)
    axes = stacked_axes(module.kernel.shape, single)  # MaxText scans along the second
    if len(axes) == 1:
        return f"{letters[: axes[0]]}s{letters[axes[0] :]}"
    return None if axes and scan_axis(module.kernel) is None else letters


def scan_axis(variable: Any) -> int | None:
    """Returns the axis of a parameter along which MaxText has stacked layers, as its metadata says;
    None where it says nothing."""
    return variable.get_metadata().get("param_scan_axis")


_TUNIX = tuple(
    f"tunix.models.{name}.model"
    for name in ("qwen2", "qwen3", "llama3", "gemma", "gemma3", "gemma4")
)

# Class, parameter, axes, whether "all-linear" means it.
KNOWN: tuple[tuple[str, str, Any, bool], ...] = (
    *((f"{model}.Einsum", "w", _einsum, True) for model in _TUNIX),
    *((f"{model}.Embedder", "input_embedding", "io", False) for model in _TUNIX),
    ("tunix.models.qwen3.model.MoELayer", "gate_proj", "bio", True),
    ("tunix.models.qwen3.model.MoELayer", "up_proj", "bio", True),
    ("tunix.models.qwen3.model.MoELayer", "down_proj", "bio", True),
    ("tunix.models.gemma4.moe.MoERagged", "router_logits", "io", True),
    ("tunix.models.gemma4.moe.MoERagged", "gating_einsum", "booi", True),
    ("tunix.models.gemma4.moe.MoERagged", "linear", "bio", True),
    ("maxtext.layers.linears.DenseGeneral", "kernel", _dense_general, True),
    ("maxtext.layers.embeddings.Embed", "embedding", "io", False),
    ("maxtext.layers.moe.GateLogit", "kernel", "io", True),
    ("maxtext.layers.moe.RoutedMoE", "wi", "bio", True),
    ("maxtext.layers.moe.RoutedMoE", "wi_0", "bio", True),
    ("maxtext.layers.moe.RoutedMoE", "wi_1", "bio", True),
    ("maxtext.layers.moe.RoutedMoE", "wo", "bio", True),
    ("bonsai.models.llada.modeling.ShardedLinear", "kernel", "io", True),
    ("bonsai.models.llada.modeling.ShardedEmbedding", "embedding", "io", False),
    ("bonsai.models.qwen3_vl.modeling.ShardedLinear", "kernel", "io", True),
    ("bonsai.models.qwen3_vl.modeling.ShardedEmbedding", "embedding", "io", False),
)
