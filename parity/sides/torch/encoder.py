"""The encoder in torch: transformers' BERT, mean pooling, unit-length embeddings.

Its projections are `torch_dora.DoRALinear`, the same computation in plain torch, or dense fp64
weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity import minilm
from parity.minilm import ADAPTER, Adapter, Evaluation
from parity.sides.torch.operators import plain_linear
from torch_dora import DoRALinear

Project = Callable[[str, nn.Linear], nn.Module]


class Encoder(nn.Module):
    """The sentence encoder; `project(name, linear)` creates the module for each of the 36
    projections.

    The weights are rounded to `stored`, if given, and then kept in `dtype`.
    """

    def __init__(
        self,
        project: Project,
        dtype: str = "float32",
        device: str = "cpu",
        stored: str | None = None,
    ) -> None:
        super().__init__()
        # The levels operator and layer do not need transformers.
        from transformers import BertModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        bert: Any = BertModel.from_pretrained(minilm.folder())
        bert = bert.to(getattr(torch, stored or dtype)).to(device, getattr(torch, dtype))
        self.bert = bert.eval().requires_grad_(False)
        for name in minilm.projection_names():
            self.bert.set_submodule(name, project(name, self.bert.get_submodule(name)))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns fp32 (or fp64) embeddings `[sentences, hidden]` for ids and mask `[sentences,
        tokens]`."""
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        weight = mask[:, :, None].to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


class PlainDoRA(DoRALinear):
    """An adapted projection in plain torch."""

    def forward(self, input: Tensor) -> Tensor:
        adapter = (self.lora_a, self.lora_b, self.magnitude)
        return plain_linear(input, self.weight, *adapter, minilm.SCALE, self.bias)


class DenseDoRA(DoRALinear):
    """An adapted projection as one dense matrix, for a model and an adapter in fp64."""

    def forward(self, input: Tensor) -> Tensor:
        adapted = self.weight + minilm.SCALE * (self.lora_b @ self.lora_a)
        norm = (adapted * adapted).sum(1).sqrt().detach()
        return F.linear(input, (self.magnitude / norm)[:, None] * adapted, self.bias)


KINDS = {"plain": PlainDoRA, "dense": DenseDoRA}


def adapted(
    adapter: Adapter,
    dtype: str,
    implementation: str | Mapping[str, str] | None,
    device: str = "cpu",
    stored: str | None = None,
) -> Encoder:
    """Returns an encoder with the adapter.

    Args:
      implementation: one for all projections, or a mapping from projections to implementations;
        "dense" is `DenseDoRA`.
      stored: a dtype to which the weights are rounded before they are converted to `dtype`.
    """
    names = minilm.by_projection(implementation)

    @torch.no_grad()
    def project(name: str, linear: nn.Linear) -> nn.Module:
        implementation = names.get(name)
        kind = DoRALinear
        if implementation in KINDS:
            kind, implementation = KINDS[implementation], None
        options = {"rank": minilm.RANK, "alpha": minilm.SCALE * minilm.RANK}
        layer = kind.from_linear(linear, **options, implementation=implementation)
        if dtype == "float64":
            layer.double()
        for key, value in adapter[name].items():
            getattr(layer, key).copy_(value)
        return layer

    return Encoder(project, dtype, device, stored)


def evaluate(encoder: Encoder, batch: minilm.Batch, gradients: bool) -> Evaluation:
    """Runs a forward pass and, if `gradients` is set, a backward pass."""
    with torch.set_grad_enabled(gradients):
        embeddings, loss = _forward(encoder, batch)
    vectors = {}
    if gradients:
        loss.backward()
        for name in ADAPTER:
            parts = [getattr(layer, name).grad.flatten() for layer in _layers(encoder)]
            vectors[name] = torch.cat(parts).double().cpu()
    return Evaluation(embeddings.detach().double().cpu(), vectors)


def train(encoder: Encoder, batch: minilm.Batch, steps: int) -> tuple[list[float], Adapter]:
    """Returns the loss before every step, and the adapter after the last step, in fp32."""
    parameters = [getattr(layer, name) for layer in _layers(encoder) for name in ADAPTER]
    options: dict = {"eps": minilm.ADAM_EPS, "weight_decay": minilm.WEIGHT_DECAY}
    optimizer = torch.optim.AdamW(parameters, minilm.LEARNING_RATE, minilm.BETAS, **options)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _forward(encoder, batch)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trained = {
        name: {key: getattr(layer, key).detach().float().cpu() for key in ADAPTER}
        for name, layer in zip(minilm.projection_names(), _layers(encoder), strict=True)
    }
    return losses, trained


def _forward(encoder: Encoder, batch: minilm.Batch) -> tuple[Tensor, Tensor]:
    device = encoder.bert.device
    ids, mask = (torch.from_numpy(array).to(device) for array in (batch.ids, batch.mask))
    embeddings = encoder(ids, mask)
    firsts, seconds = embeddings.chunk(2)
    logits = firsts @ seconds.T / minilm.TEMPERATURE
    return embeddings, F.cross_entropy(logits, torch.arange(len(logits), device=device))


def _layers(encoder: Encoder) -> list[nn.Module]:
    return [encoder.bert.get_submodule(name) for name in minilm.projection_names()]
