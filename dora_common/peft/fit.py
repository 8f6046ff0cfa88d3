"""Holds a folder against a model: everything is checked before anything is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dora_common.peft.config import AdapterConfig
from dora_common.peft.fitting import MOST_LISTED, Fitting
from dora_common.peft.keys import adapter_in, parse
from dora_common.peft.layers import Layer, Outline, Shape, refuse_layers


@dataclass(frozen=True)
class Adapter:
    """One layer's adapter in a folder: its key for "lora_a", "lora_b" and "magnitude"."""

    layer: Layer
    rank: int
    alpha: float
    keys: Mapping[str, str]


@dataclass(frozen=True)
class Fit:
    """The destination of every tensor of a folder.

    Attributes:
      adapters: by layer name.
      parameters: the keys that hold a parameter's value, by the parameter's name. Where there are
        several they hold the same.
      tokens: the key that holds some rows of a parameter, and which, by the parameter's name.
      untied: the parameters, of `parameters`, that need an array of their own, since another that
        shares it now keeps its value.
    """

    adapters: Mapping[str, Adapter]
    parameters: Mapping[str, tuple[str, ...]]
    tokens: Mapping[str, tuple[str, tuple[int, ...]]]
    untied: Sequence[str]


def fit(
    config: AdapterConfig,
    tensors: Mapping[str, tuple[str, Shape]],
    outline: Outline,
    *,
    adapter: str = "default",
) -> Fit:
    """Finds the place of every tensor.

    Args:
      config: the folder's.
      tensors: dtype and shape of every tensor of the folder, by key.
      outline: the model's.
      adapter: the adapter's name, where it was left in the keys.

    Raises:
      NotImplementedError: a layer is selected where PEFT's adapter computes something else; the
        adapters of two tied layers are tied.
      ValueError: a tensor has no place or the wrong shape, one is missing, or one has two keys.
        All that is found is listed.
    """
    fitting = Fitting(config, outline)
    refuse_layers(fitting.layers[name] for name in fitting.selected)
    fitting.refuse_tied_adapters()
    for key, (dtype, shape) in sorted(tensors.items()):
        if (named := adapter_in(key)) in (None, "default", adapter):
            fitting.place(key, parse(key, adapter), dtype, shape)
        else:
            fitting.problems.append(f"{key} is of the adapter {named!r}; pass adapter={named!r}")
    fitting.find_missing()
    if problems := fitting.problems:
        listed = problems[:MOST_LISTED]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        raise ValueError(
            "the adapter does not fit the model:\n" + "\n".join(f"- {p}" for p in listed)
        )
    untied = fitting.untied()
    return Fit(
        {
            name: Adapter(
                fitting.layers[name],
                config.rank_of(name),
                config.alpha_of(name),
                {role.replace("embedding_", "lora_"): key for role, key in found.items()},
            )
            for name, found in fitting.adapters.items()
        },
        fitting.by_array(untied),
        fitting.tokens,
        untied,
    )
