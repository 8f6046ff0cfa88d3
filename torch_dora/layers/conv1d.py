"""DoRA for the Conv1D of GPT-2's family: a linear layer whose weight is [in, out]."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torch_dora.layers.adapter import DoRALayer
from torch_dora.ops import compose_delta, dora_linear
from torch_dora.reuse import current_norm


def is_conv1d(module: Any) -> bool:
    """Whether ``module`` is transformers' Conv1D, known by its name and its attributes, so that
    transformers need not be there."""
    if not (type(module).__name__ == "Conv1D" and hasattr(module, "nx") and hasattr(module, "nf")):
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and tuple(weight.shape) == (module.nx, module.nf)


class DoRAConv1D(DoRALayer):
    """y = x W' + bias, with the weight stored as [in, out] and the adapter as everywhere else.

    Parameters: ``weight`` [in, out], ``bias`` [out], ``lora_a`` [rank, in], ``lora_b`` [out, rank],
    ``magnitude`` [out]. Arguments as :class:`DoRALayer`'s.
    """

    def __init__(self, base: nn.Module, **options: Any) -> None:
        if not is_conv1d(base):
            raise TypeError(
                f"base must be transformers' Conv1D, got {type(base).__name__}; for a "
                "torch.nn.Conv1d there is DoRAConv"
            )
        super().__init__(base, **options)

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        n_in, n_out = self.weight.shape
        return {"lora_a": (self.rank, n_in), "lora_b": (n_out, self.rank), "magnitude": (n_out,)}

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight.T[None], self.lora_a[None], self.lora_b[None]

    def as_weight(self, matrices: Tensor) -> Tensor:
        return matrices[0].T.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        dropped = None
        if self.training and self.dropout > 0:
            dropped = F.dropout(x, self.dropout)
        if dropped is None or self.dropout_mode == "adapter":
            return dora_linear(
                x,
                self.weight.T,
                self.lora_a,
                self.lora_b,
                self.magnitude,
                self.scale,
                bias=self.bias,
                norm=current_norm(self),
                adapter_x=dropped,
                implementation=self.implementation,
            )
        y = F.linear(x, self.weight.T, self.bias)
        read = F.linear(dropped, self.weight.T)
        z = F.linear(dropped.to(read.dtype), self.lora_a.to(read.dtype))
        lora = F.linear(z, self.lora_b.to(read.dtype))
        g = self.g(read.dtype)
        return y + compose_delta(read, lora, g, self.scale, implementation=self.implementation)
