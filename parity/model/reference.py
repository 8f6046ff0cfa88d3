"""The decoder in fp64, its adapted weights formed.

Every `W' = m ∘ (W + sBA) / ‖W + sBA‖` is a dense matrix, differentiated by autograd with the norm
held constant. No formula of either package, and no code of transformers or PEFT.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parity.model.sizes import ADAPTER, Run
from parity.model.weights import Layer, Projection, Result, Weights, rope_frequencies


def compute(run: Run, weights: Weights, *, adapted: bool = True) -> Result:
    """Logits and loss of the last tokens and, where adapted, the adapter's gradients, in fp64."""
    with torch.set_grad_enabled(adapted):
        leaves = [
            {name: _leaves(p) for name, p in layer.projections.items()} for layer in weights.layers
        ]
        x = weights.embedding[weights.tokens[0, :-1]].double()
        rotation = _rotation(run, x.device)
        for layer, adapters in zip(weights.layers, leaves, strict=True):
            arguments = (run, layer, adapters if adapted else None, rotation, x)
            # A layer's dense weights exist while it is computed, not longer.
            x = checkpoint(_layer, *arguments, use_reentrant=False)
        x = _rms_norm(run, weights.norm, x[-run.last :])
        logits = x @ weights.head.double().T
        loss = F.cross_entropy(logits, weights.tokens[0, -run.last :])
    gradients: dict[str, list[Tensor]] = {}
    if adapted:
        loss.backward()
        for adapters in leaves:
            for name, parameters in adapters.items():
                for kind, parameter in parameters.items():
                    assert parameter.grad is not None
                    gradients.setdefault(f"{name}.{kind}", []).append(parameter.grad)
    return Result(logits.detach(), loss.item(), gradients)


def _leaves(projection: Projection) -> dict[str, Tensor]:
    return {name: getattr(projection, name).double().requires_grad_() for name in ADAPTER}


def _layer(
    run: Run,
    layer: Layer,
    adapters: dict[str, dict[str, Tensor]] | None,
    rotation: tuple[Tensor, Tensor],
    x: Tensor,
) -> Tensor:
    def project(name: str, x: Tensor) -> Tensor:
        weight = layer.projections[name].weight.double()
        if adapters is not None:
            weight = _merged(weight, run.sizes.scale, **adapters[name])
        return x @ weight.T

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, run.sizes.head_dim)).transpose(0, 1)  # [heads, tokens, head]

    normed = _rms_norm(run, layer.norms["input_layernorm"], x)
    q, k, v = (heads(project(f"self_attn.{name}_proj", normed)) for name in "qkv")
    q = _rms_norm(run, layer.norms["q_norm"], q)
    k = _rms_norm(run, layer.norms["k_norm"], k)
    attended = _attention(_rotate(q, *rotation), _rotate(k, *rotation), v)
    x = x + project("self_attn.o_proj", attended.transpose(0, 1).flatten(1))
    normed = _rms_norm(run, layer.norms["post_attention_layernorm"], x)
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
    """Computes causal attention; q [heads, tokens, head], k and v [kv_heads, tokens, head], shared
    by groups of q."""
    groups = q.unflatten(0, (k.shape[0], -1))  # [kv_heads, group, tokens, head]
    scores = groups @ k.transpose(1, 2)[:, None] / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return (weights @ v[:, None]).flatten(0, 1)


def _rotation(run: Run, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of position × frequency (arXiv 2104.09864), [tokens, head / 2]."""
    positions = torch.arange(run.tokens, device=device, dtype=torch.float32)
    # An fp32 number in every implementation, and rounded: at position 4096 by 2⁻¹² of a radian,
    # which would be the largest error of an fp32 model, though nobody's.
    angles = (positions[:, None] * rope_frequencies(run.sizes, device)).double()
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
