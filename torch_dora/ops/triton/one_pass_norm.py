"""Launches of :mod:`dora_common.triton.one_pass_norm`.

The norm in one pass over the weight: computes tiles of W + s·BA in registers and squares them.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dora_common.triton import strip_norm
from dora_common.triton.jit import cdiv
from dora_common.triton.one_pass_norm import config, kernel
from torch_dora.ops.choose import TRITON_MODE, Call
from torch_dora.ops.quantised import Codes
from torch_dora.ops.triton import adapter_pieces, column_sums
from torch_dora.ops.triton.jit import (
    DescribingLaunch,
    Launch,
    SameLaunch,
    aligned,
    capability,
    is_profiled,
)

_HALVES = (torch.float16, torch.bfloat16)
# Strips were measured on an H200 at 8192 × 8192 and rank 64: 37 µs, and the other kernel 60.
STRIPS_FROM = 2**24


def refuses(call: Call) -> str | None:
    """Returns the reason why the kernel cannot run ``call``, or None."""
    weight, lora_a, lora_b = call.dtypes
    if weight not in _HALVES:
        return f"is for weights in float16 or bfloat16; got {weight}"
    if lora_a != lora_b:
        return f"lora_a and lora_b must share a dtype; got {lora_a} and {lora_b}"
    if lora_a not in (*_HALVES, torch.float32):
        return f"multiplies on tensor cores, not {lora_a}"
    return None


@functools.lru_cache(1024)
def prepared(
    card: int,
    rank: int,
    out_features: int,
    in_features: int,
    scale: float,
    run: int,
    is_in_pieces: bool,
) -> tuple[int, tuple[None, ...], Launch]:
    """Returns the number of partial sums of an output feature, what follows a weight that has no
    codes among the tensors, and the launch. ``run`` is that of codes, or 0."""
    is_large = in_features * out_features >= STRIPS_FROM
    if card == 90 and is_large and not (run or is_in_pieces):
        if 32 < rank <= 64:
            return _by_strips(rank, out_features, in_features, scale)
        if has_rings(rank, in_features):
            return _by_rings(rank, out_features, in_features, scale)
    chosen = config(rank, is_in_pieces=is_in_pieces, is_coded=run > 0, axis=1, capability=card)
    parts = cdiv(in_features, chosen.columns)
    launch = Launch(
        kernel,
        (parts * cdiv(out_features, chosen.rows),),
        (out_features, in_features, scale),
        AXIS=1,
        RANK=rank,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        DEPTH=chosen.depth,
        RUN=run,
        GROUP=math.gcd(run, in_features, chosen.columns),
        PIECES=is_in_pieces,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )
    return parts, (None, None), launch


def _by_strips(
    rank: int, out: int, in_features: int, scale: float
) -> tuple[int, tuple[None, ...], Launch]:
    chosen = strip_norm.config(rank, is_coded=False, out_last=False)
    programs, parts, steps = chosen.walk(out, in_features, 90)
    launch = Launch(
        strip_norm.kernel,
        (programs,),
        (in_features, out, parts, steps, scale),
        OUT_LAST=False,
        CODES="",
        RUN=1,
        GROUP=1,
        PIECES=False,
        **chosen.slices(rank),
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )
    return parts, (None, None), launch


def has_rings(rank: int, *rows: int) -> bool:
    """Returns whether a Hopper's kernel with `rings` takes matrices of this rank, with rows of
    these sizes. Triton's interpreter does not run it."""
    if rank <= 128 or TRITON_MODE != "compiled":
        return False
    from dora_common.triton import rings

    return rings.fits(rank, rank, *rows)


def _by_rings(
    rank: int, out: int, in_features: int, scale: float
) -> tuple[int, tuple[None, ...], Launch]:
    from dora_common.triton import ring_norm

    chosen = ring_norm.config(rank, 1)
    programs, parts, steps = chosen.walk(out, in_features, 90)
    launch = DescribingLaunch(
        ring_norm.kernel,
        (programs,),
        (in_features, out, parts, steps, scale),
        PIECES=1,
        RANK=rank,
        SLICES=cdiv(rank, chosen.depth),
        STAGES=chosen.stages,
        WIDTH=chosen.width,
        OUT_LAST=False,
        num_warps=chosen.warps,
    )
    return parts, (), launch


