"""`DoRARule`: the options of an adapter and their checks."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from dora_common.rules import SELECTORS, Rule
from jax_dora.ops import check
from jax_dora.ops.dispatch import choose


@dataclasses.dataclass(frozen=True)
class DoRARule(Rule):
    """Describes the adapter of every layer whose path matches `path`.

        DoRARule("all-linear", rank=16, alpha=32)
        DoRARule(r"layers/\\d+/attention/(query|value)", 16, 32, dropout=0.05, use_rslora=True)

    Attributes:
      path: a regular expression that must match the whole path, as with `re.fullmatch`. A path such
        as "a/b/0/c" consists of attribute names, and of indices or keys for modules in lists or
        dicts. The value "all-linear" selects every linear projection but the output head. A layer
        counts as the output head if its name is lm_head, embed_out, output, head, score or
        classifier.
      rank: the adapter's rank; it may exceed the numbers of features.
      alpha: the scale s is alpha / rank.
      use_rslora: makes the scale s alpha / sqrt(rank) instead.
      dropout: the probability of dropping an input in training. It must be 0 for embeddings, which
        read no activation.
      keep_inner: whether rematerialisation keeps the array that the magnitude's gradient reads: the
        result or, with a bias and in fp16, x (kernel + s·lora_a lora_b). With None it does so for a
        layer that it would otherwise compute again for this gradient alone, as the last projection
        of a block. False never keeps it, and saves memory. True keeps it with
        `jax_dora.remat_policy` in any layer. For linear layers only.
      dropout_mode: "adapter" drops the input of lora_a, as LoRA does. "input" drops the input of
        the whole correction, as PEFT's DoRA does; it costs a second product with the kernel.
      adapter_dtype: the dtype of lora_a and lora_b. It never changes the dtype of the result.
      lora_a_init, lora_b_init: initializers, called with the shape [in, rank] or [rank, out] of one
        matrix, whatever the layer's shape; None is the layer's default. A fresh layer is exact with
        any initializer.
      adapt_attend: for embeddings, whether `attend`, which a model with a tied output head calls,
        multiplies by the adapted embedding. With None or True it does, as after merging. With False
        the head uses the base embedding, as in PEFT.
      implementation: see `jax_dora.ops.dora_linear`.
      exclude: a regular expression for the whole paths of layers that the rule leaves out, as in
        DoRARule("all-linear", 16, 32, exclude=r".*/router"). It must match a layer; a shared layer
        is left out if it matches one of the layer's paths.

    Raises:
      TypeError, ValueError: an attribute is out of range, or `path` or `exclude` is not a regular
        expression.
    """

    keep_inner: bool | None = None
    adapter_dtype: Dtype = jnp.float32
    lora_a_init: Initializer | None = None
    lora_b_init: Initializer | None = None
    adapt_attend: bool | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.keep_inner, bool | None):
            raise TypeError(f"keep_inner is {self.keep_inner!r}; expected True or False, or None")
        if self.keep_inner and self.dropout and self.dropout_mode == "input":
            raise ValueError(
                "keep_inner is True with dropout_mode 'input', which computes the correction "
                "separately from the base layer's result; expected False, or dropout_mode 'adapter'"
            )
        check.is_float_dtype("adapter_dtype", self.adapter_dtype)
        for name in ("lora_a_init", "lora_b_init"):
            init = getattr(self, name)
            if init is not None and not callable(init):
                raise TypeError(
                    f"{name} is {init!r}; expected a function of key, shape and dtype, as in "
                    "nnx.initializers, or None"
                )
        if not isinstance(self.adapt_attend, bool | None):
            raise TypeError(f"adapt_attend is {self.adapt_attend!r}; expected True, False or None")
        choose.check_name(self.implementation)


type Rules = DoRARule | Sequence[DoRARule]

# The options of a DoRA layer: all attributes of a rule but those that select layers.
OPTIONS = tuple(field.name for field in dataclasses.fields(DoRARule) if field.name not in SELECTORS)


def layer_rule(**options: object) -> DoRARule:
    """Returns a rule without a path, for a layer that the user creates directly."""
    if unknown := options.keys() - set(OPTIONS):
        raise TypeError(
            f"{sorted(unknown)} are not options of an adapter; expected some of {OPTIONS}"
        )
    return DoRARule("", **options)  # pyright: ignore[reportArgumentType]
