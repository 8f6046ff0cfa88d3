"""DoRALinear: a linear layer with a frozen weight and a trainable DoRA adapter."""

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dora.hyperparameters import (
    DropoutMode,
    adapter_scale,
    as_python,
    check_hyperparameters,
)
from torch_dora.ops import check, compose_delta, dispatch, dora_linear, factored_norm
from torch_dora.ops import magnitude_scale as g_of
from torch_dora.ops.dtypes import accumulation_dtype
from torch_dora.ops.products import product
from torch_dora.reuse import current_norm


class DoRALinear(nn.Module):
    """y = x W'ᵀ + bias with W' = magnitude ∘ (W + s·BA) / ‖W + s·BA‖ row by row (arXiv 2402.09353).

    Parameters, in torch layout: the frozen ``weight`` [out, in] and ``bias`` [out] or None, and the
    trained ``lora_a`` [rank, in], ``lora_b`` [out, rank] and ``magnitude`` [out]. The magnitude
    starts as the norm of the adapter as it is initialised, so a fresh adapter with lora_b = 0
    gives back the base layer's output, bit for bit, and one with any other lora_b gives W + s·BA.

    The magnitude is kept in fp32 (fp64 for an fp64 layer) whatever ``adapter_dtype``: rounded to
    bf16 it would differ from the norm, and g from 1, in a fresh adapter already.

    Args:
        in_features, out_features: as in ``torch.nn.Linear``.
        rank: r, at least 1.
        alpha: s = alpha / rank, or alpha / sqrt(rank) with ``use_rslora``.
        use_rslora: see ``alpha``.
        dropout: probability of dropping an element of x in training.
        dropout_mode: "adapter" drops the x that lora_a reads, as LoRA does elsewhere; "input" drops
            it in the magnitude's correction too, as Hugging Face PEFT does in training, at the cost
            of a second product with the weight: y = xWᵀ + b + (g-1)·drop(x)Wᵀ + g·s·drop(x)(BA)ᵀ.
        bias: whether the base layer has one.
        adapter_dtype: dtype of lora_a and lora_b.
        implementation: of the operators: None for the best, "triton" or "eager".
        device, dtype: of the base layer.

    Raises:
        TypeError, ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float,
        use_rslora: bool = False,
        dropout: float = 0.0,
        dropout_mode: DropoutMode = "adapter",
        bias: bool = True,
        adapter_dtype: torch.dtype = torch.float32,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        base = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self._adopt(
            base,
            rank=rank,
            alpha=alpha,
            use_rslora=use_rslora,
            dropout=dropout,
            dropout_mode=dropout_mode,
            adapter_dtype=adapter_dtype,
            implementation=implementation,
        )

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        rank: int,
        alpha: float,
        use_rslora: bool = False,
        dropout: float = 0.0,
        dropout_mode: DropoutMode = "adapter",
        adapter_dtype: torch.dtype = torch.float32,
        implementation: str | None = None,
    ) -> Self:
        """Adapt an existing layer. Its weight and bias are shared, not copied, and frozen.

        Raises:
            TypeError: ``linear`` is no ``torch.nn.Linear``; else as the constructor.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(
                f"linear must be a torch.nn.Linear, got {type(linear).__name__}; "
                "torch_dora.ops.dora_linear takes any weight [out, in]"
            )
        layer = cls.__new__(cls)
        layer._adopt(
            linear,
            rank=rank,
            alpha=alpha,
            use_rslora=use_rslora,
            dropout=dropout,
            dropout_mode=dropout_mode,
            adapter_dtype=adapter_dtype,
            implementation=implementation,
        )
        layer.train(linear.training)
        return layer

    def _adopt(
        self,
        base: nn.Linear,
        *,
        rank: int,
        alpha: float,
        use_rslora: bool,
        dropout: float,
        dropout_mode: DropoutMode,
        adapter_dtype: torch.dtype,
        implementation: str | None,
    ) -> None:
        check_hyperparameters(rank, alpha, dropout, dropout_mode, adapter_dtype)
        dispatch.check_name(implementation)
        check.is_float("weight", base.weight)
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        rank, alpha, dropout = map(as_python, (rank, alpha, dropout))
        self.rank, self.alpha, self.use_rslora = rank, alpha, use_rslora
        self.scale = adapter_scale(rank, alpha, use_rslora)
        self.dropout, self.dropout_mode = dropout, dropout_mode
        self.implementation = implementation
        self.weight = base.weight.requires_grad_(False)
        self.bias = None if base.bias is None else base.bias.requires_grad_(False)

        device = self.weight.device
        magnitude_dtype = accumulation_dtype(self.weight, torch.empty(0, dtype=adapter_dtype))
        self.lora_a = nn.Parameter(
            torch.empty(rank, self.in_features, device=device, dtype=adapter_dtype)
        )
        self.lora_b = nn.Parameter(
            torch.empty(self.out_features, rank, device=device, dtype=adapter_dtype)
        )
        self.magnitude = nn.Parameter(
            torch.empty(self.out_features, device=device, dtype=magnitude_dtype)
        )
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """Draw a fresh adapter: lora_a uniform as ``nn.Linear`` draws its weight, lora_b zero."""
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)
        self.reset_magnitude()

    @torch.no_grad()
    def reset_magnitude(self) -> None:
        """Set the magnitude to ‖weight + scale·lora_b lora_a‖: call it after setting the adapter by
        hand, or the layer is no longer the identity on weight + scale·lora_b lora_a."""
        self.magnitude.copy_(self.norm())

    def norm(self) -> Tensor:
        """‖weight + scale·lora_b lora_a‖, f32[out], detached."""
        return factored_norm(
            self.weight,
            self.lora_a,
            self.lora_b,
            self.scale,
            implementation=self.implementation,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], in the dtype that x and the weight promote to."""
        dropped = None
        if self.training and self.dropout > 0:
            dropped = F.dropout(x, self.dropout)
        if dropped is not None and self.dropout_mode == "input":
            return self._forward_dropping_input(x, dropped)
        return dora_linear(
            x,
            self.weight,
            self.lora_a,
            self.lora_b,
            self.magnitude,
            self.scale,
            bias=self.bias,
            norm=current_norm(self),
            adapter_x=dropped,
            implementation=self.implementation,
        )

    def _forward_dropping_input(self, x: Tensor, dropped: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        base = F.linear(dropped, self.weight)
        z = F.linear(dropped.to(base.dtype), self.lora_a.to(base.dtype))
        lora = F.linear(z, self.lora_b.to(base.dtype))
        g = g_of(self.magnitude, current_norm(self), base.dtype)
        return y + compose_delta(base, lora, g, self.scale, implementation=self.implementation)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W' = g∘(weight + scale·lora_b lora_a), [out, in], in fp32 (fp64 for an fp64 layer)."""
        dtype = accumulation_dtype(self.weight, self.lora_a, self.lora_b)
        g = g_of(self.magnitude, self.norm(), self.weight.dtype).to(dtype)
        with torch.autocast(self.weight.device.type, enabled=False):
            merged = product(self.lora_b, self.lora_a, dtype).mul_(self.scale).add_(self.weight)
        return merged.mul_(g[:, None])

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """A plain ``nn.Linear`` that computes what this layer does, up to the rounding of its
        weight: merged in fp32 and cast once to the base weight's dtype. This layer is unchanged.
        """
        merged = nn.Linear(
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device="meta",
            dtype=self.weight.dtype,
        )
        merged.weight = nn.Parameter(self.merged_weight().to(self.weight.dtype))
        if self.bias is not None:
            merged.bias = nn.Parameter(self.bias.detach().clone())
        return merged.train(self.training)

    def extra_repr(self) -> str:
        """The hyperparameters, as ``nn.Module`` prints them."""
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.rank}, alpha={self.alpha}, "
            f"use_rslora={self.use_rslora}"
        )
        if self.dropout > 0:
            text += f", dropout={self.dropout}, dropout_mode={self.dropout_mode!r}"
        return text
