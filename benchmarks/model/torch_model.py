"""The model in torch: transformers' Qwen3 with PEFT or torch_dora; weights drawn, none fetched."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

import torch_dora
from benchmarks.check import Check, judge
from benchmarks.model.protocol import PROJECTIONS, SAME_MODEL, Kind, Protocol, Task
from benchmarks.work import Expectation, Variant

# As in `benchmarks.model.jax_model`, whose reasons hold here too.
LORA_B_DEVIATION = 0.0035
MAGNITUDE_DEVIATION = 0.05
EPS = 1e-6


class Adapter(NamedTuple):
    """An adapted projection's parameters, whoever adapted it."""

    weight: Tensor
    lora_a: Tensor
    lora_b: Tensor
    magnitude: Tensor
    scale: float


def variant(kind: Kind, task: Task, protocol: Protocol, device: str) -> Variant:
    """Returns a task of `kind`, with a model of its own."""
    model = _build(kind, protocol, protocol.layers, device)
    model.train(task != "inference")
    tokens = _tokens(protocol, device)
    around = _surroundings(kind, device)

    def inference() -> Tensor:
        with torch.no_grad(), around():
            return _logits(model, protocol.last, tokens)

    def gradient() -> Tensor:
        model.zero_grad(set_to_none=True)
        with around():
            logits = _logits(model, protocol.last, tokens)
            wanted = tokens[:, -protocol.last :].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted)
            loss.backward()
        return loss.detach()

    step = inference if task == "inference" else gradient
    check = functools.partial(_check, kind, protocol, device)
    return Variant("torch", kind.name, step, [()], check=check, whole=True)


def _base(protocol: Protocol, layers: int, device: str, dtype: torch.dtype) -> Any:
    config = Qwen3Config(
        vocab_size=protocol.vocabulary,
        hidden_size=protocol.hidden,
        intermediate_size=protocol.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=protocol.heads,
        num_key_value_heads=protocol.kv_heads,
        head_dim=protocol.head_dim,
        max_position_embeddings=max(protocol.tokens, 40_960),
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.requires_grad_(False)


@torch.no_grad()
def _build(kind: Kind, protocol: Protocol, layers: int, device: str) -> Any:
    """Returns the adapted model, checkpointing on, its adapters as after some training."""
    model = _base(protocol, layers, device, torch.bfloat16)
    # transformers is about to rename it.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    rank, alpha = protocol.rank, protocol.alpha
    with torch.device(device):
        if kind.peft:
            config = LoraConfig(
                r=rank,
                lora_alpha=alpha,
                use_rslora=True,
                use_dora=True,
                target_modules=list(PROJECTIONS),
            )
            get_peft_model(model, config, autocast_adapter_dtype=kind.peft == "wide")
        else:
            paths = rf".*\.({'|'.join(PROJECTIONS)})"
            rule = torch_dora.DoRARule(
                paths, rank, alpha, use_rslora=True, adapter_dtype=torch.bfloat16
            )
            torch_dora.apply_dora(model, rule)
    for adapter in _adapters(model).values():
        adapter.lora_b.normal_(0, LORA_B_DEVIATION)
        adapter.magnitude.mul_(1 + MAGNITUDE_DEVIATION * torch.randn_like(adapter.magnitude))
    if kind.peft == "compiled" and device == "cuda":
        # Layer by layer: all layers share one compiled program.
        for layer in model.model.layers:
            layer.compile()
    return model.train()


def _adapters(model: nn.Module) -> dict[str, Adapter]:
    """Returns the adapted projections by their paths."""
    found: dict[str, Adapter] = {}
    for path, module in model.named_modules():
        one: Any = module
        if path.rpartition(".")[2] not in PROJECTIONS:
            continue
        if isinstance(module, torch_dora.DoRALinear):
            found[path] = Adapter(one.weight, one.lora_a, one.lora_b, one.magnitude, one.scale)
        else:
            parts = (one.lora_A, one.lora_B, one.lora_magnitude_vector)
            a, b, m = (part["default"].weight for part in parts)
            found[path] = Adapter(one.get_base_layer().weight, a, b, m, one.scaling["default"])
    return found


def _tokens(protocol: Protocol, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(2)
    shape = (1, protocol.tokens + 1)
    return torch.randint(protocol.vocabulary, shape, generator=generator, device=device)


def _logits(model: nn.Module, last: int, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens[:, :-1], logits_to_keep=last).logits


def _surroundings(kind: Kind, device: str) -> Callable[[], contextlib.AbstractContextManager]:
    """Returns what the variant's steps run in."""
    if kind.peft == "wide":
        return functools.partial(torch.autocast, device, dtype=torch.bfloat16)
    return contextlib.nullcontext


@functools.cache
@torch.no_grad()
def _check(kind: Kind, protocol: Protocol, device: str) -> Check:
    """Holds the logits of a few layers against fp32, DoRA's weights formed; gradients are held to
    fp64 by the level `layer`."""
    tokens = _tokens(protocol, device)
    model = _build(kind, protocol, protocol.checked_layers, device).eval()
    reference = _base(protocol, protocol.checked_layers, device, torch.float32).eval()
    others = model.state_dict()
    for name, value in reference.state_dict().items():
        if not any(projection in name for projection in PROJECTIONS):
            value.copy_(others[name])
    for path, adapter in _adapters(model).items():
        weight, a, b, magnitude = (t.float() for t in adapter[:4])
        direction = weight + adapter.scale * (b @ a)
        norm = torch.linalg.vector_norm(direction, dim=1).clamp(min=EPS)
        merged: Any = reference.get_submodule(path)
        merged.weight.copy_(direction * (magnitude / norm)[:, None])
    with _surroundings(kind, device)():
        found = _logits(model, protocol.last, tokens)
    expected = Expectation(_logits(reference, protocol.last, tokens).double())
    return judge({"logits": found}, {"logits": expected}, exact=False, same=SAME_MODEL)
