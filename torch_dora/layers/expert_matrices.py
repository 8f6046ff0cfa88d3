"""The adapted matrices of packed experts, in the place of a tensor.

Code that multiplies by them gets, for base = xWᵀ and lora = xAᵀBᵀ of each row's expert,

    y = base + ((g-1)∘base + g∘(s·lora))

as in a linear layer, and no W' is formed. Every other operation gets W' as a tensor.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dora.layers.linear import adapted_linear
from torch_dora.ops.dtypes import accumulation_dtype, no_autocast

_MATMULS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm)
# What torch.nn.functional.grouped_mm calls.
_GROUPED: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
# What W' has in common with the weight.
_OF_THE_WEIGHT = ("shape", "size", "dim", "ndim", "numel", "dtype", "device", "is_cuda", "layout")
# torch's grouped product takes matrices whose rows have a multiple of 16 bytes.
_GROUPED_ALIGNMENT = 16

type Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ExpertMatrices:
    """The matrices W' of all experts, of one, or of one for each row of a batch.

    Attributes:
        layer: the layer, a DoRAExperts.
        weight: the frozen weights, [..., out, in], or [..., in, out] if ``is_in_out``.
        lora_a, lora_b: [..., r, in] and [..., out, r].
        is_in_out: see ``weight``.
        index: () for all experts, the expert's number, or the experts of the batch, i64[batch].
        has_gradient: whether gradients were on when the module read its parameter.
    """

    layer: Any
    weight: Tensor
    lora_a: Tensor
    lora_b: Tensor
    is_in_out: bool
    index: tuple[Any, ...]
    has_gradient: bool

    @classmethod
    def of(cls, layer: Any) -> Self:
        """Returns all matrices of a layer, laid out as its parameter."""
        tensors = layer.weight, layer.lora_a, layer.lora_b
        return cls(layer, *tensors, layer.is_transposed, (), torch.is_grad_enabled())

    def tensor(self) -> Tensor:
        """Returns W' as a tensor in the weight's dtype. Raises NotImplementedError if the layer
        drops inputs in training; RuntimeError if gradients are off, though they were on when the
        parameter was read."""
        layer = self.layer
        if layer.training and layer.dropout:
            raise NotImplementedError(
                f"dropout is {layer.dropout} for packed experts, whose module does something else "
                "than multiply by them, or is compiled, so that there is no input to drop; "
                "expected 0: give the experts a separate rule"
            )
        trained = (layer.lora_a, layer.lora_b, layer.magnitude)
        if (
            self.has_gradient
            and not torch.is_grad_enabled()
            and any(t.requires_grad for t in trained)
        ):
            raise RuntimeError(
                "packed experts were read where gradients are on, and are used where they are off, "
                "as in an autograd.Function, which would lose the adapter's gradient; expected "
                "code that torch differentiates: set transformers' experts_implementation to "
                "'grouped_mm', 'batched_mm' or 'eager', or freeze the adapter"
            )
        weight = self.weight.mT if self.is_in_out else self.weight
        wide = accumulation_dtype(weight, self.lora_a, self.lora_b)
        with no_autocast(weight):
            product = self.lora_b.to(wide) @ self.lora_a.to(wide)
            merged = (weight.to(wide) + layer.scale * product) * self.g(weight.dtype)[..., None]
            merged = merged.to(weight.dtype)
        return merged.mT if self.is_in_out else merged

    def g(self, dtype: torch.dtype) -> Tensor:
        """Returns magnitude / norm of these experts, for a result of ``dtype``: f32[..., out]."""
        if self.weight.ndim == 2:
            return self.layer.g(dtype, *self.index)
        return self.layer.g(dtype)[self.index]

    @property
    def mT(self) -> Self:
        """These matrices, transposed."""
        return dataclasses.replace(self, weight=self.weight.mT, is_in_out=not self.is_in_out)

    def transpose(self, first: int, second: int) -> Any:
        """Returns these matrices, transposed, or W' with other axes swapped."""
        axes = {axis % self.weight.ndim for axis in (first, second)}
        if axes == {self.weight.ndim - 2, self.weight.ndim - 1}:
            return self.mT
        return self.tensor().transpose(first, second)

    def t(self) -> Any:
        return self.transpose(0, 1)

    @property
    def T(self) -> Any:
        return self.mT if self.weight.ndim == 2 else self.tensor().T

    def __getitem__(self, index: Any) -> Any:
        """Returns the matrices of one expert, or of a batch of experts; W'[index] for an index of
        another kind."""
        is_batch = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
        if is_batch and not index.ndim:
            index, is_batch = int(index), False
        is_expert = isinstance(index, int) and not isinstance(index, bool)
        if self.index or not (is_expert or (is_batch and getattr(index, "ndim", 0) == 1)):
            return self.tensor()[index]
        weight, lora_a, lora_b = (one[index] for one in (self.weight, self.lora_a, self.lora_b))
        return dataclasses.replace(
            self, weight=weight, lora_a=lora_a, lora_b=lora_b, index=(index,)
        )

    def __len__(self) -> int:
        return len(self.weight)

    def __iter__(self) -> Any:
        return (self[at] for at in range(len(self)))

    def __matmul__(self, other: Any) -> Tensor:
        return torch.matmul(self, other)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "data_ptr":
            raise TypeError(
                "the adapted matrices of packed experts have no memory of their own, but code "
                "reads their address; expected operations of torch: set transformers' "
                "experts_implementation to 'grouped_mm', 'batched_mm' or 'eager'"
            )
        return getattr(self.weight if name in _OF_THE_WEIGHT else self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = _product(function, *args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        args, options = pytree.tree_map_only(cls, cls.tensor, (args, kwargs or {}))
        return function(*args, **options)

    def times(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        multiply: Multiply = torch.matmul,
        rows: Any = None,
    ) -> Any:
        """Returns x W' + bias [out] for matrices [..., in, out], or NotImplemented. More than one
        are multiplied by ``multiply``; ``rows`` is the expert of each row of the result unless the
        axes show it."""
        if not self.is_in_out or not isinstance(x, Tensor):
            return NotImplemented
        layer = self.layer
        if self.weight.ndim == 2:
            magnitude, norm = layer.magnitude[self.index], layer.current_norm(*self.index)
            matrices = self.weight.mT, self.lora_a, self.lora_b
            return adapted_linear(layer, x, *matrices, magnitude, norm, bias)
        if x.ndim < 2 or bias is not None:
            return NotImplemented
        dropped = layer.drop(x)
        base = multiply(x, self.weight)
        adapter_x = x if dropped is None else dropped
        z = multiply(adapter_x, self.lora_a.mT.to(x.dtype))
        lora = multiply(z, self.lora_b.mT.to(z.dtype))
        corrected = base
        if dropped is not None and layer.dropout_mode == "input":
            corrected = multiply(dropped, self.weight)
        g = self.g(base.dtype)
        g = g[..., None, :] if rows is None else g[rows]
        with no_autocast(base):
            wide = accumulation_dtype(base)
            correction = (g - 1) * corrected.to(wide) + (g * layer.scale) * lora.to(wide)
            return (base.to(wide) + correction).to(base.dtype)


def _on_tensor(name: str) -> Any:
    return lambda self, *others: getattr(self.tensor(), name)(*others)


# Python looks these up in the class only.
for _name in ("__add__", "__sub__", "__mul__", "__truediv__", "__pow__", "__neg__"):
    setattr(ExpertMatrices, _name, _on_tensor(_name))


def _product(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of a product with the adapted matrices of packed experts; NotImplemented
    for all other operations."""
    operands: tuple[Any, ...] = (*args, None, None)
    first, second = operands[:2]
    if function == F.linear and isinstance(second, ExpertMatrices):
        if second.weight.ndim == 2:
            return second.mT.times(first, *args[2:], **kwargs)
    elif function in _MATMULS and len(args) == 2 and not kwargs:
        if isinstance(second, ExpertMatrices):
            return second.times(first)
        if isinstance(first, ExpertMatrices) and isinstance(second, Tensor) and second.ndim > 1:
            y = first.mT.times(second.mT)
            return y if y is NotImplemented else y.mT
    elif function == _GROUPED and isinstance(second, ExpertMatrices):
        return _grouped(first, second, **kwargs)
    return NotImplemented


def _grouped(x: Any, matrices: ExpertMatrices, *, offs: Any = None, **options: Any) -> Any:
    """Returns torch's grouped product: the rows of x [rows, in] up to ``offs[e]`` are those of
    expert e."""
    if offs is None or x.ndim != 2 or any(value is not None for value in options.values()):
        return NotImplemented
    last = len(matrices) - 1
    rows = torch.arange(len(x), device=x.device, dtype=offs.dtype)
    # Rows behind the last expert's are of no expert, and torch leaves them undefined.
    experts = torch.searchsorted(offs, rows, right=True).clamp(max=last)
    rank = matrices.lora_a.shape[1]
    padding = -rank % (_GROUPED_ALIGNMENT // x.dtype.itemsize)
    padded = dataclasses.replace(
        matrices,
        lora_a=F.pad(matrices.lora_a, (0, 0, 0, padding)),
        lora_b=F.pad(matrices.lora_b, (0, padding)),
    )
    return padded.times(
        x, multiply=lambda x, other: F.grouped_mm(x, other, offs=offs), rows=experts
    )
