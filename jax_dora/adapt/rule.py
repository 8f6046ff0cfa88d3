"""Which layers get which adapter."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax_dora.layers.options import AdapterOptions

ALL_LINEAR = "all-linear"
# What models call the layer that makes their result, which "all-linear" leaves out.
OUTPUT_HEADS = ("lm_head", "embed_out", "output", "head", "score", "classifier")


@dataclasses.dataclass(frozen=True)
class _Path:
    path: str


# A dataclass has the fields of its last base first.
@dataclasses.dataclass(frozen=True)
class DoRARule(AdapterOptions, _Path):
    """The adapter of every layer whose path `path` matches.

        DoRARule("all-linear", rank=16, alpha=32)
        DoRARule(r"layers/\\d+/attention/(query|value)", 16, 32, dropout=0.05, use_rslora=True)

    Attributes:
      path: a regular expression that the whole path has to match, as in `re.fullmatch`. A path is
        "a/b/0/c": attribute names, and positions or keys where modules stand in lists or dicts.
        Or "all-linear": every linear projection but the output head, which is what is called
        lm_head, embed_out, output, head, score or classifier.
      rank: the adapter's rank.
      alpha: the scale s is alpha / rank,
      use_rslora: or alpha / sqrt(rank).
      dropout: the probability of dropping an input in training.
      keep_inner: for linear layers, whether `jax_dora.remat_policy` keeps what only the magnitude's
        gradient reads.
      dropout_mode, adapter_dtype, lora_a_init, lora_b_init, adapt_attend, implementation: as
        `jax_dora.layers.AdapterOptions`'.

    Raises:
      TypeError, ValueError: an attribute is out of range, or `path` is no regular expression.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise TypeError(f"path is {self.path!r}; expected a regular expression as a string")
        try:
            re.compile(self.path)
        except re.error as error:
            raise ValueError(
                f"path is {self.path!r}, which is no regular expression ({error}); put a backslash "
                "before a '.' or '*' that stands for itself"
            ) from error
        super().__post_init__()

    def matches(self, path: str, *, is_linear: bool = False) -> bool:
        """Whether the rule is for a layer at `path`, which is a linear projection or not."""
        if self.path == ALL_LINEAR:
            return is_linear and path.rpartition("/")[2] not in OUTPUT_HEADS
        return re.fullmatch(self.path, path) is not None


class Candidate(NamedTuple):
    """A layer that a rule may match: all its paths, of which a shared module has several."""

    paths: tuple[str, ...]
    is_linear: bool

    def matches(self, rule: DoRARule) -> bool:
        return any(rule.matches(path, is_linear=self.is_linear) for path in self.paths)


Rules = DoRARule | Sequence[DoRARule]


def as_rules(rules: Rules) -> tuple[DoRARule, ...]:
    """Returns `rules` as a tuple; raises TypeError or ValueError for anything else than rules."""
    found = (rules,) if isinstance(rules, DoRARule) else tuple(rules)
    for index, rule in enumerate(found):
        if not isinstance(rule, DoRARule):
            raise TypeError(f"rules[{index}] is a {type(rule).__name__}; expected a DoRARule")
    if not found:
        raise ValueError("rules is empty; expected at least one DoRARule")
    return found


def assign(rules: Sequence[DoRARule], layers: Sequence[Candidate]) -> list[DoRARule | None]:
    """Returns the rule of each layer: the first that matches.

    Raises:
      ValueError: a rule is nobody's first match; it lists the paths.
    """
    chosen = [next((rule for rule in rules if layer.matches(rule)), None) for layer in layers]
    for index, rule in enumerate(rules):
        if any(rule is one for one in chosen):
            continue
        reason = (
            "matches only layers that earlier rules take (the first match wins)"
            if any(layer.matches(rule) for layer in layers)
            else "matches no layer"
        )
        raise ValueError(
            f"rules[{index}], path {rule.path!r}, {reason}; a path is matched as a whole. The "
            f"layers with parameters are:{listing(path for one in layers for path in one.paths)}"
        )
    return chosen


def listing(lines: Iterable[str]) -> str:
    """Returns one line each, indented, for the end of a message."""
    return "".join(f"\n  {line}" for line in sorted(lines))
