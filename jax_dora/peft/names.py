"""Translates the names of a Flax model's modules and parameters to PyTorch's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# PyTorch calls these parameters otherwise; every other keeps its name.
_PARAMETERS = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "var": "running_var",
}


@dataclass(frozen=True)
class Names:
    r"""Translates Flax's paths, "model/layers/0/self_attn/q_proj", to PyTorch's names with dots.

    The default is enough for a model whose modules are called as in PyTorch; for others:

        Names(rules=[(r"^blocks", "transformer/h"), (r"/query$", "/q_proj")])

    A subclass may compute `module` and `parameter` in any way it likes.

    Attributes:
      rules: regular expressions and their replacements, applied to the path by `re.sub`, all of
        them in their order, before "/" becomes ".".
      stacks: what modules are called whose layers lie stacked in one array, as `nnx.vmap` makes
        them for `nnx.scan`, along any axis; the layer's index comes right behind:
        "model/layers/self_attn/q_proj" is model.layers.0.self_attn.q_proj and so on. Matched before
        the rules are applied.
      parameters: the names of parameters that differ.
      experts: parameters that hold packed experts, in the order in which PyTorch's modules
        register them; it counts where a module has several.
    """

    rules: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    stacks: tuple[str, ...] | list[str] = ("layers", "layer", "blocks", "block", "h")
    parameters: Mapping[str, str] = field(default_factory=lambda: _PARAMETERS)
    experts: tuple[str, ...] | list[str] = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")

    def module(self, path: str, index: tuple[int, ...] = ()) -> str:
        """Returns the name that PyTorch has for a module.

        Args:
          path: of the Flax module.
          index: of the layer, where layers are stacked; one number for each axis of the stack.

        Raises:
          ValueError: the path has too few names of `stacks` for the index.
        """
        parts, waiting = [], list(index)
        given = path.split("/") if path else []
        for part, following in zip(given, [*given[1:], ""], strict=False):
            parts.append(part)
            if waiting and part in self.stacks and not following.isdecimal():
                parts.append(str(waiting.pop(0)))
        if waiting:
            raise ValueError(
                f"the layers at {path!r} are stacked along {len(index)} axes; expected as many of "
                f"the names {', '.join(self.stacks)} in their path: pass names=Names(stacks=...) "
                "with the name of the module that holds the stack"
            )
        name = "/".join(parts)
        for pattern, replacement in self.rules:
            name = re.sub(pattern, replacement, name)
        return name.replace("/", ".")

    def parameter(self, name: str) -> str:
        """Returns the name of a parameter within its module."""
        return self.parameters.get(name, name)
