"""What a folder holds against what a model has: everything is checked before anything is loaded."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dora_common.peft import checks
from dora_common.peft.config import AdapterConfig, Names
from dora_common.peft.keys import Key, Role, key_of, parse

Shape = tuple[int, ...]
Kind = Literal["linear", "embedding", "conv"]

# safetensors' names of the dtypes an adapter may have.
FLOATS = ("F64", "F32", "F16", "BF16")

# Where "all-linear" may or may not have taken the output head: PEFT leaves it out of the models
# that tell it which one that is.
_HEADS = ("lm_head", "embed_out", "output", "head", "score", "classifier")
# PEFT stores the weights of these two when the vocabulary was resized.
_TOKEN_EMBEDDINGS = ("embed_tokens", "lm_head")

_MOST_LISTED = 20


@dataclass(frozen=True)
class Layer:
    """A layer that can be adapted, as PyTorch would have it.

    Attributes:
      name: its module's name.
      kind: "linear" (GPT-2's Conv1D too), "embedding" or "conv" (1d, 2d, 3d).
      in_features, out_features: an embedding's are its vocabulary and its width; a convolution's
        its channels.
      kernel_size: of a convolution.
      settings: of a convolution, those that PEFT's adapters do not honour, told in words.
    """

    name: str
    kind: Kind
    in_features: int
    out_features: int
    kernel_size: Shape = ()
    settings: tuple[str, ...] = ()

    def shapes(self, rank: int) -> dict[Role, Shape]:
        """The shapes PEFT writes for an adapter of `rank`."""
        out, ones = self.out_features, (1,) * len(self.kernel_size)
        if self.kind == "embedding":
            return {
                "embedding_a": (rank, self.in_features),
                "embedding_b": (out, rank),
                "magnitude": (out,),
            }
        return {
            "lora_a": (rank, self.in_features, *self.kernel_size),
            "lora_b": (out, rank, *ones),
            "magnitude": (1, out, *ones) if self.kind == "conv" else (out,),
        }

    def accepted_shapes(self, role: Role, rank: int) -> tuple[Shape, ...]:
        """`shapes`, and those other tools give a magnitude; its elements are [out] in all of them.
        (1, out) of a linear layer is not among them: there it may be a norm per input."""
        usual = self.shapes(rank)[role]
        if role != "magnitude":
            return (usual,)
        ones = (1,) * len(self.kernel_size)
        return (usual, (self.out_features,), (self.out_features, 1, *ones))


@dataclass(frozen=True)
class Adapter:
    """One layer's adapter in a folder: its key for "lora_a", "lora_b" and "magnitude"."""

    layer: Layer
    rank: int
    alpha: float
    keys: Mapping[str, str]


@dataclass(frozen=True)
class Fit:
    """Where every tensor of a folder goes.

    Attributes:
      adapters: by layer name.
      parameters: the keys that hold a parameter's value, by the parameter's name. Where there are
        several they hold the same.
    """

    adapters: Mapping[str, Adapter]
    parameters: Mapping[str, tuple[str, ...]]


def fit(
    config: AdapterConfig,
    tensors: Mapping[str, tuple[str, Shape]],
    layers: Iterable[Layer],
    parameters: Mapping[str, Shape],
    *,
    adapter: str = "default",
) -> Fit:
    """Find the place of every tensor.

    Args:
      config: the folder's.
      tensors: dtype and shape of every tensor of the folder, by key.
      layers: those of the model that can be adapted.
      parameters: shape of every parameter of the base model, by its name in PyTorch.
      adapter: the adapter's name, where it was left in the keys.

    Raises:
      NotImplementedError: a convolution is selected whose settings PEFT's adapters do not honour.
      ValueError: a tensor has no place or the wrong shape, one is missing, or one has two keys.
        All that is found is listed.
    """
    fitting = _Fitting(config, {layer.name: layer for layer in layers}, parameters)
    refuse_settings(fitting.layers[name] for name in fitting.selected)
    for key, (dtype, shape) in sorted(tensors.items()):
        fitting.place(key, parse(key, adapter), dtype, shape)
    fitting.find_missing()
    if problems := fitting.problems:
        listed = problems[:_MOST_LISTED]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        raise ValueError(
            "the adapter does not fit the model:\n" + "\n".join(f"- {p}" for p in listed)
        )
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
        {name: tuple(keys) for name, keys in fitting.whole.items()},
    )


