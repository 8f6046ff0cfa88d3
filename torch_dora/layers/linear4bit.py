"""DoRA for bitsandbytes' Linear4bit."""

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_dora.layers.linear import DoRALinear
from torch_dora.ops import quantised


class DoRALinear4bit(DoRALinear):
    """A :class:`DoRALinear` over bitsandbytes' Linear4bit, in NF4 or FP4: what others call QDoRA.

    The norm reads the codes, on a GPU as they are and elsewhere block by block; products are of a
    copy in the layer's ``compute_dtype`` that lasts as long as they do. Merged it is a
    ``torch.nn.Linear`` in the dtype that the weight had before it was quantised: quantised again it
    could lose the adapter.
    """

    BASES_NAMED: ClassVar = "bitsandbytes' Linear4bit"

    @classmethod
    def adapts(cls, module: nn.Module) -> bool:
        of = next((kind for kind in type(module).__mro__ if kind.__name__ == "Linear4bit"), None)
        return (
            of is not None
            and of.__module__.startswith("bitsandbytes.")
            and type(module).forward is of.forward
        )

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns [..., out] of x [..., in], in x's dtype."""
        dtype = self.settings.compute_dtype
        return super().forward(x if dtype is None else x.to(dtype)).to(x.dtype)

    def weight_matrix(self) -> Any:
        dtype = self.settings.compute_dtype
        if torch.compiler.is_exporting():
            # A fake tensor without scales stands in the place of the Params4bit.
            return quantised.bits4(self.weight, self.settings.weight.quant_state, dtype)
        return quantised.matrix(self.weight, dtype)

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix

    def merge(self) -> nn.Module:
        weight: Any = self.weight
        merged = self.merged_weight().to(weight.quant_state.dtype)
        out_features, in_features = merged.shape
        made: Any = nn.Linear(in_features, out_features, bias=False, device="meta")
        made.weight = nn.Parameter(merged, requires_grad=False)
        made.bias = self.bias
        return made.train(self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Writes the scales beside the codes, as Linear4bit does."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight: Any = self.weight
        for name, part in weight.quant_state.as_dict(packed=True).items():
            destination[f"{prefix}weight.{name}"] = part if keep_vars else part.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight: Any = self.weight
        name = f"{prefix}weight"
        parts = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(f"{name}.")}
        if parts and name in state_dict:
            # Of its class, since it is this layer's weight where it is assigned.
            loaded = type(weight).from_prequantized(state_dict[name], parts, device=weight.device)
            state_dict[name], weight.quant_state = loaded, loaded.quant_state
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __setstate__(self, state: Any) -> None:
        """Gives the weight its class again, for which pickle has torch's own Parameter."""
        super().__setstate__(state)
        bitsandbytes: Any = sys.modules["bitsandbytes"]
        self.weight.__class__ = bitsandbytes.nn.Params4bit
