"""What the DoRA layers over an existing torch layer have in common."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from torch_dora.hyperparameters import (
    DropoutMode,
    adapter_scale,
    as_python,
    check_hyperparameters,
)
from torch_dora.ops import check, dispatch, factored_norm, magnitude_scale
from torch_dora.ops.dtypes import accumulation_dtype
from torch_dora.ops.products import product
from torch_dora.reuse import current_norm


class DoRALayer(nn.Module):
    """An existing layer with an adapter beside it.

    The magnitude starts as the norm of the adapter as it is initialised, so that a fresh layer
    computes what the base would with weight + s·lora_b lora_a. The norm is per output feature and
    constant under differentiation (arXiv 2402.09353, section 4.3). The magnitude is fp32 (fp64 for
    an fp64 layer) whatever ``adapter_dtype``.

    Args:
        base: the layer to adapt. Its weight and bias are shared, not copied, and frozen.
        rank: r, at least 1.
        alpha: s = alpha / rank, or alpha / sqrt(rank) with ``use_rslora``.
        use_rslora: see ``alpha``.
        dropout: probability of dropping an element of the input in training.
        dropout_mode: "adapter" drops what lora_a reads, "input" what the whole correction reads.
        adapter_dtype: dtype of lora_a and lora_b.
        implementation: of the operators: None for the best, "triton" or "eager".

    Raises:
        TypeError, ValueError: an argument is out of its range.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter

    def __init__(
        self,
        base: Any,
        *,
        rank: int,
        alpha: float,
        use_rslora: bool = False,
        dropout: float = 0.0,
        dropout_mode: DropoutMode = "adapter",
        adapter_dtype: torch.dtype = torch.float32,
        implementation: str | None = None,
    ) -> None:
        check_hyperparameters(rank, alpha, dropout, dropout_mode, adapter_dtype)
        dispatch.check_name(implementation)
        weight, bias = base.weight, getattr(base, "bias", None)
        check.is_float("weight", weight)
        super().__init__()
        rank, alpha, dropout = map(as_python, (rank, alpha, dropout))
        self.rank, self.alpha, self.use_rslora = rank, alpha, use_rslora
        self.scale = adapter_scale(rank, alpha, use_rslora)
        self.dropout, self.dropout_mode = dropout, dropout_mode
        self.implementation = implementation
        self.weight = weight.requires_grad_(False)
        self.bias = None if bias is None else bias.requires_grad_(False)
        # In a tuple, so that it is no submodule: its parameters are this layer's already.
        self._base = (base,)
        dtypes = {
            "lora_a": adapter_dtype,
            "lora_b": adapter_dtype,
            "magnitude": accumulation_dtype(weight, torch.empty(0, dtype=adapter_dtype)),
        }
        for name, shape in self.adapter_shapes().items():
            empty = torch.empty(shape, device=weight.device, dtype=dtypes[name])
            setattr(self, name, nn.Parameter(empty))
        self.reset_adapter()
        self.train(base.training)

    @property
    def base(self) -> Any:
        """The layer that this one adapts, on the parameters that this one has now: whoever replaces
        a parameter (``load_state_dict(assign=True)``, tying, ...) replaces it here alone."""
        base = self.settings
        for name in base._parameters:
            base._parameters[name] = getattr(self, name)
        return base

    @property
    def settings(self) -> Any:
        """The layer that this one adapts, to read its settings of: its parameters may be old."""
        return self._base[0]

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of lora_a, lora_b and magnitude."""
        raise NotImplementedError

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """weight [n, out, in], lora_a [n, r, in] and lora_b [n, out, r]: n is the number of groups
        that have a matrix and an adapter each."""
        raise NotImplementedError

    def reset_adapter(self) -> None:
        """Draw a fresh adapter: lora_a uniform in ±1/sqrt(in), as PEFT, lora_b zero."""
        bound = 1 / math.sqrt(self.matrices()[1].shape[2])
        nn.init.uniform_(self.lora_a, -bound, bound)
        nn.init.zeros_(self.lora_b)
        self.reset_magnitude()

    @torch.no_grad()
    def reset_magnitude(self) -> None:
        """Set the magnitude to the norm: call it after setting lora_a or lora_b by hand."""
        self.magnitude.copy_(self.norm())

    def norm(self) -> Tensor:
        """‖weight + scale·lora_b lora_a‖ of every output feature: f32[out], detached."""
        weight, lora_a, lora_b = (matrices.detach() for matrices in self.matrices())
        if len(weight) == 1:
            return factored_norm(
                weight[0],
                lora_a[0],
                lora_b[0],
                self.scale,
                implementation=self.implementation,
            )
        # One batched product instead of a factored norm for each group. The matrices of groups are
        # small, and float64 is out of reach of TensorFloat-32 and of autocast.
        direction = weight.double() + self.scale * (lora_b.double() @ lora_a.double())
        norm = torch.linalg.vector_norm(direction, dim=2).flatten()
        return norm.to(accumulation_dtype(weight, lora_a, lora_b))

    def g(self, dtype: torch.dtype) -> Tensor:
        """magnitude / norm, for a result of ``dtype``: f32[out]."""
        return magnitude_scale(self.magnitude, current_norm(self), dtype)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """g∘(weight + scale·lora_b lora_a), in the weight's shape and in fp32 (fp64 for fp64)."""
        weight, lora_a, lora_b = self.matrices()
        dtype = accumulation_dtype(weight, lora_a, lora_b)
        g = self.g(self.weight.dtype).to(dtype).reshape(len(weight), -1, 1)
        merged = []
        with torch.autocast(weight.device.type, enabled=False):
            for w, a, b, scale in zip(weight, lora_a, lora_b, g, strict=True):
                merged.append(product(b, a, dtype).mul_(self.scale).add_(w).mul_(scale))
        return self.as_weight(torch.stack(merged))

    def as_weight(self, matrices: Tensor) -> Tensor:
        """[n, out, in] in the shape that the weight is stored in."""
        return matrices.reshape(self.weight.shape)

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """A plain layer like the base, whose weight is the merged one cast once to the base's
        dtype. This layer and its base are unchanged."""
        memo: dict[int, Any] = {id(p): p for p in self.base.parameters()}
        merged = copy.deepcopy(self.base, memo)
        merged.weight = nn.Parameter(
            self.merged_weight().to(self.weight.dtype), requires_grad=False
        )
        return merged.train(self.training)

    def extra_repr(self) -> str:
        """The base and the hyperparameters, as ``nn.Module`` prints them."""
        text = (
            f"{self.settings}, rank={self.rank}, alpha={self.alpha}, use_rslora={self.use_rslora}"
        )
        if self.dropout > 0:
            text += f", dropout={self.dropout}, dropout_mode={self.dropout_mode!r}"
        return text
