"""The training run in torch: transformers' Qwen3 with `torch_dora.apply_dora` and
`torch.optim.AdamW`.

transformers rounds cosine and sine to bf16 and rotates in bf16; `jax_dora.lm.models` rotates in
fp32 and rounds once. These are different functions, not different roundings of one function, so
here the rotation is made the same: the tables stay fp32, and queries and keys are rounded before
attention. All other roundings already happen in the same order: RMSNorm in fp32, rounded before its
weight; softmax in fp32; the residual stream in bf16. `parity.sides.jax.training` compares the
optimizers.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from parity.sides.torch.decoder import adapt, parameters, set_adapter
from parity.training.adapter import Adapter
from parity.training.difference import Run
from parity.training.settings import Settings
from parity.training.text import even_starts, starts, text

EVAL_BATCH = 32


def train(
    settings: Settings,
    base: Path,
    adapter: Adapter,
    seed: int,
    implementation: str | None,
    device: str = "cpu",
) -> Run:
    """Trains an adapter for the base model in the folder `base`; "peft" uses Hugging Face PEFT's
    layers instead of ours."""
    begin = time.perf_counter()
    model = _model(settings, base, adapter, implementation, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    magnitudes = [p for p in trained if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": magnitudes, "weight_decay": 0.0}],
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=device == "cuda",
    )
    before = _evaluate(model, settings, device)
    part = torch.from_numpy(text().adapter.copy()).to(device)
    where = starts(text().adapter, (settings.steps, settings.rows), settings.length, seed)
    places = torch.from_numpy(where).to(device)
    losses = torch.zeros(settings.steps, device=device)
    norms = torch.zeros(settings.steps, device=device)
    for step, rate in enumerate(settings.learning_rates()):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model, _rows(part, places[step], settings.length))
        loss.backward()
        losses[step] = loss.detach()
        norms[step] = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        optimizer.step()
    return Run(
        losses=losses.double().cpu().numpy(),
        gradient_norms=norms.double().cpu().numpy(),
        eval_before=before,
        eval_after=_evaluate(model, settings, device),
        adapter=_adapter_of(model),
        seconds=time.perf_counter() - begin,
    )


def mean_loss(model: Any, tokens: Tensor) -> Tensor:
    """Returns the mean cross-entropy, f32[], of tokens i64[rows, length + 1]; logits are not
    rounded."""
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    logits = F.linear(hidden.float(), model.lm_head.weight.float())
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class WideRotation(nn.Module):
    """Computes cosine and sine of position times frequency, f32[batch, time, head_dim]."""

    def __init__(self, rotation: Any) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(rotation.inv_freq.float(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].float() * self.inv_freq
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def _rounded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Computes causal attention of [batch, heads, time, head_dim], with query and key rounded to
    value's dtype."""
    mixed = F.scaled_dot_product_attention(
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        is_causal=True,
        scale=options["scaling"],
        enable_gqa=True,
    )
    return mixed.transpose(1, 2).contiguous(), None


def _model(
    settings: Settings, base: Path, adapter: Adapter, implementation: str | None, device: str
) -> Any:
    AttentionInterface.register("rounded", _rounded_attention)
    dtype = getattr(torch, settings.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, attn_implementation="rounded"
    )
    model.model.rotary_emb = WideRotation(model.model.rotary_emb)
    model = model.to(device)  # on a device where the named implementation can run
    adapt(model, implementation, torch.float32, settings.rank, settings.alpha)
    model = model.to(device)
    set_adapter(model, adapter)
    return model.train()


@torch.no_grad()
def _evaluate(model: Any, settings: Settings, device: str) -> float:
    part = torch.from_numpy(text().held_out.copy()).to(device)
    where = even_starts(text().held_out, settings.eval_rows, settings.length)
    batches = torch.from_numpy(where).to(device).split(EVAL_BATCH)
    losses = [mean_loss(model, _rows(part, batch, settings.length)) for batch in batches]
    return float(torch.stack(losses).double().mean())


def _rows(part: Tensor, where: Tensor, length: int) -> Tensor:
    at = where[:, None] + torch.arange(length + 1, device=where.device)
    return part[at].long()


def _adapter_of(model: Any) -> Adapter:
    layers: dict[str, dict[str, list[np.ndarray]]] = {}
    for projection, name, parameter in parameters(model):
        values = layers.setdefault(projection, {}).setdefault(name, [])
        values.append(parameter.detach().cpu().numpy())
    return {p: {name: np.stack(v) for name, v in kinds.items()} for p, kinds in layers.items()}
