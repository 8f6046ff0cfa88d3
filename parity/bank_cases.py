"""The mixed batches of the level `bank`: their sizes, and their adapters and rows."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from parity import oracle

KINDS = ("DoRA", "LoRA", "rsLoRA", "DoRA")
RANKS = (8, 5, 16, 64)
ALPHA = 3.0
# [rows] and [rows, time]: few rows of one token, rows of several, and enough rows of one token that
# the kernels group them.
SHAPES = ((9,), (6, 5), (40,))
# The sizes at which kernels run: decoding, small prompts and prompts. They take no fp32.
GPU_SIZES = (4096, 1024)
GPU_SHAPES = {
    "bfloat16": ((1,), (8,), (64,), (128,), (5, 48), (5, 1024)),
    "float32": ((8,), (5, 1024)),
}


class Adapter(NamedTuple):
    """An adapter of the projection, in PyTorch's layout; all values but the magnitude's are
    representable in the dtype.

    Attributes:
      magnitude: None for LoRA and rsLoRA.
      from_folder: whether the packages load it from a folder, or else as an object.
    """

    kind: str
    lora_a: np.ndarray
    lora_b: np.ndarray
    magnitude: np.ndarray | None
    scale: float
    from_folder: bool

    @property
    def options(self) -> dict[str, Any]:
        """Returns the rank and the options that set the scale, as both packages name them."""
        use_rslora = self.kind == "rsLoRA"
        return {"rank": len(self.lora_a), "alpha": ALPHA, "use_rslora": use_rslora}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays that it has, by name."""
        named = {"lora_a": self.lora_a, "lora_b": self.lora_b}
        return named if self.magnitude is None else named | {"magnitude": self.magnitude}


class Batch(NamedTuple):
    """The sizes of a mixed batch: x is [*shape, into]."""

    dtype: str
    into: int
    out: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        rows = "×".join(map(str, self.shape))
        return f"bank {self.dtype} {self.into}→{self.out}, {rows} rows"


class Problem(NamedTuple):
    """The arrays of a mixed batch.

    Attributes:
      x: [batch, *time, in].
      ids: [batch], the slot of each row, or -1.
    """

    dtype: str
    weight: np.ndarray
    bias: np.ndarray
    adapters: list[Adapter]
    x: np.ndarray
    ids: np.ndarray


class Found(NamedTuple):
    """The results of one side, in fp64.

    Attributes:
      rows: [batch, *time, out], each row with its adapter.
      base: the same without adapters; None if the side computes no mixed batch.
      kernels: the names of the kernels in the program, if the side can tell.
    """

    rows: np.ndarray
    base: np.ndarray | None = None
    kernels: list[str] | None = None


def batches(device: str, quick: bool) -> Iterator[Batch]:
    """Yields the cases."""
    for dtype, gpu_shapes in GPU_SHAPES.items():
        if device != "cpu":
            for shape in gpu_shapes[:2] if quick else gpu_shapes:
                yield Batch(dtype, *GPU_SIZES, shape)
            continue
        for into, out in ((40, 24),) if quick else ((40, 24), (96, 200), (768, 512)):
            for shape in SHAPES:
                yield Batch(dtype, into, out, shape)


def draw_problem(batch: Batch) -> Problem:
    """Draws the arrays of a batch, with scaled weights as in trained networks."""
    dtype, into, out, shape = batch
    rng = np.random.default_rng([into, out, *shape])

    def draw(*sizes: int, deviation: float = 1.0) -> np.ndarray:
        drawn = deviation * rng.standard_normal(sizes).astype(np.float32)
        return drawn.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else drawn

    weight, adapters = draw(out, into, deviation=into**-0.5), []
    for kind, rank in zip(KINDS, RANKS, strict=True):
        lora_a, lora_b = draw(rank, into, deviation=into**-0.5), draw(out, rank, deviation=0.3)
        scale = ALPHA / (math.sqrt(rank) if kind == "rsLoRA" else rank)
        magnitude = None
        if kind == "DoRA":
            norm = oracle.norm(weight, lora_a, lora_b, scale).astype(np.float32)
            magnitude = norm * (1 + 0.2 * rng.standard_normal(out).astype(np.float32))
        adapters.append(Adapter(kind, lora_a, lora_b, magnitude, scale, rank != max(RANKS)))
    # A single row has an adapter.
    ids = rng.permutation(np.arange(1, shape[0] + 1) % (len(KINDS) + 1)) - 1
    return Problem(dtype, weight, draw(out), adapters, draw(*shape, into), ids)
