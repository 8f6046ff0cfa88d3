"""DoRA for torch.nn.Conv1d, Conv2d and Conv3d."""

import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dora.layers.adapter import DoRALayer
from torch_dora.ops import compose, compose_delta

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class DoRAConv(DoRALayer):
    """y = conv(x, magnitude ∘ (W + s·BA) / ‖W + s·BA‖) + bias, of any number of dimensions.

    The norm is of each output channel, over the window and the input channels it reads. Computed
    as y = base + ((g-1)∘base + g∘(s·lora)) + bias, where lora is a convolution with lora_a like
    the base's (stride, padding, dilation, groups), then a product with lora_b. In a grouped
    convolution every group has an adapter of its own, of rank / groups. (PEFT's reads all input
    channels in every group there, and no weight of the base's shape can hold that.)

    Parameters: ``weight`` [out, in / groups, *window], ``bias`` [out] or None, ``lora_a``
    [rank, in / groups, *window], ``lora_b`` [out, rank / groups], ``magnitude`` [out]. Arguments as
    :class:`DoRALayer`'s; rank is a multiple of the number of groups.
    """

    def __init__(self, base: nn.Module, *, rank: int, **options: Any) -> None:
        if not isinstance(base, CONVOLUTIONS):
            raise TypeError(
                f"base must be a torch.nn.Conv1d, Conv2d or Conv3d, got {type(base).__name__}"
            )
        if isinstance(rank, numbers.Integral) and rank % base.groups:
            raise ValueError(
                f"rank is {rank} and the convolution has {base.groups} groups, each of which takes "
                f"an equal part of the rank; expected a multiple of {base.groups}"
            )
        super().__init__(base, rank=rank, **options)

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        out, *window = self.weight.shape
        return {
            "lora_a": (self.rank, *window),
            "lora_b": (out, self.rank // self.settings.groups),
            "magnitude": (out,),
        }

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        groups = self.settings.groups
        weight, lora_a = (
            part.reshape(groups, len(part) // groups, -1) for part in (self.weight, self.lora_a)
        )
        return weight, lora_a, self.lora_b.reshape(groups, -1, self.lora_b.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """[batch, in, *positions], or without batch, as the base layer."""
        dropped = x
        if self.training and self.dropout > 0:
            dropped = F.dropout(x, self.dropout)
        channels = x.ndim - self.weight.ndim + 1

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return self.settings._conv_forward(x, weight, bias).movedim(channels, -1)

        y = convolve(x, self.weight, self.bias)
        lora = self._expand(convolve(dropped, self.lora_a.to(self.weight.dtype)))
        g = self.g(y.dtype)
        if dropped is not x and self.dropout_mode == "input":
            read = convolve(dropped, self.weight)
        elif self.bias is not None:
            read = y - self.bias.to(y.dtype)
        else:
            y = compose(y, lora, g, self.scale, implementation=self.implementation)
            return y.movedim(-1, channels)
        # The base's own sum with its bias is kept whole: a fresh adapter changes no bit of it.
        delta = compose_delta(read, lora, g, self.scale, implementation=self.implementation)
        return (y + delta).movedim(-1, channels)

    def _expand(self, z: Tensor) -> Tensor:
        """[..., rank] to [..., out] by lora_b, group by group."""
        groups = self.settings.groups
        lora_b = self.lora_b.to(z.dtype)
        if groups == 1:
            return F.linear(z, lora_b)
        z = z.unflatten(-1, (groups, -1))
        return torch.einsum("...gr,gor->...go", z, lora_b.unflatten(0, (groups, -1))).flatten(-2)
