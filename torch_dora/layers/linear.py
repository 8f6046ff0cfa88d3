"""DoRA for torch.nn.Linear, and for the Conv1D of GPT-2-like models: a linear layer with weight
[in, out]."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from torch_dora.layers import fast_path
from torch_dora.layers.base import DoRALayer
from torch_dora.ops import direct, dora_linear
from torch_dora.ops.linear import corrected_linear
from torch_dora.ops.operator import PLAIN


def adapted_linear(
    layer: DoRALayer,
    x: Tensor,
    weight: Any,
    lora_a: Tensor,
    lora_b: Tensor,
    magnitude: Tensor,
    norm: Tensor | None,
    bias: Tensor | None = None,
    dropped: Tensor | None = None,
) -> Tensor:
    """Returns x W'ᵀ + bias for one matrix of ``layer``, [out, in], after the layer's dropout.
    Without a norm it is computed, and so is ``dropped``, x after dropout."""
    dropped = layer.drop(x) if dropped is None else dropped
    if dropped is None or layer.dropout_mode == "adapter":
        return dora_linear(
            x,
            weight,
            lora_a,
            lora_b,
            magnitude,
            layer.scale,
            bias=bias,
            norm=norm,
            adapter_x=dropped,
            implementation=layer.implementation,
            act_qtype=layer.act_qtype,
            bwd_qtype=layer.bwd_qtype,
        )
    if layer.act_qtype is not None:
        raise NotImplementedError(
            f"the layer has dropout_mode='input' and quantises its input to {layer.act_qtype}; "
            "expected dropout_mode='adapter', or a base with weight-only quantisation"
        )
    operands = x, dropped, weight, bias, lora_a, lora_b, magnitude, norm
    return corrected_linear(*operands, layer.scale, layer.implementation)


class _LinearBase(DoRALayer):
    """A linear layer with the weight [out, in] that :meth:`weight_matrix` returns."""

    SHARDED_AXES: ClassVar = {"lora_a": 1, "lora_b": 0, "magnitude": 0}

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., out] for [..., in], in the result dtype of
        :func:`torch_dora.ops.dora_linear`."""
        return self._call(input)

    def _call(self, x: Tensor, dropped: Tensor | None = None) -> Tensor:
        if self.is_disabled:
            return self.call_base(x)
        if isinstance(x, Tensor) and x.is_nested:
            return fast_path.call_on_nested(self, x)
        weight, norm = self.weight_matrix(), self.begin_call()
        adapter = self.lora_a, self.lora_b, self.magnitude
        return adapted_linear(self, x, weight, *adapter, norm, self.bias, dropped)


class DoRALinear(_LinearBase):
    """y = x W'ᵀ + bias with W' = magnitude ∘ (W + s·BA) / ‖W + s·BA‖ row by row (arXiv 2402.09353).

    Parameters: the frozen ``weight`` [out, in] and ``bias`` [out] or None, and the trained
    ``lora_a`` [rank, in], ``lora_b`` [out, rank] and ``magnitude`` [out].

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        rank, alpha, use_rslora, dropout, dropout_mode, adapter_dtype, implementation: as in
            :class:`DoRALayer`.

    Raises:
        TypeError, ValueError: an argument is out of its range.
    """

    BASES = (nn.Linear,)
    BASES_NAMED = "torch.nn.Linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        base = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        super().__init__(base, rank=rank, alpha=alpha, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., out] for [..., in], in the result dtype of
        :func:`torch_dora.ops.dora_linear`."""
        if torch.compiler.is_compiling():
            return super().forward(input)
        y, dropped = self._direct(input)
        return self._call(input, dropped) if y is None else y

    def _direct(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the result if this is the call that most layers make, and nothing about the layer
        needs attention; otherwise None. Also returns x after dropout, if that was applied.

        A step of a small model waits for this function: parameters are read from their dictionary,
        which nn.Module's attributes search.
        """
        tensors, base = self._parameters, self._base[0]
        weight = tensors.get("weight")
        is_usual = (
            weight is not None
            and base._parameters.get("weight") is weight
            and type(x) in PLAIN
            and not (x.is_nested or self.is_disabled)
            and self.act_qtype is None
            and "_hf_hook" not in vars(self)
        )
        lora_a, lora_b = tensors.get("lora_a"), tensors.get("lora_b")
        magnitude = tensors.get("magnitude")
        if not is_usual or lora_a is None or lora_b is None or magnitude is None:
            return None, None
        if "bias" not in tensors:  # It is pruned or parametrised.
            return None, None
        if magnitude.dtype != torch.float32:
            return None, None
        bias, norm = tensors["bias"], self._buffers["constant_norm"]
        dropped = self.drop(x)
        operands = (x, dropped, weight, bias, lora_a, lora_b, magnitude, norm)
        corrects = dropped is not None and self.dropout_mode == "input"
        call = self._scale, self.implementation, corrects, self.rank
        return direct.linear(operands, *call), dropped

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, rank: int, alpha: float, **options: Any) -> Self:
        """Returns a DoRA layer that adapts ``linear``. Its weight and bias are shared, not copied,
        and frozen.

        Takes the arguments and raises the errors of :class:`DoRALayer`.
        """
        return cls.from_base(linear, rank=rank, alpha=alpha, **options)

    @classmethod
    def adapts(cls, module: nn.Module) -> bool:
        # MultiheadAttention reads the weight of its out_proj and never calls out_proj.
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return False
        return super().adapts(module) or is_falcon_linear(module)


class DoRAConv1D(_LinearBase):
    """y = x W' + bias, with the weight stored as [in, out] and the adapter as in DoRALinear.

    Parameters: ``weight`` [in, out], ``bias`` [out], ``lora_a`` [rank, in], ``lora_b`` [out, rank],
    ``magnitude`` [out]. The arguments are those of :class:`DoRALayer`.
    """

    BASES_NAMED = "transformers' Conv1D (DoRAConv adapts a torch.nn.Conv1d)"

    @classmethod
    def adapts(cls, module: nn.Module) -> bool:
        return is_conv1d(module)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns [..., out] for x [..., in], in the dtype that x and the weight promote to."""
        return super().forward(x)

    def weight_matrix(self) -> Tensor:
        return self.weight.T

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix.T.contiguous()


def is_falcon_linear(module: Any) -> bool:
    """Returns whether ``module`` is transformers' FalconLinear, whose forward computes the same as
    torch.nn.Linear's."""
    kind = type(module)
    return kind.__name__ == "FalconLinear" and kind.__module__.startswith("transformers.")


def is_conv1d(module: Any) -> bool:
    """Returns whether ``module`` is transformers' Conv1D. The check uses the name and the
    attributes, so transformers need not be installed."""
    if not (type(module).__name__ == "Conv1D" and hasattr(module, "nx") and hasattr(module, "nf")):
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and tuple(weight.shape) == (module.nx, module.nf)