class _Fitting:
    def __init__(
        self, config: AdapterConfig, layers: dict[str, Layer], parameters: Mapping[str, Shape]
    ) -> None:
        self.config, self.layers, self.parameters = config, layers, parameters
        self.selected = {
            name
            for name, layer in layers.items()
            if config.selects(name, is_linear=layer.kind == "linear")
        }
        self.adapters: dict[str, dict[Role, str]] = {}
        self.whole: dict[str, list[str]] = {}
        self.problems: list[str] = []

    def place(self, key: str, parsed: Key, dtype: str, shape: Shape) -> None:
        if dtype not in FLOATS:
            self.problems.append(f"{key} is {dtype}; expected one of {', '.join(FLOATS)}")
        elif parsed.role is not None:
            self._place_in_adapter(key, parsed.module, parsed.role, shape)
        elif problem := self._problem_of_parameter(parsed, shape):
            self.problems.append(f"{key} {problem}")
        elif not parsed.is_original:
            self.whole.setdefault(parsed.name, []).append(key)

    def _place_in_adapter(self, key: str, module: str, role: Role, shape: Shape) -> None:
        layer = self.layers.get(module)
        found = self.adapters.setdefault(module, {}) if layer else {}
        if layer is None:
            self.problems.append(
                f"{key} finds no layer that can be adapted{self._hint(module, self.layers)}"
            )
        elif role in found:
            self.problems.append(f"{key} and {found[role]} are the same tensor; expected one")
        elif module not in self.selected:
            found[role] = key
            self.problems.append(
                f"{key} belongs to a layer that adapter_config.json does not select"
            )
        else:
            found[role] = key
            self._check_adapter_tensor(key, layer, role, shape)

    def _check_adapter_tensor(self, key: str, layer: Layer, role: Role, shape: Shape) -> None:
        rank = self.config.rank_of(layer.name)
        if role not in layer.shapes(rank):
            wanted = ", ".join(key_of(layer.name, role) for role in layer.shapes(rank))
            self.problems.append(f"{key} is not for {layer.kind} layers; expected {wanted}")
        elif role == "magnitude" and not self.config.use_dora:
            self.problems.append(f"{key} is a magnitude; expected none, since use_dora is false")
        elif shape not in (accepted := layer.accepted_shapes(role, rank)):
            self.problems.append(
                f"{key} has shape {list(shape)}; expected {list(accepted[0])} for rank {rank}"
            )

    def _problem_of_parameter(self, key: Key, shape: Shape) -> str | None:
        if key.name not in self.parameters:
            return f"finds no parameter{self._hint(key.name, self.parameters)}"
        if shape != self.parameters[key.name]:
            return f"has shape {list(shape)}; expected {list(self.parameters[key.name])}"
        if not (self._is_announced(key) or self._is_token_embedding(key)):
            return (
                "is a parameter of the base model; expected it to be named by modules_to_save or "
                "bias in adapter_config.json"
            )
        return None

    def _is_announced(self, key: Key) -> bool:
        return self.config.stores(key.name, of_adapted_layer=key.module in self.selected)

    def _is_token_embedding(self, key: Key) -> bool:
        layer = self.layers.get(key.module)
        is_embedding = layer is not None and layer.kind == "embedding"
        named = key.module.rpartition(".")[2] in _TOKEN_EMBEDDINGS
        return key.parameter == "weight" and (is_embedding or named)

    def _hint(self, name: str, there: Iterable[str]) -> str:
        """What the model has instead. Finding it takes time, so only for what will be listed."""
        names = sorted(there) if len(self.problems) < _MOST_LISTED else []
        nearest = difflib.get_close_matches(name, names, n=3, cutoff=0)
        return f"; the nearest are {', '.join(nearest)}" if nearest else ""

    def find_missing(self) -> None:
        if not self.selected:
            self.problems.append(
                "adapter_config.json selects none of the model's layers; expected target_modules "
                f"{checks.short(self.config.target_modules)} to name some of "
                f"{checks.short(sorted(self.layers))}"
            )
        for name in sorted(self.selected):
            found = self.adapters.get(name)
            if found is None:
                is_head = name.rpartition(".")[2] in _HEADS
                if not (is_head and self.config.targets_all_linear):
                    self.problems.append(
                        f"{name} has no tensors, though adapter_config.json selects it"
                    )
                continue
            for role in self.layers[name].shapes(self.config.rank_of(name)):
                if role not in found and (role != "magnitude" or self.config.use_dora):
                    self.problems.append(f"{key_of(name, role)} is missing")
        for name in sorted(self.parameters):
            module, _, parameter = name.rpartition(".")
            if name not in self.whole and self._is_announced(Key(module, None, parameter)):
                self.problems.append(f"{name} is missing, though adapter_config.json announces it")


def convolution_settings(
    groups: int, window: Sequence[int], dilation: Sequence[int], padding_mode: str
) -> Names:
    """What `Layer.settings` is of a convolution.

    PEFT gives lora_A the window, stride and padding of the base layer, and no more of it: so lora_A
    reads every input channel in every group, where no weight of the base's shape can hold what it
    does, and PEFT itself refuses to merge; it reads other positions than a dilated window; and it
    pads with zeros.

    Args:
      groups: of the channels.
      window, dilation: of each spatial axis.
      padding_mode: as PyTorch's; "zeros" too where nothing is padded.
    """
    apart = any(step != 1 for size, step in zip(window, dilation, strict=True) if size > 1)
    told = {
        f"{groups} groups": groups != 1,
        f"dilation {tuple(dilation)}": apart,
        f"{padding_mode} padding": padding_mode != "zeros",
    }
    return tuple(setting for setting, is_set in told.items() if is_set)


def refuse_settings(layers: Iterable[Layer]) -> None:
    """
    Raises:
      NotImplementedError: PEFT's adapter of one of the layers, which are to be adapted, would
        compute something else than a DoRA layer does.
    """
    told = [f"{one.name} has {', '.join(one.settings)}" for one in layers if one.settings]
    if told:
        raise NotImplementedError(
            f"{'; '.join(sorted(told))}; expected one group, no dilation and zero padding: PEFT "
            "gives lora_A none of the convolution's other settings, so that it computes something "
            "else there: leave these layers out of target_modules"
        )
