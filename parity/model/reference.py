"""The fp64 reference for the decoder, with dense adapted weights.

Every `W' = m ∘ (W + sBA) / ‖W + sBA‖` is a dense matrix, differentiated by autograd with the norm
held constant. It shares no formula with the packages, and no code with transformers or PEFT.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parity.model.sizes import Run
from parity.model.weights import Result, Weights, rope_frequencies


def compute(run: Run, weights: Weights, *, adapted: bool = True) -> Result:
    """Returns logits and loss of the last tokens and, if `adapted`, the adapter's gradients, in
    fp64."""
    leaves = {
        path: {
            kind: [tensor.detach().double().requires_grad_() for tensor in layers]
            for kind, layers in kinds.items()
        }
        for path, kinds in (weights.adapter.items() if adapted else ())
    }
    base = weights.base
    with torch.set_grad_enabled(adapted):
        x = base["model.embed_tokens.weight"][weights.tokens[0, :-1]].double()
        rotation = _rotation(run, x.device)
        for layer in range(run.layers):
            # A layer's dense weights exist only while the layer is computed.
            arguments = (run, base, f"model.layers.{layer}", rotation, x)
            adapter = {
                path: {kind: layers[layer] for kind, layers in kinds.items()}
                for path, kinds in leaves.items()
            }
            x = checkpoint(_layer, *arguments, adapter, use_reentrant=False)
        x = _rms_norm(run, base["model.norm.weight"], x[-run.last :])
        logits = x @ base["lm_head.weight"].double().T
        loss = F.cross_entropy(logits, weights.tokens[0, -run.last :])
    gradients: dict[str, list[Any]] = {}
    if adapted:
        loss.backward()
        for path, kinds in leaves.items():
            for kind, layers in kinds.items():
                gradients[f"{path}.{kind}"] = [tensor.grad for tensor in layers]
    return Result(logits.detach(), loss.item(), gradients)


def _layer(
    run: Run,
    base: dict[str, Tensor],
    prefix: str,
    rotation: tuple[Tensor, Tensor],
    x: Tensor,
    adapter: dict[str, dict[str, Tensor]],
) -> Tensor:
    def project(name: str, x: Tensor) -> Tensor:
        weight = base[f"{prefix}.{name}.weight"].double()
        return x @ (_merged(weight, run.sizes.scale, **adapter[name]) if adapter else weight).T

    def norm(name: str, x: Tensor) -> Tensor:
        return _rms_norm(run, base[f"{prefix}.{name}.weight"], x)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, run.sizes.head_dim)).transpose(0, 1)  # [heads, tokens, head]

    normed = norm("input_layernorm", x)
    q, k, v = (heads(project(f"self_attn.{name}_proj", normed)) for name in "qkv")
    q = _rotate(norm("self_attn.q_norm", q), *rotation)
    k = _rotate(norm("self_attn.k_norm", k), *rotation)
    x = x + project("self_attn.o_proj", _attention(q, k, v).transpose(0, 1).flatten(1))
    normed = norm("post_attention_layernorm", x)
    gate, up = project("mlp.gate_proj", normed), project("mlp.up_proj", normed)
    return x + project("mlp.down_proj", gate * torch.sigmoid(gate) * up)


def _merged(
    weight: Tensor, scale: float, *, lora_a: Tensor, lora_b: Tensor, magnitude: Tensor
) -> Tensor:
    direction = weight + scale * (lora_b @ lora_a)
    norm = (direction.detach() ** 2).sum(1).sqrt()
    return (magnitude / norm)[:, None] * direction


def _rms_norm(run: Run, weight: Tensor, x: Tensor) -> Tensor:
    mean_square = (x * x).mean(-1, keepdim=True)
    return weight.double() * x / (mean_square + run.sizes.epsilon).sqrt()


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention for q [heads, tokens, head], k and v [kv_heads, tokens, head],
    which groups of q share."""
    groups = q.unflatten(0, (k.shape[0], -1))  # [kv_heads, group, tokens, head]
    scores = groups @ k.transpose(1, 2)[:, None] / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return (weights @ v[:, None]).flatten(0, 1)


def _rotation(run: Run, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of position × frequency (arXiv 2104.09864), [tokens, head / 2]."""
    positions = torch.arange(run.tokens, device=device, dtype=torch.float32)
    # Every implementation computes the angle in fp32, so the reference does too. At position 4096
    # its rounding is 2⁻¹² of a radian, which would otherwise be the largest error of an fp32 model.
    angles = (positions[:, None] * rope_frequencies(run.sizes, device)).double()
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
