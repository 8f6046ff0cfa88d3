"""One layer's operands, what fp64 makes of them, and the least that must be done."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.work import Expectation
from parity import oracle
from parity.cases import Case, LayerInputs, layer, layer_inputs
from parity.compare import prepare_layer

DTYPE = "bfloat16"
ITEM = 2

Method = Literal["LoRA", "DoRA"]


@dataclass(frozen=True)
class Problem:
    """bf16 weight and adapters, fp32 magnitude, rsLoRA's scale; no bias."""

    case: Case
    inputs: LayerInputs
    device: str

    @classmethod
    def draw(cls, rows: int, n_in: int, n_out: int, rank: int, device: str) -> Problem:
        options = {"adapter_dtype": DTYPE, "rslora": True, "bias": False}
        case = layer(DTYPE, rows, n_in, n_out, rank, **options)
        return cls(case, layer_inputs(case, device), device)

    @property
    def scale(self) -> float:
        return self.case.scale

    def bytes(self, backward: bool) -> int:
        """Returns the bytes of each operand read once and each result written once."""
        c = self.case
        forward = (c.rows + c.rank) * (c.n_in + c.n_out) + c.n_in * c.n_out
        return ITEM * (3 * forward - c.n_in * c.n_out if backward else forward)

    def flops(self, backward: bool, with_norm: bool) -> int:
        """Returns the FLOPs of the matrix products; the frozen weight has no gradient."""
        c = self.case
        base = 2 * c.rows * c.n_in * c.n_out
        adapters = 2 * c.rows * c.rank * (c.n_in + c.n_out)
        total = base * (2 if backward else 1) + adapters * (3 if backward else 1)
        if with_norm:
            total += 2 * c.n_in * c.n_out * c.rank
        return total

    def expected(self, method: Method, backward: bool) -> dict[str, Expectation]:
        found = self._dora if method == "DoRA" else self._lora
        return found if backward else {"y": found["y"]}

    def asked(self, method: Method, backward: bool, norm_kept: bool = False) -> dict[str, Any]:
        """Returns the FLOPs of a `Variant`, and what is expected of it."""
        flops = self.flops(backward, method == "DoRA" and not norm_kept)
        return {"flops": flops, "expected": self.expected(method, backward)}

    @functools.cached_property
    def _dora(self) -> dict[str, Expectation]:
        exact, _ = prepare_layer(self.case, self.device)
        return {name: Expectation(one.want, one.bound) for name, one in exact.items()}

    @functools.cached_property
    def _lora(self) -> dict[str, Expectation]:
        i, s = self.inputs, self.scale
        merged = oracle.direction(i.weight, i.lora_a, i.lora_b, s)
        x, dy = i.x.double(), i.dy.double()
        dense = dy.T @ x
        wanted = {
            "y": x @ merged.T,
            "d_x": dy @ merged,
            "d_lora_a": s * (i.lora_b.double().T @ dense),
            "d_lora_b": s * (dense @ i.lora_a.double().T),
        }
        return {name: Expectation(want) for name, want in wanted.items()}
