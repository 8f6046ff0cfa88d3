"""DoRA for bitsandbytes' Linear4bit."""

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_dora.layers import placement
from torch_dora.layers.linear import DoRALinear
from torch_dora.ops import quantised
from torch_dora.ops.shards import is_sharded


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

    @property
    def quant_state(self) -> Any:
        """Returns what bitsandbytes keeps beside the codes, their scales among it, also while plain
        bytes stand in the place of the Params4bit: FSDP's, or those of torch.export."""
        for weight in (self.weight, self.settings.weight):
            if (state := getattr(weight, "quant_state", None)) is not None:
                return state
        return self.settings.quant_state

    def _release_base(self) -> None:
        """Lets go of the base's tensors, except for the scales, which FSDP does not know."""
        if not placement.is_lent(self.weight):
            self.settings.quant_state = self.quant_state
        super()._release_base()

    def weight_matrix(self) -> Any:
        # torch.export follows no .data, and has no Params4bit, whose class a view would have too.
        packed = self.weight if torch.compiler.is_exporting() else self.weight.data
        return quantised.bits4(packed, self.quant_state, self.settings.compute_dtype)

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix

    def merge(self) -> nn.Module:
        merged = self.merged_weight().to(self.quant_state.dtype)
        out_features, in_features = merged.shape
        made: Any = nn.Linear(in_features, out_features, bias=False, device="meta")
        made.weight = nn.Parameter(merged, requires_grad=False)
        made.bias = self.bias
        return made.train(self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Writes the scales beside the codes, as Linear4bit does, which leaves them out under FSDP:
        torch.distributed.checkpoint looks for them in the DTensor."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if is_sharded(self.weight):
            return
        for name, part in self.quant_state.as_dict(packed=True).items():
            destination[f"{prefix}weight.{name}"] = part if keep_vars else part.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight: Any = self.weight
        name = f"{prefix}weight"
        parts = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(f"{name}.")}
        if parts and name in state_dict:
            if is_sharded(weight):
                raise NotImplementedError(
                    f"the state has {name}, codes of 4 bits whose scales FSDP does not know; "
                    "expected one of the adapters alone, as StateDictOptions("
                    "ignore_frozen_params=True) makes it: load the base before fully_shard"
                )
            # Of its class, since it is this layer's weight where it is assigned.
            loaded = type(weight).from_prequantized(state_dict[name], parts, device=weight.device)
            state_dict[name], weight.quant_state = loaded, loaded.quant_state
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __setstate__(self, state: Any) -> None:
        """Gives the weight its class again, for which pickle has torch's own Parameter."""
        super().__setstate__(state)
        bitsandbytes: Any = sys.modules["bitsandbytes"]
        self.weight.__class__ = bitsandbytes.nn.Params4bit
