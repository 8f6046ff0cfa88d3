"""Translates the names of a Flax model's modules and parameters to PyTorch's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dora_common.peft import checks

# Parameters that have another name in PyTorch.
_PARAMETERS = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "var": "running_var",
}


@dataclass(frozen=True)
class Names:
    r"""Translates Flax paths such as "model/layers/0/self_attn/q_proj" to PyTorch names with dots.

    The default suffices if the modules have the same names as in PyTorch. For other models:

        Names(rules=[(r"^blocks", "transformer/h"), (r"/query$", "/q_proj")])

    A subclass may override `module` and `parameter`.

    Attributes:
      rules: pairs of a regular expression and its replacement. All of them are applied to the path
        in order by `re.sub`, before "/" is replaced by ".".
      stacks: the names of modules with layers that are stacked in one array, along any axis, as
        `nnx.vmap` creates them for `nnx.scan`. The layer's index is inserted after the name:
        "model/layers/self_attn/q_proj" becomes model.layers.0.self_attn.q_proj and so on. This
        happens before the rules are applied.
      parameters: PyTorch's names of the parameters that have another name there.
      experts: the names of parameters with packed experts, in the order in which PyTorch registers
        them. The order matters if a module has several such parameters.
    """

    rules: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    stacks: tuple[str, ...] | list[str] = ("layers", "layer", "blocks", "block", "h")
    parameters: Mapping[str, str] = field(default_factory=lambda: _PARAMETERS)
    experts: tuple[str, ...] | list[str] = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError if a rule is no pair of a regular expression and a
        string."""
        for rule in self.rules:
            if not (isinstance(rule, tuple | list) and [*map(type, rule)] == [str, str]):
                raise TypeError(
                    f"rules has {rule!r}; expected pairs of a regular expression and its "
                    'replacement, such as [("^blocks", "transformer/h")]'
                )
            checks.check_regex("rules", rule[0], rule[0])

    def module(self, path: str, index: tuple[int, ...] = ()) -> str:
        """Returns PyTorch's name of a module.

        Args:
          path: the path of the Flax module.
          index: the index of a stacked layer, with one number for each axis of the stack; empty for
            other layers.

        Raises:
          ValueError: the path has fewer names from `stacks` than the stack has axes.
        """
        parts, remaining = [], list(index)
        given = path.split("/") if path else []
        for part, following in zip(given, [*given[1:], ""], strict=False):
            parts.append(part)
            if remaining and part in self.stacks and not following.isdecimal():
                parts.append(str(remaining.pop(0)))
        if remaining:
            raise ValueError(
                f"the layers at {path!r} are stacked along {len(index)} axes; expected as many of "
                f"the names {', '.join(self.stacks)} in their path: pass names=Names(stacks=...) "
                "with the name of the module that contains the stack"
            )
        name = "/".join(parts)
        for pattern, replacement in self.rules:
            name = re.sub(pattern, replacement, name)
        return name.replace("/", ".")

    def parameter(self, name: str) -> str:
        """Returns PyTorch's name of a parameter in its module."""
        return self.parameters.get(name, name)
