"""The configuration of a decoder, and how it is read from Hugging Face's config.json."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import jax.numpy as jnp
from flax.typing import Dtype

from jax_dora.lm.models.rope import Rope, positive
from jax_dora.lm.models.sharding import SHARDED_SIZES, DecoderSharding

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Fields of a `DecoderConfig` that say how to compute and are not determined by config.json.
COMPUTATION = ("dtype", "attention", "segments", "remat", "memory", "unroll", "sharding")
DTYPES = {
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float32": jnp.float32,
    "half": jnp.float16,
    "float": jnp.float32,
}
# The sliding window that transformers assumes if config.json does not give one.
DEFAULT_WINDOW = 4096
# What to do about a quantised folder that cannot be read.
USE_16_BITS = "use the model's folder in 16 bits, with `quantize`"


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The configuration of a decoder. Fields have their names in config.json.

    Differences between model families are separate boolean fields, such as `qk_norm`.

    Attributes:
      sliding_window: the number of latest tokens, its own included, that a token attends to; None
        for all.
      dtype: the dtype of parameters and activations. Norms, rotations and losses are computed in
        fp32.
      attention: `implementation` of `jax.nn.dot_product_attention`. On a GPU, "cudnn" is the fast
        choice for bf16 and fp16.
      segments: the maximum number of texts in a packed row, counting padding as one text. With
        "cudnn", attention is then computed within each text only, and the result is NaN in rows
        with more texts. None uses a mask instead.
      remat: whether the backward pass recomputes activations. A layer then keeps its input, the
        values that `jax_dora.remat_policy` names, and what fits into `memory`. False keeps all
        activations.
      memory: GiB of further activations to keep, for all layers together: the same ones of every
        layer, those first that take longest to recompute. On one device and in a loop, over a base
        of eight bits whose codes are nearly all of its bytes, the first layers keep more in what is
        left. "auto" uses the device memory that is free while the program is traced; None keeps no
        more.
      unroll: whether the program contains each layer separately instead of a loop over the layers.
        A loop copies each layer's weights out of the stacked array. Without the loop training is a
        few percent faster and generation much faster, but compile time grows with the number of
        layers.
      sharding: the sharding of arrays and activations on several devices; None leaves it to XLA.

    Raises:
      ValueError: a size does not divide over the devices of `sharding`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: Rope = dataclasses.field(default_factory=Rope)
    sliding_window: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: Dtype = jnp.bfloat16
    attention: Literal["xla", "cudnn"] | None = None
    segments: int | None = None
    remat: bool = True
    memory: float | Literal["auto"] | None = None
    unroll: bool = False
    sharding: DecoderSharding | None = None

    def __post_init__(self) -> None:
        if self.sharding is not None:
            sizes = {name: getattr(self, name) for name in SHARDED_SIZES if name != "batch"}
            self.sharding.check(**sizes)

    @property
    def row_shards(self) -> int:
        """The number of parts that the rows of a batch are split into."""
        return 1 if self.sharding is None else self.sharding.row_shards

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, dtype: Dtype | None = None, **changes: Any
    ) -> Self:
        """Returns the config that the contents of a config.json describe.

        Args:
          config: the parsed file. Without a dtype in it, the model is float32. (`read_config` adds
            the dtype of the weights to files without one.)
          dtype: replaces the dtype of the file.
          **changes: values for other fields, such as attention, segments, remat, memory, unroll and
            sharding.

        Raises:
          NotImplementedError: the model family or a feature of the model is not supported.
          ValueError: a size is missing or does not divide over the devices of `sharding`, or a
            field has an unexpected type.
          TypeError: a name in `changes` is not a field.
        """
        try:
            fields = cls._fields(config)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"config.json has a field of an unexpected type: {error}") from error
        if dtype is not None:
            changes["dtype"] = jnp.dtype(dtype)
        elif fields["dtype"] is None:
            raise ValueError(
                f"config.json has dtype {config.get('dtype') or config['torch_dtype']!r}; expected "
                "bfloat16, float16 or float32: correct it, or load the model with another dtype"
            )
        return cls(**fields | changes)

    @classmethod
    def _fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise NotImplementedError(
                f"config.json has model_type {kind!r}; expected one of {', '.join(MODEL_TYPES)}"
            )
        window = _sliding_window(config)
        _check_supported(config)

        def size(name: str, default: int | None = None) -> int:
            value = config.get(name)
            if value is None:
                value = default
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"config.json has {name} {value!r}; expected a positive integer")
            return value

        heads = size("num_attention_heads")
        hidden = size("hidden_size")
        # transformers ignores these fields for other families.
        attention_bias = kind in ("llama", "qwen3") and bool(config.get("attention_bias"))
        kv_heads = size("num_key_value_heads", heads if kind == "llama" else None)
        if heads % kv_heads:
            raise ValueError(
                f"config.json has num_attention_heads {heads}; expected a multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        head_dim = size("head_dim", 128 if kind == "qwen3" else hidden // heads)
        if head_dim % 2:
            raise ValueError(f"config.json has head_dim {head_dim}; expected an even number")
        return {
            "vocab_size": size("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": size("intermediate_size"),
            "num_hidden_layers": size("num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": positive(
                "rms_norm_eps", config.get("rms_norm_eps", 1e-6), or_zero=True
            ),
            "rope": Rope.from_hf(config),
            "sliding_window": window,
            "qk_norm": kind == "qwen3",
            "qkv_bias": kind == "qwen2" or attention_bias,
            "o_bias": attention_bias,
            "mlp_bias": kind == "llama" and bool(config.get("mlp_bias")),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "dtype": DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32")),
        }


def read_json_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}; expected a JSON object")
    return value


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Returns the maximum number of tokens of a text, or None if config.json does not give it."""
    limit = config.get("max_position_embeddings")
    if limit is not None and (type(limit) is not int or limit < 2):
        raise ValueError(
            f"config.json has max_position_embeddings {limit!r}; expected an integer above 1"
        )
    return limit


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """Returns the window of attention, or None if it spans all positions or no layer has one."""
    # Llama has no sliding window. Mistral uses sliding_window if it is set. Qwen also has the
    # switch use_sliding_window, and layer_types or max_window_layers say which layers slide.
    kind, layers = config["model_type"], config.get("num_hidden_layers") or 0
    if kind == "llama" or (kind != "mistral" and not config.get("use_sliding_window")):
        return None
    window, limit = config.get("sliding_window", DEFAULT_WINDOW), max_positions(config)
    if window is None or (limit is not None and window >= limit):
        return None
    if type(window) is not int or window < 1:
        raise ValueError(f"config.json has sliding_window {window!r}; expected a positive integer")
    sliding = layers
    if types := config.get("layer_types"):
        sliding = types.count("sliding_attention")
    elif kind != "mistral":
        sliding = max(0, layers - config.get("max_window_layers", 28))
    if sliding not in (0, layers):
        raise NotImplementedError(
            f"config.json has sliding_window {window} in {sliding} of {layers} layers; expected it "
            "in all or none: for texts of up to that many tokens, set use_sliding_window to false"
        )
    return window if sliding else None


