"""DoRA for torch.nn.Conv1d, Conv2d and Conv3d."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dora.layers.base import DoRALayer
from torch_dora.ops import compose, compose_delta

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class DoRAConv(DoRALayer):
    """y = conv(x, magnitude ∘ (W + s·BA) / ‖W + s·BA‖) + bias, in one, two or three dimensions.

    There is one norm per output channel, over the kernel window and the input channels of that
    output channel. The layer computes

        y = base + ((g-1)∘base + g∘(s·lora)) + bias

    where lora is a convolution with lora_a, with the base's stride, padding, dilation and groups,
    followed by a product with lora_b.

    In a grouped convolution every group has its own adapter of rank / groups. (PEFT's adapter reads
    all input channels in every group; no weight of the base's shape can represent that.) The norms
    of several groups come from one batched product in torch, whatever ``implementation`` is.

    Parameters: ``weight`` [out, in / groups, *window], ``bias`` [out] or None, ``lora_a``
    [rank, in / groups, *window], ``lora_b`` [out, rank / groups], ``magnitude`` [out].

    The arguments are those of :class:`DoRALayer`; rank must be a multiple of the number of groups.
    """

    BASES = CONVOLUTIONS
    BASES_NAMED = "torch.nn.Conv1d, Conv2d and Conv3d"

    @classmethod
    def check_base(cls, base: Any, rank: int, dropout: float) -> None:
        super().check_base(base, rank, dropout)
        if rank % base.groups:
            raise ValueError(
                f"rank is {rank} and the convolution has {base.groups} groups, each of which gets "
                f"an equal part of the rank; expected a multiple of {base.groups}"
            )

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        out, *window = self.weight.shape
        return {
            "lora_a": (self.rank, *window),
            "lora_b": (out, self.rank // self.settings.groups),
            "magnitude": (out,),
        }

    def weight_matrix(self) -> Tensor:
        return self._by_group(self.weight)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight_matrix(), self._by_group(self.lora_a), self._by_group(self.lora_b)

    def _by_group(self, tensor: Tensor) -> Tensor:
        groups = self.settings.groups
        matrix = tensor.flatten(1)
        return matrix if groups == 1 else matrix.unflatten(0, (groups, -1))

    def forward(self, input: Tensor) -> Tensor:
        """Returns [batch, out, *positions] for [batch, in, *positions], or both without the batch
        axis."""
        if self.is_disabled:
            return self.call_base(input)
        x, dropped = input, self.drop(input)
        channels = x.ndim - self.weight.ndim + 1

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return self.settings._conv_forward(x, weight, bias).movedim(channels, -1)

        y = convolve(x, self.weight, self.bias)
        adapter_x = x if dropped is None else dropped
        lora = self._expand(convolve(adapter_x, self.lora_a.to(self.weight.dtype)))
        g = self.g(y.dtype)
        if dropped is not None and self.dropout_mode == "input":
            base = convolve(dropped, self.weight)
        elif self.bias is not None:
            base = y - self.bias.to(y.dtype)
        else:
            y = compose(y, lora, g, self.scale, implementation=self.implementation)
            return y.movedim(-1, channels)
        # y keeps the base's own sum with its bias, so that a fresh adapter changes no bit of the
        # output.
        delta = compose_delta(base, lora, g, self.scale, implementation=self.implementation)
        return (y + delta).movedim(-1, channels)

    def _expand(self, z: Tensor) -> Tensor:
        """Multiplies z [..., rank] by lora_b, group by group, and returns [..., out]."""
        groups = self.settings.groups
        lora_b = self.lora_b.to(z.dtype)
        if groups == 1:
            return F.linear(z, lora_b)
        z = z.unflatten(-1, (groups, -1))
        return torch.einsum("...gr,gor->...go", z, lora_b.unflatten(0, (groups, -1))).flatten(-2)
