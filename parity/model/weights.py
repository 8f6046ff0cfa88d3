"""The decoder's weights and adapter, drawn once for all systems, on the device under test.

All tensors have PyTorch's layout: projections `[out, in]`, lora_a `[r, in]`, lora_b `[out, r]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from parity import oracle
from parity.model.sizes import ADAPTER, PROJECTIONS, Run, Sizes

# A deviation of 0.02 at a width of 4096, as transformers initialises Qwen3, and the same gain at
# other widths. For projections whose output is added to the residual stream it is divided by sqrt(2
# · layers), as in GPT-2.
GAIN = 1.28
RESIDUAL_PROJECTIONS = ("self_attn.o_proj", "mlp.down_proj")
# So large that each layer changes the residual stream by a few percent, as in trained models. If
# each layer changed it more, the network would amplify bf16's rounding instead of averaging it.
EMBEDDING = 4.0
# As in `parity.cases`: s‖BA‖ is 0.3 ‖W‖, magnitudes are within about 5 % of the norms.
ADAPTER_SHARE = 0.3
MAGNITUDE_DEVIATION = 0.05
# With unit elements of q and k, attention logits have a deviation of 1, and attention averages over
# all tokens, so that q and k hardly matter. Trained models attend to a few tokens.
QK_NORM = 1.5
NORM_DEVIATION = 0.1


@dataclass(frozen=True)
class Weights:
    """The base model and the adapter.

    Attributes:
      base: tensors by transformers' names.
      adapter: by projection, then by `ADAPTER`'s names, one tensor per layer.
      tokens: i64[1, tokens + 1]; the last token is only a target.
    """

    base: dict[str, Tensor]
    adapter: dict[str, dict[str, list[Tensor]]]
    tokens: Tensor


def draw(run: Run, device: str, seed: int = 0) -> Weights:
    """Draws base weights that keep the size of activations, and an adapter as after some training.
    The magnitudes are fp32, with values that the run's dtype can represent."""
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
            gain = GAIN / (2 * run.layers) ** 0.5 if path in RESIDUAL_PROJECTIONS else GAIN
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
    """Returns fp32[head / 2], bit for bit as transformers computes them on the device."""
    half = torch.arange(0, sizes.head_dim, 2, device=device, dtype=torch.float32)
    return 1 / sizes.rope_theta ** (half / sizes.head_dim)


@dataclass(frozen=True)
class Result:
    """The results of one system.

    Attributes:
      logits: [last, vocabulary].
      loss: mean cross-entropy of the last tokens, in nats.
      gradients: of the adapter, by names such as "self_attn.q_proj.lora_a", one tensor per layer in
        torch's layout; empty for a model without adapter.
    """

    logits: Tensor
    loss: float
    gradients: dict[str, list[Tensor]]
