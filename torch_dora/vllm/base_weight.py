"""The norms of the rows of a base layer with an adapter.

With the layer's weight W [out, in], and A, B and s of the adapter (arXiv 2603.22276, section 3):

    ‖W + sBA‖² = Σ_in W² + 2s Σ_r B∘(W Aᵀ) + s² Σ_r (B A Aᵀ)∘B

vLLM repacks or drops many weights: quantised ones, and all of its CPU build. Where W cannot be
read, the layer's own product gives it: of unit vectors, W itself. Σ_in W² is computed so once for a
layer, and W Aᵀ is the product of A's rows, unless the layer rounds its inputs; then the unit
vectors give W for each adapter again. A layer whose product of unit vectors is not W is refused.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_dora.ops import choose, factored_norm
from torch_dora.ops.choose import Call
from torch_dora.vllm.folder import FolderError

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import one_pass_norm

Product = Callable[[Tensor], Tensor]
Part = tuple[slice, Tensor, Tensor]
"""Some outputs of the layer, with their lora_a [r, in] and s·lora_b [out, r]."""

_UNITS = 512  # unit vectors in one product
# An input that is rounded to INT8 or FP8 changes the product of normal numbers by 0.8 to 3 %.
_EXACT = 2e-3
_SAME = 0.1
_LINEAR = 5e-3  # two roundings of a result to bf16
# Scales of normal numbers that stay below INT8's and FP8's largest number, and are far above the
# smallest.
_SPREAD, _LARGEST = 16.0, 96.0


class BaseWeight:
    """The weight of one base layer, or of this process's part of it.

    Args:
        name: the layer's name, for errors.
        weight: [out, in] if it can be read, else None.
        product: computes x Wᵀ for x [rows, in].
        unit: a number that the layer's product does not round, as an input: the scale of its
            inputs if that is fixed.
    """

    def __init__(
        self,
        name: str,
        weight: Tensor | None,
        product: Product,
        *,
        features: int,
        dtype: torch.dtype,
        device: torch.device,
        unit: float = 1.0,
    ) -> None:
        self.name = name
        self.weight = weight
        self.product = product
        self.features = features
        self.dtype = dtype
        self.device = device
        self.unit = unit
        self._squares: Tensor | None = None
        self._rounds_inputs = False

    def squares(self, parts: Sequence[Part]) -> list[Tensor]:
        """Returns ‖W + sBA‖² of the outputs of each part, f32[out of the part].

        Raises:
            FolderError: the norms of this layer cannot be computed.
        """
        if self.weight is not None:
            dtypes = self.weight.dtype, *(one.dtype for one in parts[0][1:])
            # Most of the operator's time would be its checks, of parts that are cut to fit.
            norm = factored_norm
            if _is_one_kernel(dtypes, self.weight.device.type):
                norm = one_pass_norm.launch
            return [norm(self.weight[rows], a, b, 1.0).square() for rows, a, b in parts]
        if self._squares is None:
            self._squares = self._measure()
        stacked = torch.cat([a for _, a, _ in parts])
        inner = self._inner(stacked).split([len(a) for _, a, _ in parts])
        result = []
        for (rows, a, b), product in zip(parts, inner, strict=True):
            a, b = a.float(), b.float()
            cross = (b * product[:, rows].T).sum(1)
            gram = ((b @ (a @ a.T)) * b).sum(1)
            result.append((self._squares[rows] + 2 * cross + gram).clamp(min=0))
        return result

    def _inner(self, lora_a: Tensor) -> Tensor:
        """Returns A Wᵀ, f32[r, out]."""
        if not self._rounds_inputs:
            return self.product(lora_a.to(self.dtype)).float()
        inner = torch.zeros((), device=self.device)
        for start, columns in self._columns():
            inner = inner + lora_a[:, start : start + len(columns)].float() @ columns
        return inner

    def _units(self, start: int) -> Tensor:
        count = min(_UNITS, self.features - start)
        units = torch.zeros(count, self.features, dtype=self.dtype, device=self.device)
        units[torch.arange(count), torch.arange(start, start + count)] = self.unit
        return units

    def _columns(self) -> Iterator[tuple[int, Tensor]]:
        """Yields blocks of columns of W, each f32[columns, out], with the first's index."""
        for start in range(0, self.features, _UNITS):
            yield start, self.product(self._units(start)).float() / self.unit

    def _measure(self) -> Tensor:
        """Returns Σ_in W², and finds out what the layer does to its inputs."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, self.features, generator=generator).mul(_SPREAD)
        x = (x.clamp(-_LARGEST, _LARGEST) * self.unit).to(self.device, self.dtype)
        squares = expected = torch.zeros((), device=self.device)
        for start, columns in self._columns():
            squares = squares + columns.square().sum(0)
            expected = expected + x[:, start : start + len(columns)].float() @ columns
        error = _distance(self.product(x).float(), expected)
        units = self._units(0)[:16]
        linear = _distance(self.product(3 * units).float(), 3 * self.product(units).float())
        if not (error <= _SAME and linear <= _LINEAR):
            raise FolderError(
                f"{self.name}: its product of unit vectors is not its weight (for {error:.1%} of "
                f"other products, and {linear:.1%} for unit vectors of another length), since it "
                "rounds its inputs; expected a layer whose inputs are not quantised, or to INT8 or "
                "FP8: without the weight's norms, DoRA cannot be computed"
            )
        self._rounds_inputs = error > _EXACT
        return squares


@functools.cache
def _is_one_kernel(dtypes: tuple[torch.dtype, ...], device: str) -> bool:
    """Returns whether one kernel of Triton computes the norm of a weight, with A and B."""
    call = Call(rows=1, features=1, dtypes=dtypes, device=device)
    return choose.choose(call, None, None) == "triton" and one_pass_norm.refuses(call) is None


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def readable_weight(base_layer: Any, features_out: int, features_in: int) -> Tensor | None:
    """Returns the weight [out, in] of an unquantised layer of vLLM, or None if it was repacked."""
    from vllm.model_executor.layers.linear import (  # pyright: ignore[reportMissingImports]
        UnquantizedLinearMethod,
    )

    weight = getattr(base_layer, "weight", None)
    if isinstance(base_layer.quant_method, UnquantizedLinearMethod) and isinstance(weight, Tensor):
        if weight.is_floating_point() and tuple(weight.shape) == (features_out, features_in):
            return weight.detach()
    return None


def input_unit(base_layer: Any) -> float:
    """Returns the scale of the layer's inputs if it is fixed, else 1."""
    scale = getattr(base_layer, "input_scale", None)
    if isinstance(scale, Tensor) and scale.numel() == 1 and float(scale) > 0:
        return float(scale)
    return 1.0
