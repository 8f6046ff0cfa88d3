"""The layers of a model that PEFT can adapt, as PyTorch has them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dora_common.peft.keys import Role

Shape = tuple[int, ...]
Kind = Literal["linear", "embedding", "conv"]


@dataclass(frozen=True)
class Layer:
    """A layer that can be adapted, as PyTorch would have it.

    Attributes:
      name: its module's name.
      kind: "linear" (GPT-2's Conv1D too), "embedding" or "conv" (1d, 2d, 3d).
      in_features, out_features: an embedding's are its vocabulary and its width; a convolution's
        its channels.
      kernel_size: of a convolution.
      refusals: why an adapter of PEFT computes something else here than a DoRA layer does.
    """

    name: str
    kind: Kind
    in_features: int
    out_features: int
    kernel_size: Shape = ()
    refusals: tuple[str, ...] = ()

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


def convolution_refusals(
    groups: int, window: Sequence[int], dilation: Sequence[int], padding_mode: str
) -> tuple[str, ...]:
    """Returns what `Layer.refusals` is of a convolution.

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
    """
    Raises:
      NotImplementedError: PEFT's adapter of one of the layers, which are to be adapted, would
        compute something else than a DoRA layer does.
    """
    told = [f"{one.name} {', '.join(one.refusals)}" for one in layers if one.refusals]
    if told:
        raise NotImplementedError(
            f"{'; '.join(sorted(told))}; expected layers that are called, and convolutions of one "
            "group, no dilation and zero padding: PEFT's adapter computes something else there: "
            "leave these layers out of target_modules"
        )