class Passes:
    """The launches that compute norms of plain weights of the same dtypes and sizes on one device,
    in their order, with little work on the host.

    Args:
        adapter_dtype: of lora_a and lora_b.
        sizes: rank, out and in.
        eps: of max(norm, eps), by which a magnitude is divided; None if there is no magnitude.
        dtype: to which the pass that splits an fp32 adapter casts it, too.

    Attributes:
        is_in_pieces: whether there is such a pass.
        launches: each launch with the function that chooses its operands from all: weight, lora_a,
            lora_b, magnitude, lora_a and lora_b in ``dtype``, the result, the tensors in the memory
            that only these launches see, and None.
        memory_size, starts: the fp32 numbers of that memory, and the bytes at which its tensors
            begin: the partial sums, and an adapter's pieces.
    """

    def __init__(
        self,
        device: torch.device,
        adapter_dtype: torch.dtype,
        sizes: tuple[int, int, int],
        scale: float,
        eps: float | None,
        dtype: torch.dtype,
    ) -> None:
        (rank, out_features, in_features), self.dtype = sizes, dtype
        # A tensor of fp32 makes others in half the time of naming dtype and device.
        self._fp32 = torch.empty((), dtype=torch.float32, device=device)
        self._cast = torch.empty((), dtype=dtype, device=device)
        self.is_in_pieces = adapter_dtype == torch.float32
        card = capability(device)
        parts, no_codes, norm = prepared(card, *sizes, scale, 0, self.is_in_pieces)
        then = "root" if eps is None else "scale"
        total = column_sums.prepared(parts, out_features, then, eps or 0.0)
        self._shape = (out_features,) if eps is None else (2, out_features)
        # torch reads numbers faster than a tuple of them.
        self._a_shape, self._b_shape = (rank, in_features), (out_features, rank)
        self._inside = [(torch.float32, (parts, out_features))]
        if self.is_in_pieces:
            self._inside += adapter_pieces.kinds(rank, in_features, out_features)
        bytes_of = (aligned(math.prod(shape) * kind.itemsize) for kind, shape in self._inside)
        *self.starts, memory_bytes = itertools.accumulate(bytes_of, initial=0)
        self.memory_size = memory_bytes // 4
        names = "weight", "lora_a", "lora_b", "magnitude", "a", "b", "result", "partial"
        names += ("high_a", "high_b", "unit_a", "unit_b") if self.is_in_pieces else ()
        at = {name: number for number, name in enumerate((*names, "none"))}

        def of(launch: Launch, operands: str) -> tuple[SameLaunch, Callable[[Any], tuple]]:
            return SameLaunch(launch), operator.itemgetter(*map(at.get, operands.split()))

        codes, adapter = "none " * len(no_codes), "lora_a lora_b none none"
        self.launches, self._is_known = [], False
        if self.is_in_pieces:
            adapter = "high_a high_b unit_a unit_b"
            pieces = adapter_pieces.prepared(rank, in_features, out_features)
            self.launches.append(of(pieces, "lora_a lora_b high_a high_b a b unit_a unit_b"))
        self.launches.append(of(norm, f"weight {codes}{adapter} partial"))
        factor = "none" if eps is None else "magnitude"
        self.launches.append(of(total, f"partial {factor} result"))

    def __call__(
        self, weight: Tensor, lora_a: Tensor, lora_b: Tensor, magnitude: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns lora_a and lora_b, in the dtype if they are in pieces, and the norm, f32[out], or
        max(norm, eps) and the magnitude divided by it, f32[2, out]."""
        weight, lora_a, lora_b = weight.contiguous(), lora_a.contiguous(), lora_b.contiguous()
        # Nothing reads what stands for no magnitude.
        magnitude = weight if magnitude is None else magnitude.contiguous()
        a, b = lora_a, lora_b
        if self.is_in_pieces:
            a, b = self._cast.new_empty(*self._a_shape), self._cast.new_empty(*self._b_shape)
        result = self._fp32.new_empty(*self._shape)
        # What only kernels see is one piece of memory.
        memory = self._fp32.new_empty(self.memory_size)
        tensors = weight, lora_a, lora_b, magnitude, a, b, result
        if self._is_known:
            found = [one.data_ptr() for one in tensors]
            if self.launches[0][0].takes(found) and not is_profiled():
                # Making tensors of the memory takes longer.
                first = memory.data_ptr()
                found += [first + start for start in self.starts]
                found.append(0)
                for launch, chosen in self.launches:
                    launch.at(chosen(found))
                return a, b, result
        operands = *tensors, *self._tensors(memory), None
        for launch, chosen in self.launches:
            launch(*chosen(operands))
        self._is_known = None not in [launch.run for launch, _ in self.launches]
        if TRITON_MODE == "interpreted" and self.is_in_pieces:
            # The interpreter truncates to bfloat16.
            return lora_a.to(self.dtype), lora_b.to(self.dtype), result
        return a, b, result

    def _tensors(self, memory: Tensor) -> list[Tensor]:
        """Returns the tensors of the memory that only the launches see."""
        return [
            memory[start // 4 :].view(dtype)[: math.prod(shape)].view(shape)
            for start, (dtype, shape) in zip(self.starts, self._inside, strict=True)
        ]


@functools.lru_cache(1024)
def _passes(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    sizes: tuple[int, int, int],
    scale: float,
    eps: float | None,
) -> Passes:
    return Passes(device, dtypes[1], sizes, scale, eps, torch.float16)  # pyright: ignore


def launch(
    weight: Tensor | Codes,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    *,
    magnitude: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Returns ‖weight + scale·lora_b lora_a‖ per row, f32[out].

    Args:
        magnitude: [out]; the result is then f32[2, out], max(norm, eps) and magnitude divided by
            it. Not for codes.
    """
    out_features, in_features = lora_b.shape[0], lora_a.shape[1]
    if out_features == 0 or in_features == 0:
        return torch.zeros(out_features, device=lora_a.device, dtype=torch.float32)
    device, sizes = lora_a.device, (lora_a.shape[0], out_features, in_features)
    if not isinstance(weight, Codes):
        dtypes = weight.dtype, lora_a.dtype, None if magnitude is None else magnitude.dtype
        passes = _passes(device, dtypes, sizes, scale, None if magnitude is None else eps)
        return passes(weight, lora_a, lora_b, magnitude)[2]
    adapter = lora_a.contiguous(), lora_b.contiguous(), None, None
    is_in_pieces = lora_a.dtype == torch.float32
    if is_in_pieces:
        adapter, *_ = adapter_pieces.launch(lora_a, lora_b, torch.float16)
    parts, _, run_kernel = prepared(capability(device), *sizes, scale, weight.run, is_in_pieces)
    partial = lora_b.new_empty((parts, out_features), dtype=torch.float32)
    run_kernel(weight.packed, weight.levels, weight.scales, *adapter, partial)
    return column_sums.launch(partial, "root")
