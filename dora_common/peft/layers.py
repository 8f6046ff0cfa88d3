"""The layers of a model that PEFT can adapt, described as in PyTorch."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dora_common.peft.keys import Role

Shape = tuple[int, ...]
Kind = Literal["linear", "embedding", "conv", "experts"]


@dataclass(frozen=True)
class Layer:
    """A layer that can be adapted, as a PEFT folder stores it: with PyTorch's name and shapes, for
    models of both packages.

    Attributes:
      name: the module's name; for packed experts, the parameter's name.
      kind: "linear" (including GPT-2's Conv1D), "embedding", "conv" (1d, 2d, 3d), or "experts" for
        one parameter with a matrix for each expert, as in PEFT's target_parameters.
      in_features, out_features: for an embedding, the vocabulary size and the width; for a
        convolution, the numbers of channels.
      kernel_size: the window of a convolution.
      refusals: reasons why PEFT's adapter computes something else here than a DoRA layer does.
      experts: the number of packed experts.
      is_swapped_in_lora: whether PEFT takes the experts' input features for output features.
      is_in_order: whether the order in which PyTorch registers the parameters with packed experts
        in their module is known.
    """

    name: str
    kind: Kind
    in_features: int
    out_features: int
    kernel_size: Shape = ()
    refusals: tuple[str, ...] = ()
    experts: int = 0
    is_swapped_in_lora: bool = False
    is_in_order: bool = True

    def shapes(self, rank: int) -> dict[Role, Shape]:
        """Returns the shapes that PEFT writes for an adapter of this rank, by role. Packed experts
        have lora_A [experts, rank, in] and lora_B [out, rank, experts], with experts and rank
        merged, and a magnitude [experts, out], which PEFT has not."""
        out, ones = self.out_features, (1,) * len(self.kernel_size)
        if self.kind == "experts":
            return {
                "lora_a": (self.experts * rank, self.in_features),
                "lora_b": (out, rank * self.experts),
                "magnitude": (self.experts, out),
            }
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
        """Returns the shapes that a tensor may have: PEFT's, and those of other tools for the [out]
        numbers of a magnitude. A linear layer's (1, out) can be a norm per input feature, and is
        not accepted."""
        usual = self.shapes(rank)[role]
        if role != "magnitude" or self.kind == "experts":
            return (usual,)
        ones = (1,) * len(self.kernel_size)
        return (usual, (self.out_features,), (self.out_features, 1, *ones))


@dataclass(frozen=True)
class Architecture:
    """The layers and parameters of a model, under PyTorch's names.

    Attributes:
      layers: the layers that are adapted or can be adapted.
      parameters: the shape of every parameter of the base model, by name.
      arrays: an identifier of each parameter's array, by name, which is the same for parameters
        that share an array.
      refusals: why other weights cannot be adapted in this model, by name.
    """

    layers: Sequence[Layer]
    parameters: Mapping[str, Shape]
    arrays: Mapping[str, Hashable]
    refusals: Mapping[str, str] = field(default_factory=dict)

    def tied(self) -> list[list[str]]:
        """Returns the groups of two or more parameters that share an array, such as an embedding
        and the output head that is tied to it."""
        groups: dict[Hashable, list[str]] = {}
        for name, array in self.arrays.items():
            groups.setdefault(array, []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def row_owners(self) -> dict[str, str]:
        """Returns, by the name of every module whose weight is tied to an embedding's, the
        embedding for which PEFT stores rows of single tokens, and to which it ties the others."""
        embeddings = {layer.name for layer in self.layers if layer.kind == "embedding"}
        owners = {}
        for names in self.tied():
            modules = [name.removesuffix(".weight") for name in names]
            owner = next((module for module in modules if module in embeddings), None)
            owners |= dict.fromkeys(modules, owner) if owner else {}
        return owners


def key_modules(layers: Iterable[Layer]) -> dict[str, str]:
    """Returns, by the name of every adapted layer in the order of registration, the module that
    PEFT's keys name. PEFT wraps a module with packed experts once for each adapted parameter, in
    that order, so the last parameter's adapter is the outermost."""
    found, wrapped = {}, dict[str, list[Layer]]()
    for layer in reversed(list(layers)):
        found[layer.name] = layer.name
        if layer.kind == "experts":
            module = layer.name.rpartition(".")[0]
            others = wrapped.setdefault(module, [])
            found[layer.name] = module + ".base_layer" * len(others)
            others.append(layer)
    for module, others in wrapped.items():
        names = [one.name.rpartition(".")[2] for one in others]
        if len(names) > 1 and not all(one.is_in_order for one in others):
            raise ValueError(
                f"{module} has adapters of {', '.join(sorted(names))}; PEFT's keys tell them apart "
                "only by the order in which PyTorch registers them; expected that order: pass "
                "names=jax_dora.peft.Names(experts=[...])"
            )
    return found


def convolution_refusals(
    groups: int, window: Sequence[int], dilation: Sequence[int], padding_mode: str
) -> tuple[str, ...]:
    """Returns the `Layer.refusals` of a convolution with this window and dilation of each spatial
    axis.

    PEFT copies only the window, stride and padding to lora_A. So with several groups lora_A reads
    every input channel in every group, which no weight of the base's shape can express; with
    dilation it reads other positions; and it always pads with zeros.
    """
    is_dilated = any(step != 1 for size, step in zip(window, dilation, strict=True) if size > 1)
    refusals = {
        f"has {groups} groups": groups != 1,
        f"has dilation {tuple(dilation)}": is_dilated,
        f"has {padding_mode} padding": padding_mode != "zeros",
    }
    return tuple(setting for setting, is_set in refusals.items() if is_set)


def check_layers(layers: Iterable[Layer], *, use_dora: bool) -> None:
    """Raises NotImplementedError for layers where PEFT's adapter computes something else."""
    layers = list(layers)
    refused = [f"{one.name} {', '.join(one.refusals)}" for one in layers if one.refusals]
    if refused:
        raise NotImplementedError(
            f"{'; '.join(sorted(refused))}; expected layers that are called, and convolutions with "
            "one group, no dilation and zero padding, since PEFT's adapter computes something else "
            "for other layers: leave these layers out of target_modules"
        )
    swapped = [one.name for one in layers if one.is_swapped_in_lora and not use_dora]
    if swapped:
        raise NotImplementedError(
            f"use_dora is False, and PEFT takes the input features of {', '.join(sorted(swapped))} "
            "for the output features, since the module has no is_transposed, so that its LoRA has "
            "lora_A and lora_B exchanged; expected use_dora=True, or these parameters left out"
        )
