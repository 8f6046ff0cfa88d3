"""Other ways to compute the norm ‖W + sBA‖, which the level `ops` compares with the packages'."""

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

# The size and the alignment of the paper's chunks over `in` (arXiv 2603.22276, section 3).
PAPER_CHUNK_BYTES = 256 * 2**20
PAPER_CHUNK_ALIGNMENT = 64


def dense_norm(kernel: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: float) -> jax.Array:
    """Returns ‖kernel + scale·lora_a lora_b‖ per output, with the product formed in fp32."""
    product = jnp.dot(lora_a, lora_b, preferred_element_type=jnp.float32)
    return jnp.linalg.norm(kernel.astype(jnp.float32) + scale * product, axis=0)


def torch_dense_norm(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Returns ‖weight + scale·lora_b lora_a‖ per row, with the product in the operands' dtype."""
    return torch.linalg.vector_norm(weight + scale * (lora_b @ lora_a), dim=1, dtype=torch.float32)


def paper_norm(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Returns the factored norm by the paper's method: every chunk of the weight is cast to fp32,
    and all products are fp32 products (arXiv 2603.22276, section 3)."""
    out_features, in_features = weight.shape
    width = PAPER_CHUNK_BYTES // (4 * out_features)
    width = max(PAPER_CHUNK_ALIGNMENT, width - width % PAPER_CHUNK_ALIGNMENT)
    lora_b = lora_b.float()
    rank = lora_a.shape[0]
    base_sq = torch.zeros(out_features, device=weight.device)
    cross = torch.zeros_like(base_sq)
    gram = torch.zeros(rank, rank, device=weight.device)
    for start in range(0, in_features, width):
        w = weight[:, start : start + width].float()
        a = lora_a[:, start : start + width].float()
        base_sq += w.square().sum(1)
        cross += (lora_b * (w @ a.T)).sum(1)
        gram += a @ a.T
    ba_sq = ((lora_b @ gram) * lora_b).sum(1)
    return (base_sq + 2 * scale * cross + scale**2 * ba_sq).clamp(min=0).sqrt()


def peft_norm(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Returns the norm by PEFT's own code, which forms the product by sending an identity matrix
    through the adapter, and sums in the weight's dtype."""
    from peft.tuners.lora.dora import DoraLinearLayer

    from parity.sides.torch.peft_layer import frozen_linear

    layer = DoraLinearLayer(fan_in_fan_out=False)
    product = layer.get_lora_weight(lora_A=frozen_linear(lora_a), lora_B=frozen_linear(lora_b))
    return layer.get_weight_norm(weight, product.to(weight.dtype), scale)
