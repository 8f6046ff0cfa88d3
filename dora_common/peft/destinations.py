"""Matches the tensors of a folder to a model, so that all are checked before any is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dora_common.peft.config import AdapterConfig
from dora_common.peft.keys import adapter_in, parse
from dora_common.peft.layers import Architecture, Layer, Shape, check_layers
from dora_common.peft.matcher import MAX_LISTED, Matcher


@dataclass(frozen=True)
class Adapter:
    """One layer's adapter in a folder. `keys` has the tensors' keys by "lora_a", "lora_b" and
    "magnitude"."""

    layer: Layer
    rank: int
    alpha: float
    keys: Mapping[str, str]


@dataclass(frozen=True)
class Destinations:
    """The destination of every tensor of a folder.

    Attributes:
      adapters: the adapters by layer name.
      parameters: the keys that hold a parameter's value, by the parameter's name. Several keys of
        one parameter have to hold the same value.
      tokens: the key that holds some rows of a parameter and the indices of these rows, by the
        parameter's name.
      untied: the names in `parameters` that need an array of their own, since another parameter
        that shares their array keeps its value.
    """

    adapters: Mapping[str, Adapter]
    parameters: Mapping[str, tuple[str, ...]]
    tokens: Mapping[str, tuple[str, tuple[int, ...]]]
    untied: Sequence[str]

    def replaced_rows(self, architecture: Architecture) -> dict[str, tuple[int, ...] | None]:
        """Returns the rows that the folder replaces, or None for all, by the names of the
        parameters of which it replaces any, also because they stay tied to a stored one."""
        new = dict.fromkeys(self.parameters) | {name: at for name, (_, at) in self.tokens.items()}
        tied = {
            other: new[name]
            for names in architecture.tied()
            for name in names
            if name in new and name not in self.untied
            for other in names
            if other not in self.untied
        }
        return new | tied


def find_destinations(
    config: AdapterConfig,
    tensors: Mapping[str, tuple[str, Shape]],
    architecture: Architecture,
    *,
    adapter: str = "default",
) -> Destinations:
    """Finds the destination of every tensor, by the dtype and shape of each key.

    Raises NotImplementedError if PEFT's adapter of a selected layer computes something else, or the
    adapters of two tied layers would be tied; ValueError that lists all tensors that have no
    destination, a wrong shape or two keys, or are missing.
    """
    matcher = Matcher(config, architecture)
    check_layers((matcher.layers[name] for name in matcher.selected), use_dora=config.use_dora)
    matcher.check_tied_adapters()
    for key, (dtype, shape) in sorted(tensors.items()):
        if (named := adapter_in(key)) in (None, "default", adapter):
            matcher.place(key, parse(key, adapter), dtype, shape)
        else:
            matcher.problems.append(f"{key} is of the adapter {named!r}; pass adapter={named!r}")
    matcher.find_contradictions()
    if not matcher.find_unknown():
        matcher.find_missing()
    matcher.find_unselected()
    matcher.find_missing_parameters()
    if problems := matcher.problems:
        if matcher.ranks:  # Their keys can be the cause.
            problems = [*config.unused_patterns(matcher.selected, ["rank_pattern"]), *problems]
        listed = problems[:MAX_LISTED]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        raise ValueError(
            "the adapter does not fit the model:\n" + "\n".join(f"- {p}" for p in listed)
        )
    untied = matcher.untied()
    return Destinations(
        {
            name: Adapter(
                matcher.layers[name],
                config.rank_of(name),
                config.alpha_of(name),
                {role.replace("embedding_", "lora_"): key for role, key in found.items()},
            )
            for name, found in matcher.adapters.items()
        },
        matcher.by_array(untied),
        matcher.tokens,
        untied,
    )
