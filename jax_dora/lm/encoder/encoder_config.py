"""The configuration of a DeBERTa encoder, and how it is read from Hugging Face's config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
from flax.typing import Dtype

from jax_dora.lm.models.config import DTYPES

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")
TERMS = ("c2p", "p2c")


@dataclasses.dataclass(frozen=True)
class DebertaConfig:
    """The configuration of a DeBERTa-v2 or v3. Fields have their names in config.json.

    Attributes:
      attention_head_size: the features of a head; hidden_size / num_attention_heads by default.
      embedding_size: the features of the word embedding; hidden_size by default.
      max_relative_positions: the distances that positions tell apart; max_position_embeddings if it
        is below 1.
      position_buckets: the number of buckets for distances on either side, logarithmic from half of
        them on; below 1, each distance has its own.
      pos_att_type: the terms of relative positions, of c2p and p2c.
      share_att_key: whether positions are projected by the query's and the key's projections.
      norm_rel_ebd: whether the embedding of relative positions is normalised ("layer_norm").
      conv_kernel_size: the width of the convolution next to the first layer; 0 for none.
      cls_dropout: the dropout rate before the classifier; hidden_dropout_prob by default.
      num_labels: the number of outputs of the classifier.
      dtype: the dtype of activations and products. Norms, softmax and losses are computed in fp32.
      param_dtype: the dtype of parameters; `dtype` by default.
      attention: `implementation` of `jax_dora.ops.disentangled_attention`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    attention_head_size: int
    embedding_size: int
    pooler_hidden_size: int
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-7
    relative_attention: bool = False
    max_relative_positions: int = -1
    position_buckets: int = -1
    position_biased_input: bool = True
    pos_att_type: tuple[str, ...] = ()
    share_att_key: bool = False
    norm_rel_ebd: bool = False
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"
    pooler_dropout: float = 0.0
    pooler_hidden_act: str = "gelu"
    cls_dropout: float | None = None
    num_labels: int = 2
    dtype: Dtype = jnp.float32
    param_dtype: Dtype | None = None
    attention: str | None = None

    @property
    def span(self) -> int:
        """The number of buckets on either side of the distance 0."""
        return self.position_buckets if self.position_buckets > 0 else self.furthest

    @property
    def furthest(self) -> int:
        """The number of distances on either side that positions tell apart."""
        positions = self.max_relative_positions
        return positions if positions > 0 else self.max_position_embeddings

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, dtype: Dtype | None = None, **changes: Any
    ) -> Self:
        """Returns the config that the contents of a config.json describe.

        Args:
          config: the parsed file. Without a dtype in it, the model is float32.
          dtype: replaces the dtype of the file.
          **changes: values for other fields, such as num_labels, param_dtype and rates of dropout.

        Raises:
          NotImplementedError: it is another model, or has an activation that is not supported.
          ValueError: a size is missing, or does not divide; or the dtype is unknown.
          TypeError: a name in `changes` is not a field.
        """
        if (kind := config.get("model_type")) != "deberta-v2":
            raise NotImplementedError(f"config.json has model_type {kind!r}; expected 'deberta-v2'")
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in config.items() if name in names}
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            if type(value := config.get(name)) is not int or value < 1:
                raise ValueError(f"config.json has {name} {value!r}; expected a positive integer")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        if hidden % heads:
            raise ValueError(
                f"config.json has hidden_size {hidden}; expected a multiple of "
                f"num_attention_heads {heads}"
            )
        types = config.get("pos_att_type") or ()
        types = types.lower().split("|") if isinstance(types, str) else types
        labels = config.get("id2label")
        given = config.get("dtype") or config.get("torch_dtype") or "float32"
        fields |= {
            "attention_head_size": config.get("attention_head_size") or hidden // heads,
            "embedding_size": config.get("embedding_size") or hidden,
            "pooler_hidden_size": config.get("pooler_hidden_size") or hidden,
            "pos_att_type": tuple(term for term in map(str.strip, types) if term in TERMS),
            "norm_rel_ebd": "layer_norm" in str(config.get("norm_rel_ebd")).lower(),
            "num_labels": len(labels) if labels else config.get("num_labels") or 2,
            "dtype": DTYPES.get(str(given)) if dtype is None else jnp.dtype(dtype),
        }
        if fields["dtype"] is None:
            raise ValueError(f"config.json has dtype {given!r}; expected {', '.join(DTYPES)}")
        result = cls(**fields | changes)
        for name in ("hidden_act", "conv_act", "pooler_hidden_act"):
            if (act := getattr(result, name)) not in ACTIVATIONS:
                raise NotImplementedError(
                    f"config.json has {name} {act!r}; expected one of {', '.join(ACTIVATIONS)}"
                )
        return result
