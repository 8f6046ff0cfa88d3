"""The sizes of the decoder, and the runs of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bfloat16", "float32"]

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
ADAPTER = ("lora_a", "lora_b", "magnitude")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Qwen3 decoder and of its adapter, DoRA with rsLoRA on all seven projections."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rank: int
    alpha: int
    epsilon: float = 1e-6
    rope_theta: float = 1_000_000.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank**0.5

    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the seven projections of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }


QWEN3_8B = Sizes(
    hidden=4096,
    intermediate=12_288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
    rank=384,
    alpha=192,
)
TINY = Sizes(
    hidden=64,
    intermediate=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=512,
    rank=16,
    alpha=8,
)


@dataclass(frozen=True)
class Run:
    """One set of weights and tokens, and the systems that compute on it.

    Attributes:
      tokens: that the model reads.
      last: of these the logits are compared and the loss is the mean; the token after each is its
        target.
      jax, torch: the implementations of the two packages, None for what they choose unasked.
    """

    sizes: Sizes
    dtype: Dtype
    layers: int
    tokens: int
    last: int
    jax: tuple[str | None, ...] = (None,)
    torch: tuple[str | None, ...] = (None,)

    @property
    def name(self) -> str:
        forced = ", implementations named" if self.jax != (None,) else ""
        return f"{self.dtype}, {self.layers} layers, {self.tokens} tokens{forced}"


FORCED: dict[str, tuple[str | None, ...]] = {
    "jax": ("mosaic", "xla"),
    "torch": ("triton", "eager"),
}


def runs(
    device: str,
    dtypes: tuple[Dtype, ...],
    *,
    quick: bool = False,
    layers: int | None = None,
    tokens: int | None = None,
) -> list[Run]:
    """Returns what `python -m parity model` runs.

    On a GPU: Qwen3-8B whole in bf16, then a few of its layers with every implementation named, in
    bf16 and in fp32 (whose products without tensor cores take long). On a CPU: a tiny model; the
    interpreted kernels in one layer, and in fp32 alone, for Triton's interpreter truncates bf16.

    Args:
      quick: few layers.
      layers, tokens: of every run, in place of its own.
    """
    if device == "cuda":
        chosen = [
            Run(QWEN3_8B, "bfloat16", 4 if quick else 36, 4096, 1024),
            Run(QWEN3_8B, "bfloat16", 2 if quick else 4, 4096, 1024, **FORCED),
            Run(QWEN3_8B, "float32", 2 if quick else 8, 1024, 256, **FORCED),
        ]
    else:
        chosen = [
            Run(TINY, "bfloat16", 2 if quick else 4, 48, 32),
            Run(TINY, "float32", 2 if quick else 4, 48, 32),
            Run(TINY, "float32", 1, 16, 8, **FORCED),
        ]
    chosen = [run for run in chosen if run.dtype in dtypes]
    if layers is not None:
        chosen = [dataclasses.replace(run, layers=layers) for run in chosen]
    if tokens is not None:
        last = max(1, tokens // 4)
        chosen = [dataclasses.replace(run, tokens=tokens, last=last) for run in chosen]
    return chosen
