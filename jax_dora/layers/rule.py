"""The options of an adapter, declared and checked in one place."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from dora_common.rules import Rule
from jax_dora.ops import check, choose


@dataclasses.dataclass(frozen=True)
class DoRARule(Rule):
    """Describes the adapter of every layer whose path `path` matches.

        DoRARule("all-linear", rank=16, alpha=32)
        DoRARule(r"layers/\\d+/attention/(query|value)", 16, 32, dropout=0.05, use_rslora=True)

    Attributes:
      path: a regular expression that the whole path has to match, as in `re.fullmatch`. A path is
        "a/b/0/c": attribute names, and positions or keys where modules stand in lists or dicts.
        Or "all-linear": every linear projection but the output head, which is what is called
        lm_head, embed_out, output, head, score or classifier.
      rank: the adapter's rank; it may exceed the numbers of features.
      alpha: the scale s is alpha / rank,
      use_rslora: or alpha / sqrt(rank).
      dropout: the probability of dropping an input in training; 0 for embeddings, which read no
        activation.
      keep_inner: whether `jax_dora.remat_policy` keeps what the magnitude's gradient reads: the
        result, or under a bias and in fp16 x (kernel + s·lora_a lora_b); for linear layers.
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
      TypeError, ValueError: an attribute is out of range, or `path` is no regular expression.
    """

    keep_inner: bool = False
    adapter_dtype: Dtype = jnp.float32
    lora_a_init: Initializer | None = None
    lora_b_init: Initializer | None = None
    adapt_attend: bool | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.keep_inner, bool):
            raise TypeError(f"keep_inner is {self.keep_inner!r}; expected True or False")
        if self.keep_inner and self.dropout and self.dropout_mode == "input":
            raise ValueError(
                "keep_inner is True with dropout_mode 'input', whose correction is composed apart "
                "from the base's result; expected False, or dropout_mode 'adapter'"
            )
        check.is_float_dtype("adapter_dtype", self.adapter_dtype)
        for name in ("lora_a_init", "lora_b_init"):
            init = getattr(self, name)
            if init is not None and not callable(init):
                raise TypeError(
                    f"{name} is {init!r}; expected a function of key, shape and dtype, such as "
                    "those of nnx.initializers, or None"
                )
        if not isinstance(self.adapt_attend, bool | None):
            raise TypeError(f"adapt_attend is {self.adapt_attend!r}; expected True, False or None")
        choose.check_name(self.implementation)


type Rules = DoRARule | Sequence[DoRARule]

# The keyword arguments of a DoRA layer: all but the path.
OPTIONS = tuple(field.name for field in dataclasses.fields(DoRARule) if field.name != "path")


def layer_rule(**options: object) -> DoRARule:
    """Returns the rule of one layer made by hand, without a path."""
    if unknown := options.keys() - set(OPTIONS):
        raise TypeError(f"{sorted(unknown)} is no option of an adapter; expected some of {OPTIONS}")
    return DoRARule("", **options)  # pyright: ignore[reportArgumentType]