def _check_supported(config: Mapping[str, Any]) -> None:
    """Raises an error if the model uses a feature that the decoder does not compute."""
    kinds = {"full_attention"}
    if config["model_type"] == "mistral" or config.get("use_sliding_window"):
        kinds.add("sliding_attention")
    wrong = {
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "layer_types": set(config.get("layer_types") or ()) - kinds,
        "partial_rotary_factor": config.get("partial_rotary_factor") not in (None, 1),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise NotImplementedError(
                f"config.json has {name} {config[name]!r}, which this decoder does not support; "
                "expected full or sliding attention, SiLU, and rotations of whole heads"
            )
    quantization = config.get("quantization_config")
    if not _is_supported_quantization(quantization):
        raise NotImplementedError(
            f"config.json has quantization_config {quantization!r}, a format that cannot be read; "
            f"expected weights that are float, bitsandbytes NF4 or FP8: {USE_16_BITS}"
        )


def _is_supported_quantization(quantization: Any) -> bool:
    """Returns whether `QuantisedTensor` can read weights with this quantization_config."""
    if quantization is None:
        return True
    if not isinstance(quantization, Mapping):
        return False
    method = quantization.get("quant_method")
    if method == "bitsandbytes":
        is_nf4 = quantization.get("bnb_4bit_quant_type") == "nf4"
        return bool(quantization.get("load_in_4bit")) and is_nf4
    if method == "compressed-tensors":
        return quantization.get("format") in ("float-quantized", "naive-quantized")
    return method in ("fp8", "fbgemm_fp8")
