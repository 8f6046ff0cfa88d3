"""The sizes of the decoder, and the runs of `python -m parity model`."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Dtype = Literal["bfloat16", "float32"]

# The seven projections of a layer, with Hugging Face's names.
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
ADAPTER = ("lora_a", "lora_b", "magnitude")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Qwen3 decoder and of its adapter: DoRA with rsLoRA on all seven
    projections."""

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

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Returns (out, in) of the seven projections of a layer."""
        q, kv, wide = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        inputs = (*[self.hidden] * 3, q, self.hidden, self.hidden, wide)
        outputs = (q, kv, kv, self.hidden, wide, wide, self.hidden)
        return dict(zip(PROJECTIONS, zip(outputs, inputs, strict=True), strict=True))

    def hf_config(self, layers: int, tokens: int) -> dict[str, Any]:
        """Returns the contents of config.json for a bf16 decoder of these sizes."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.epsilon,
            "max_position_embeddings": tokens,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


QWEN3_8B = Sizes(4096, 12_288, 32, 8, 128, 151_936, rank=384, alpha=192)
TINY = Sizes(64, 96, 4, 2, 16, 512, rank=16, alpha=8)


@dataclass(frozen=True)
class Run:
    """One set of weights and tokens, and the implementations that are compared on it.

    Attributes:
      tokens: the number of input tokens.
      last: the number of last tokens whose logits are compared and whose mean is the loss. Each
        token's target is the next token.
      jax, torch: the implementations of the two packages; None for the package's choice.
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


FORCED: dict[str, tuple[str | None, ...]] = {"jax": ("mosaic", "xla"), "torch": ("triton", "eager")}


def runs(
    device: str,
    dtypes: tuple[Dtype, ...],
    *,
    quick: bool = False,
    layers: int | None = None,
    tokens: int | None = None,
) -> list[Run]:
    """Returns the runs of `python -m parity model`.

    On a GPU: the full Qwen3-8B in bf16, then a few of its layers with every implementation named,
    in bf16 and in fp32 (where products are slow without tensor cores). On a CPU: a tiny model;
    interpreted kernels only in one layer and in fp32, since Triton's interpreter truncates bf16.

    Args:
      quick: few layers.
      layers, tokens: override the numbers of every run.
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
    changed: dict[str, Any] = {} if layers is None else {"layers": layers}
    if tokens is not None:
        changed |= {"tokens": tokens, "last": max(1, tokens // 4)}
    return [dataclasses.replace(run, **changed) for run in chosen if run.dtype in dtypes]
