"""The decoder's weights and adapter, drawn once, on the device under test, for every system.

All tensors are in PyTorch's layout: projections `[out, in]`, lora_a `[r, in]`, lora_b `[out, r]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parity import oracle
from parity.model.sizes import ADAPTER, PROJECTIONS, Run, Sizes

# 0.02 at a width of 4096, as transformers initialises Qwen3, and the same gain at others. What
# is added to the residual stream is smaller by sqrt(2 · layers), as GPT-2 starts.
GAIN = 1.28
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
# As large, beside that, that a layer turns the stream by a few percent, as in trained models. A
# network that turns it further at every layer amplifies bf16's rounding instead of averaging it.
EMBEDDING = 4.0
# The sizes of `parity.cases`: s‖BA‖ of 0.3 ‖W‖, magnitudes within about 5 % of the norms.
ADAPTER_SHARE = 0.3
MAGNITUDE_DEVIATION = 0.05
# With q and k of unit elements the attention logits' deviation is 1, and attention an average over
# all tokens, to which nothing that q and k compute matters. Trained models attend to a few.
QK_NORM = 1.5
NORM_DEVIATION = 0.1


@dataclass(frozen=True)
class Weights:
    """The base model and the adapter.

    Attributes:
      base: by transformers' names.
      adapter: by projection, then by `ADAPTER`'s names, one tensor a layer.
      tokens: i64[1, tokens + 1]; the last one is a target only.
    """

    base: dict[str, Tensor]
    adapter: dict[str, dict[str, list[Tensor]]]
    tokens: Tensor


def draw(run: Run, device: str, seed: int = 0) -> Weights:
    """Draws weights whose activations keep their size, and an adapter as after some training, whose
    magnitudes are fp32 and of values that the run's dtype can hold."""
    sizes, dtype = run.sizes, getattr(torch, run.dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, deviation: float = 1.0, mean: float = 0.0) -> Tensor:
        drawn = torch.empty(shape, device=device, dtype=torch.float32)
        return drawn.normal_(mean, deviation, generator=generator).to(dtype)

    def norm(size: int, mean: float = 1.0) -> Tensor:
        return normal(size, deviation=NORM_DEVIATION, mean=mean)

    base = {
        "model.embed_tokens.weight": normal(sizes.vocabulary, sizes.hidden, deviation=EMBEDDING),
        "lm_head.weight": normal(
            sizes.vocabulary, sizes.hidden, deviation=GAIN / sizes.hidden**0.5
        ),
        "model.norm.weight": norm(sizes.hidden),
    }
    adapter = {path: {kind: [] for kind in ADAPTER} for path in PROJECTIONS}
    for layer in range(run.layers):
        prefix = f"model.layers.{layer}"
        for path, (n_out, n_in) in sizes.shapes().items():
            gain = GAIN / (2 * run.layers) ** 0.5 if path in WRITERS else GAIN
            weight = normal(n_out, n_in, deviation=gain / n_in**0.5)
            lora_a = normal(sizes.rank, n_in, deviation=n_in**-0.5)
            share = ADAPTER_SHARE * gain / (sizes.scale * sizes.rank**0.5)
            lora_b = normal(n_out, sizes.rank, deviation=share)
            row_norm = oracle.norm(weight, lora_a, lora_b, sizes.scale)
            factor = normal(n_out, deviation=MAGNITUDE_DEVIATION, mean=1.0)
            magnitude = (row_norm * factor).to(dtype).float()
            base[f"{prefix}.{path}.weight"] = weight
            for kind, value in zip(ADAPTER, (lora_a, lora_b, magnitude), strict=True):
                adapter[path][kind].append(value)
        base[f"{prefix}.input_layernorm.weight"] = norm(sizes.hidden)
        base[f"{prefix}.post_attention_layernorm.weight"] = norm(sizes.hidden)
        base[f"{prefix}.self_attn.q_norm.weight"] = norm(sizes.head_dim, QK_NORM)
        base[f"{prefix}.self_attn.k_norm.weight"] = norm(sizes.head_dim, QK_NORM)
    shape = (1, run.tokens + 1)
    tokens = torch.randint(sizes.vocabulary, shape, generator=generator, device=device)
    return Weights(base, adapter, tokens)


def rope_frequencies(sizes: Sizes, device: torch.device) -> Tensor:
    """Returns fp32[head / 2], to the bit as transformers computes them on the device."""
    half = torch.arange(0, sizes.head_dim, 2, device=device, dtype=torch.float32)
    return 1 / sizes.rope_theta ** (half / sizes.head_dim)


@dataclass(frozen=True)
class Result:
    """The results of one system.

    Attributes:
      logits: [last, vocabulary].
      loss: mean cross-entropy of the last tokens, in nats.
      gradients: of the adapter, by "self_attn.q_proj.lora_a" and the like, a tensor a layer in
        torch's layout; empty for a model without adapter.
    """

    logits: Tensor
    loss: float
    gradients: dict[str, list[Tensor]]
