"""Which layers get which adapter."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jax_dora.hyperparameters import DropoutMode, adapter_scale, check_dropout, check_inner_name
from jax_dora.ops import check, dispatch
from jax_dora.ops.check import InnerName


@dataclasses.dataclass(frozen=True)
class DoRARule:
    """The adapter of every layer whose path `path` matches.

    Attributes:
      path: a regular expression that the whole path has to match, as in `re.fullmatch`. A path is
        "a/b/0/c": attribute names, and positions or keys where modules stand in lists or dicts.
      rank: of the adapter.
      alpha: the scale s is alpha / rank,
      use_rslora: or alpha / sqrt(rank).
      dropout: probability of dropping an input in training; 0 for embeddings, which read no
        activation.
      dropout_mode: "adapter" or "input", as `jax_dora.DoRALinear`'s.
      adapter_dtype: of lora_a and lora_b.
      lora_a_init, lora_b_init: None leaves it to the layer. Called with the shape [in, rank] or
        [rank, out] of one matrix, whatever the layer's shape.
      adapt_attend: as `jax_dora.DoRAEmbed`'s, for rules that match embeddings alone; None leaves it
        to the layer.
      implementation: of the compose, as in `jax_dora.ops.dora_linear`.
      inner_name: as there, for rules that match linear layers alone; see `jax_dora.remat_policy`.

    Raises:
      TypeError, ValueError: an attribute is out of range, or `path` is no regular expression.
    """

    path: str
    rank: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    dropout_mode: DropoutMode = "adapter"
    adapter_dtype: Dtype = jnp.float32
    lora_a_init: Initializer | None = None
    lora_b_init: Initializer | None = None
    adapt_attend: bool | None = None
    implementation: str | None = None
    inner_name: InnerName = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise TypeError(f"path is {self.path!r}; expected a regular expression as a string")
        try:
            re.compile(self.path)
        except re.error as error:
            raise ValueError(
                f"path is {self.path!r}, which is no regular expression ({error}); a '.' or '*' "
                "that stands for itself wants a backslash"
            ) from error
        adapter_scale(self.rank, self.alpha, self.use_rslora)
        check_dropout(self.dropout, self.dropout_mode)
        check_inner_name(self.inner_name, self.dropout, self.dropout_mode)
        if jnp.dtype(self.adapter_dtype) not in check.FLOATS:
            raise TypeError(
                f"adapter_dtype is {self.adapter_dtype}; expected float16, bfloat16, float32 or "
                "float64"
            )
        dispatch.check_name(self.implementation)

    def matches(self, path: str) -> bool:
        """Whether the whole of `path` matches."""
        return re.fullmatch(self.path, path) is not None

    def options(self) -> dict[str, Any]:
        """What the DoRA layers take to be made so, as keyword arguments; `rngs` is wanting."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["path"]
        return {name: value for name, value in values.items() if value is not None}


Rules = DoRARule | Sequence[DoRARule]


def as_rules(rules: Rules) -> tuple[DoRARule, ...]:
    """`rules` as a tuple; raises TypeError or ValueError for anything else than rules."""
    found = (rules,) if isinstance(rules, DoRARule) else tuple(rules)
    for index, rule in enumerate(found):
        if not isinstance(rule, DoRARule):
            raise TypeError(f"rules[{index}] is a {type(rule).__name__}; expected a DoRARule")
    if not found:
        raise ValueError("rules is empty; expected at least one DoRARule")
    return found


def assign(rules: Sequence[DoRARule], paths: Sequence[tuple[str, ...]]) -> list[DoRARule | None]:
    """The rule of each module, given all its paths (a shared module has several): the first match.

    Raises:
      ValueError: a rule is nobody's first match; it lists the paths.
    """
    chosen = [
        next((rule for rule in rules if any(map(rule.matches, names))), None) for names in paths
    ]
    for index, rule in enumerate(rules):
        if any(rule is one for one in chosen):
            continue
        taken = any(rule.matches(path) for names in paths for path in names)
        reason = (
            "matches only layers that earlier rules take (the first match wins)"
            if taken
            else "matches no layer"
        )
        raise ValueError(
            f"rules[{index}], path {rule.path!r}, {reason}; a path is matched as a whole. The "
            f"layers with parameters are:{listing(path for names in paths for path in names)}"
        )
    return chosen


def listing(lines) -> str:
    """One line each, indented, for the end of a message."""
    return "".join(f"\n  {line}" for line in sorted(lines))
