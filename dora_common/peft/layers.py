"""The layers of a model that PEFT can adapt, as PyTorch has them."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dora_common.peft.keys import Role

Shape = tuple[int, ...]
Kind = Literal["linear", "embedding", "conv", "experts"]


@dataclass(frozen=True)
class Layer:
    """A layer that can be adapted, as PyTorch would have it.

    Attributes:
      name: its module's name; of packed experts, the parameter's.
      kind: "linear" (GPT-2's Conv1D too), "embedding", "conv" (1d, 2d, 3d) or "experts", which is
        one parameter with a matrix for each expert: PEFT's target_parameters.
      in_features, out_features: an embedding's are its vocabulary and its width; a convolution's
        its channels.
      kernel_size: of a convolution.
      refusals: why an adapter of PEFT computes something else here than a DoRA layer does.
      experts: how many there are.
      is_in_order: whether it is known in which order PyTorch registers the experts of its module.
    """

    name: str
    kind: Kind
    in_features: int
    out_features: int
    kernel_size: Shape = ()
    refusals: tuple[str, ...] = ()
    experts: int = 0
    is_in_order: bool = True

    def shapes(self, rank: int) -> dict[Role, Shape]:
        """Returns the shapes PEFT writes for an adapter of `rank`.

        Packed experts' lora_A is [experts, rank, in], their lora_B [out, rank, experts], each with
        two axes as one; their magnitude, which PEFT has not, is [experts, out].
        """
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
        """Returns the shapes that a tensor may have: PEFT's first, then those that other tools give
        a magnitude, all of the same [out] numbers. A linear layer's (1, out) is refused: it may be
        a norm per input."""
        usual = self.shapes(rank)[role]
        if role != "magnitude" or self.kind == "experts":
            return (usual,)
        ones = (1,) * len(self.kernel_size)
        return (usual, (self.out_features,), (self.out_features, 1, *ones))


@dataclass(frozen=True)
class Outline:
    """A model as PyTorch names it.

    Attributes:
      layers: those that can be adapted or are.
      parameters: the shape of every parameter of the base model, by name.
      arrays: what identifies the array of each of them; the same for those that share one.
      refusals: why some other weights, by name, cannot be adapted as the model is.
    """

    layers: Sequence[Layer]
    parameters: Mapping[str, Shape]
    arrays: Mapping[str, Hashable]
    refusals: Mapping[str, str] = field(default_factory=dict)

    def tied(self) -> list[list[str]]:
        """Returns the groups of two and more parameters that share an array, as an output head that
        is tied to the embedding does."""
        groups: dict[Hashable, list[str]] = {}
        for name, array in self.arrays.items():
            groups.setdefault(array, []).append(name)
        return [names for names in groups.values() if len(names) > 1]


def key_modules(layers: Iterable[Layer]) -> dict[str, str]:
    """Returns for every adapted layer the module that PEFT's keys name.

    PEFT wraps a module with packed experts once for each of its parameters, in the order in which
    they are registered, so that the last one's adapter is the outermost.

    Args:
      layers: those that are adapted; of one module's parameters in the order of registration.
    """
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
                f"{module} has adapters of {', '.join(sorted(names))}, which PEFT's keys tell "
                "apart by the order in which PyTorch registers them; expected that order: pass "
                "names=jax_dora.peft.Names(experts=[...])"
            )
    return found


def convolution_refusals(
    groups: int, window: Sequence[int], dilation: Sequence[int], padding_mode: str
) -> tuple[str, ...]:
    """Returns the `Layer.refusals` of a convolution.

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
        f"has {groups} groups": groups != 1,
        f"has dilation {tuple(dilation)}": apart,
        f"has {padding_mode} padding": padding_mode != "zeros",
    }
    return tuple(setting for setting, is_set in told.items() if is_set)


def refuse_layers(layers: Iterable[Layer]) -> None:
    """Refuses layers whose adapter means something else in PEFT."""
    told = [f"{one.name} {', '.join(one.refusals)}" for one in layers if one.refusals]
    if told:
        raise NotImplementedError(
            f"{'; '.join(sorted(told))}; expected layers that are called, and convolutions of one "
            "group, no dilation and zero padding: PEFT's adapter computes something else there: "
            "leave these layers out of target_modules"
        )
