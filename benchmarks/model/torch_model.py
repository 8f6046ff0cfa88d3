"""The model in torch: transformers' Qwen3 with random weights, adapted by PEFT or torch_dora."""

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from benchmarks.model.protocol import (
    CHECKED_LAYERS,
    LORA_B_DEVIATION,
    MAGNITUDE_DEVIATION,
    PROJECTIONS,
    Kind,
    Protocol,
    Task,
)
from benchmarks.results import Row
from benchmarks.work import Expectation, Variant, judge
from parity.model import sizes
from parity.sides.torch.decoder import adapt, checkpoint_layers, parameters

EPS = 1e-6


def variant(kind: Kind, task: Task, protocol: Protocol, device: str) -> Variant:
    """Returns a task of `kind`, with a new model."""
    model = _build(kind, protocol, protocol.layers, device)
    model.train(task != "inference")
    tokens = _tokens(protocol, device)
    autocast = _autocast(kind, device)

    def inference() -> Tensor:
        with torch.no_grad(), autocast:
            return _logits(model, protocol.last, tokens)

    def gradient() -> Tensor:
        model.zero_grad(set_to_none=True)
        with autocast:
            logits = _logits(model, protocol.last, tokens)
            wanted = tokens[:, -protocol.last :].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted)
            loss.backward()
        return loss.detach()

    step = inference if task == "inference" else gradient
    check = functools.partial(_check, kind, protocol, device)
    return Variant("torch", kind.name, step, [()], check=check, peak_memory=True)


def random_model(config: PretrainedConfig, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Returns a frozen transformers model with random weights, drawn on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.requires_grad_(False)


def _config(protocol: Protocol, layers: int) -> Qwen3Config:
    sizes = protocol.hf_config(layers, max(protocol.tokens, 40_960))
    return Qwen3Config(**sizes, use_cache=False)


@torch.no_grad()
def _build(kind: Kind, protocol: Protocol, layers: int, device: str) -> Any:
    """Returns the adapted model with activation checkpointing; its adapters are moved away from
    their initial values, as after training."""
    model = random_model(_config(protocol, layers), device)
    checkpoint_layers(model)
    dtype = torch.float32 if kind.peft == "wide" else torch.bfloat16
    with torch.device(device):
        adapt(model, "peft" if kind.peft else None, dtype, protocol.rank, protocol.alpha)
    for _, name, parameter in parameters(model):
        if name == "lora_b":
            parameter.normal_(0, LORA_B_DEVIATION)
        elif name == "magnitude":
            parameter.mul_(1 + MAGNITUDE_DEVIATION * torch.randn_like(parameter))
    if kind.peft == "compiled" and device == "cuda":
        # Compiled layer by layer, so that all layers share one program.
        for layer in model.model.layers:
            layer.compile()
    return model.train()


def _tokens(protocol: Protocol, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(2)
    shape = (1, protocol.tokens + 1)
    return torch.randint(protocol.vocabulary, shape, generator=generator, device=device)


def _logits(model: nn.Module, last: int, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens[:, :-1], logits_to_keep=last).logits


def _autocast(kind: Kind, device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=kind.peft == "wide")


@functools.cache
@torch.no_grad()
def _check(kind: Kind, protocol: Protocol, device: str) -> Row:
    """Returns the verdict on the logits of a few layers, compared with an fp32 model whose weights
    are merged. Gradients are checked by the level `layer`."""
    tokens = _tokens(protocol, device)
    model = _build(kind, protocol, CHECKED_LAYERS, device).eval()
    config = _config(protocol, CHECKED_LAYERS)
    reference = random_model(config, device, torch.float32).eval()
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        if not any(projection in name for projection in PROJECTIONS):
            value.copy_(state[name])
    adapters = (parameter.float() for _, _, parameter in parameters(model))
    for layer, path in itertools.product(range(CHECKED_LAYERS), sizes.PROJECTIONS):
        a, b, magnitude = itertools.islice(adapters, len(sizes.ADAPTER))
        adapted: Any = model.model.layers[layer].get_submodule(path)
        merged: Any = reference.model.layers[layer].get_submodule(path)
        direction = adapted.weight.float() + protocol.scale * (b @ a)
        norm = torch.linalg.vector_norm(direction, dim=1).clamp(min=EPS)
        merged.weight.copy_(direction * (magnitude / norm)[:, None])
    with _autocast(kind, device):
        found = _logits(model, protocol.last, tokens)
    expected = Expectation(_logits(reference, protocol.last, tokens).double())
    return judge({"logits": found}, {"logits": expected}, exact=False)
