"""DoRA for bitsandbytes' Linear4bit."""

import sys
from typing import Any, ClassVar

from torch import Tensor, nn

from torch_dora.layers import placement
from torch_dora.layers.base import computes_like, parameter_alias
from torch_dora.layers.linear import DoRALinear
from torch_dora.ops import quantised
from torch_dora.ops.operator import is_exporting
from torch_dora.ops.shards import is_sharded


class DoRALinear4bit(DoRALinear):
    """A :class:`DoRALinear` over bitsandbytes' Linear4bit, in NF4 or FP4, often called QDoRA.

    The norm reads the 4-bit codes: directly on a GPU, elsewhere dequantised block by block. A
    product dequantises the weight to a temporary copy in the layer's ``compute_dtype``.

    :meth:`merge` returns a ``torch.nn.Linear`` in the dtype of the weight before quantisation:
    quantising the merged weight again could lose the adapter.
    """

    BASES_NAMED: ClassVar = "bitsandbytes' Linear4bit"

    @classmethod
    def adapts(cls, module: nn.Module) -> bool:
        kind = next((kind for kind in type(module).__mro__ if kind.__name__ == "Linear4bit"), None)
        return (
            kind is not None
            and kind.__module__.startswith("bitsandbytes.")
            and computes_like(module, kind)
        )

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns [..., out] for x [..., in], in x's dtype."""
        if self.is_disabled:
            return self.call_base(x)
        dtype = self.settings.compute_dtype
        return super().forward(x if dtype is None else x.to(dtype)).to(x.dtype)

    def call_base(self, input: Tensor) -> Tensor:
        """Returns the base layer's own result. On a CPU, its own code for evaluation is not used:
        that puts the codes, which the adapted layer reads, into another order."""
        base = self._base_copy()
        base.support_avx512bf16_for_cpu = False
        # Its call may replace the bias's data by a copy in another dtype.
        base.bias = parameter_alias(self.bias)
        return type(base).forward(base, input)

    @property
    def quant_state(self) -> Any:
        """Returns bitsandbytes' QuantState, which has the scales. FSDP and torch.export replace the
        Params4bit by plain bytes without a QuantState; then the base's weight or the base still has
        it."""
        for weight in (self.weight, self.settings.weight):
            if (state := getattr(weight, "quant_state", None)) is not None:
                return state
        return self.settings.quant_state

    def _release_base(self) -> None:
        """Drops the base's references to its tensors, but keeps the scales, which FSDP does not
        manage."""
        if not placement.is_temporary(self.weight):
            self.settings.quant_state = self.quant_state
        super()._release_base()

    def weight_matrix(self) -> Any:
        # torch.export cannot trace .data, and its weight is not a Params4bit. Elsewhere .data
        # avoids views that would be Params4bit too.
        packed = self.weight if is_exporting() else self.weight.data
        return quantised.bits4(packed, self.quant_state, self.settings.compute_dtype)

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix

    def merge(self) -> nn.Module:
        merged = self.merged_weight().to(self.quant_state.dtype)
        out_features, in_features = merged.shape
        plain: Any = nn.Linear(in_features, out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(merged, requires_grad=False)
        plain.bias = parameter_alias(self.bias)
        return plain.train(self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Writes the scales next to the codes, as Linear4bit does. Omits them under FSDP, as
        Linear4bit does, because torch.distributed.checkpoint would look for them in the DTensor."""
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
                    f"the state has {name}, codes of 4 bits whose scales FSDP does not manage; "
                    "expected a state with only the adapters, as StateDictOptions("
                    "ignore_frozen_params=True) returns it: load the base before fully_shard"
                )
            # The loaded weight must be a Params4bit: with assign=True it becomes this layer's
            # weight.
            loaded = type(weight).from_prequantized(state_dict[name], parts, device=weight.device)
            state_dict[name], weight.quant_state = loaded, loaded.quant_state
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __setstate__(self, state: Any) -> None:
        """Restores the weight's class: pickle restores it as torch's Parameter."""
        super().__setstate__(state)
        bitsandbytes: Any = sys.modules["bitsandbytes"]
        self.weight.__class__ = bitsandbytes.nn.Params4bit
