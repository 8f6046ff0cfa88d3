"""What an adapter is given besides arrays, declared and checked in one place."""

import dataclasses

import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jax_dora.hyperparameters import DropoutMode, adapter_scale, check_dropout
from jax_dora.ops import check
from jax_dora.ops.dispatch import check_name  # bridge: jax_dora.ops.choose


@dataclasses.dataclass(frozen=True)
class AdapterOptions:
    """The settings of one layer's adapter.

    Attributes:
      rank: the adapter's rank; it may exceed the numbers of features.
      alpha: the scale s is alpha / rank,
      use_rslora: or alpha / sqrt(rank).
      dropout: the probability of dropping an input in training; 0 for embeddings, which read no
        activation.
      keep_inner: whether `jax_dora.remat_policy` keeps x (kernel + s·lora_a lora_b), as large as
        the layer's result, which only the magnitude's gradient reads; for linear layers.
      dropout_mode: "adapter" drops what lora_a reads, as LoRA does; "input" drops what the whole
        correction reads, as PEFT's DoRA does, at the cost of a second product with the kernel.
      adapter_dtype: the dtype of lora_a and lora_b. It never changes the dtype of the result.
      lora_a_init, lora_b_init: called with the shape [in, rank] or [rank, out] of one matrix,
        whatever the layer's shape; None is the layer's default. A fresh layer is exact for any.
      adapt_attend: whether an embedding's `attend`, by which a model ties its output head to the
        embedding, multiplies by the adapted embedding. None or True does, as merging would; False
        leaves the head as it was, as PEFT does.
      implementation: as in `jax_dora.ops.dora_linear`.

    Raises:
      TypeError, ValueError: an attribute is out of range.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    keep_inner: bool = False
    dropout_mode: DropoutMode = "adapter"
    adapter_dtype: Dtype = jnp.float32
    lora_a_init: Initializer | None = None
    lora_b_init: Initializer | None = None
    adapt_attend: bool | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        adapter_scale(self.rank, self.alpha, self.use_rslora)
        check_dropout(self.dropout, self.dropout_mode)
        if not isinstance(self.keep_inner, bool):
            raise TypeError(f"keep_inner is {self.keep_inner!r}; expected True or False")
        if self.keep_inner and self.dropout and self.dropout_mode == "input":
            raise ValueError(
                "keep_inner is True with dropout_mode 'input', whose correction is composed apart "
                "from the base's result; expected False, or dropout_mode 'adapter'"
            )
        if jnp.dtype(self.adapter_dtype) not in check.FLOATS:
            raise TypeError(
                f"adapter_dtype is {self.adapter_dtype}; expected float16, bfloat16, float32 or "
                "float64"
            )
        if not isinstance(self.adapt_attend, bool | None):
            raise TypeError(f"adapt_attend is {self.adapt_attend!r}; expected True, False or None")
        check_name(self.implementation)

    @property
    def scale(self) -> float:
        """s."""
        return adapter_scale(self.rank, self.alpha, self.use_rslora)

    def arguments(self) -> dict[str, object]:
        """Returns the keyword arguments of a DoRA layer with this adapter."""
        return {field.name: getattr(self, field.name) for field in OPTION_FIELDS}


OPTION_FIELDS = dataclasses.fields(AdapterOptions)
