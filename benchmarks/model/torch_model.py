"""The model in torch: transformers' Qwen3 with PEFT or torch_dora; weights drawn, none fetched."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.helpers import DoraCaching
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

import torch_dora
from benchmarks.check import Check, judge
from benchmarks.model.protocol import PROJECTIONS, SAME_MODEL, Kind, Protocol, Task
from benchmarks.work import Expectation, Variant
from torch_dora import ops

# As in `benchmarks.model.jax_model`, whose reasons hold here too.
LORA_B_DEVIATION = 0.0035
MAGNITUDE_DEVIATION = 0.05
EPS = 1e-6


class NormKept(torch_dora.DoRALinear):
    """A DoRA layer that takes its norm when told to."""

    kept: Tensor | None = None

    def take_norm(self) -> None:
        self.kept = ops.factored_norm(self.weight, self.lora_a, self.lora_b, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        operands = (x, self.weight, self.lora_a, self.lora_b, self.magnitude, self.scale)
        return ops.dora_linear(*operands, norm=self.kept)


class Dense(nn.Module):
    """The reference: W' formed, and the gradient left to autograd; no formula of the package."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.weight = nn.Parameter(adapter.weight.float(), requires_grad=False)
        self.lora_a = nn.Parameter(adapter.lora_a.detach().float())
        self.lora_b = nn.Parameter(adapter.lora_b.detach().float())
        self.magnitude = None
        if adapter.magnitude is not None:
            self.magnitude = nn.Parameter(adapter.magnitude.detach().float())
        self.scale = adapter.scale

    def forward(self, x: Tensor) -> Tensor:
        direction = self.weight + self.scale * (self.lora_b @ self.lora_a)
        if self.magnitude is not None:
            norm = torch.linalg.vector_norm(direction.detach(), dim=1).clamp(min=EPS)
            direction = direction * (self.magnitude / norm)[:, None]
        return F.linear(x, direction)


class Adapter:
    """What an adapted projection is made of, whoever adapted it."""

    magnitude: Tensor | None

    def __init__(self, projection: nn.Module) -> None:
        module: Any = projection
        if isinstance(projection, LoraLayer):
            self.weight = module.get_base_layer().weight
            self.lora_a = module.lora_A["default"].weight
            self.lora_b = module.lora_B["default"].weight
            self.scale = module.scaling["default"]
            vectors = module.lora_magnitude_vector
            self.magnitude = vectors["default"].weight if "default" in vectors else None
        elif isinstance(projection, torch_dora.DoRALinear | Dense):
            self.weight, self.lora_a, self.lora_b = module.weight, module.lora_a, module.lora_b
            self.scale, self.magnitude = module.scale, module.magnitude
        else:
            raise TypeError(f"{type(module).__name__} is no adapted projection")

    def parameters(self) -> dict[str, Tensor]:
        found = {"d_lora_a": self.lora_a, "d_lora_b": self.lora_b}
        return found if self.magnitude is None else found | {"d_magnitude": self.magnitude}


def variants(kind: Kind, protocol: Protocol, device: str) -> Iterator[tuple[Task, Variant]]:
    """Yields each task of `kind`, the model built when the first is asked for."""
    check = functools.cache(functools.partial(_check, kind, protocol, device))
    check()
    model = _build(kind, protocol, protocol.layers, device)
    tokens = _tokens(protocol, device)
    surroundings = _surroundings(kind, device)

    def inference() -> Tensor:
        with torch.no_grad(), surroundings():
            return _logits(model, protocol.last, tokens[0])

    def gradient() -> Tensor:
        model.zero_grad(set_to_none=True)
        with surroundings():
            return _gradient(model, protocol.last, tokens[0])

    steps = {"inference": inference, "gradient": gradient}
    for task in kind.tasks:
        model.train(task != "inference")
        yield (
            task,
            Variant(
                *("torch", kind.name, steps[task], [()]),
                check=check,
                cached=kind.cached,
                whole=True,
            ),
        )


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


def _build(kind: Kind, protocol: Protocol, layers: int, device: str) -> Any:
    """The adapted model in training mode, checkpointing on, its adapters as after some training."""
    model = _base(protocol, layers, device, torch.bfloat16)
    # transformers is about to rename it.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    with torch.device(device):
        if kind.peft:
            config = LoraConfig(
                r=protocol.rank,
                lora_alpha=protocol.alpha,
                use_rslora=True,
                use_dora=kind.method == "DoRA",
                target_modules=list(PROJECTIONS),
            )
            get_peft_model(model, config, autocast_adapter_dtype=kind.peft == "wide")
        elif kind.method == "DoRA":
            _adapt(model, NormKept if kind.keeps_norms else torch_dora.DoRALinear, protocol)
    _stray(model)
    for module in model.modules():
        if isinstance(module, NormKept):
            module.take_norm()
    if kind.peft == "compiled" and device == "cuda":
        # Layer by layer: all layers share one compiled program.
        for layer in model.model.layers:
            layer.compile()
    return model.train()


def _adapt(model: nn.Module, layer: type[torch_dora.DoRALinear], protocol: Protocol) -> None:
    for path, linear in _projections(model).items():
        adapted = layer.from_linear(
            linear,
            rank=protocol.rank,
            alpha=protocol.alpha,
            use_rslora=True,
            adapter_dtype=torch.bfloat16,
        )
        model.set_submodule(path, adapted)


def _projections(model: nn.Module) -> dict[str, Any]:
    return {
        path: module
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in PROJECTIONS
    }


@torch.no_grad()
def _stray(model: nn.Module) -> None:
    for module in _projections(model).values():
        if isinstance(module, nn.Linear):
            continue
        adapter = Adapter(module)
        adapter.lora_b.normal_(0, LORA_B_DEVIATION)
        if adapter.magnitude is not None:
            adapter.magnitude.mul_(1 + MAGNITUDE_DEVIATION * torch.randn_like(adapter.magnitude))


def _tokens(protocol: Protocol, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(2)
    shape = (protocol.micro_steps, 1, protocol.tokens + 1)
    return torch.randint(protocol.vocabulary, shape, generator=generator, device=device)


def _logits(model: nn.Module, last: int, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens[:, :-1], logits_to_keep=last).logits


def _gradient(model: nn.Module, last: int, tokens: Tensor) -> Tensor:
    """Mean loss of the last tokens; gradients are added to the parameters'."""
    logits = _logits(model, last, tokens)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, -last:].flatten())
    loss.backward()
    return loss.detach()


def _surroundings(kind: Kind, device: str) -> Callable[[], contextlib.AbstractContextManager]:
    """What the variant's steps run in."""
    if kind.peft == "wide":
        return functools.partial(torch.autocast, device, dtype=torch.bfloat16)
    if kind.peft == "cached":
        return DoraCaching
    return contextlib.nullcontext


def _check(kind: Kind, protocol: Protocol, device: str) -> Check:
    """Logits and adapters' gradients of the first layers against fp32, DoRA's weights formed."""
    tokens = _tokens(protocol, device)[0]
    model = _build(kind, protocol, protocol.checked_layers, device)
    reference = _base(protocol, protocol.checked_layers, device, torch.float32)
    found_projections = _projections(model)
    for path in _projections(reference):
        module = found_projections[path]
        if not isinstance(module, nn.Linear):
            reference.set_submodule(path, Dense(Adapter(module)))
    frozen = {
        name: value.float()
        for name, value in model.state_dict().items()
        if name in reference.state_dict() and not any(p in name for p in PROJECTIONS)
    }
    if kind.method == "base":
        frozen = {name: value.float() for name, value in model.state_dict().items()}
    reference.load_state_dict(frozen, strict=kind.method == "base")
    reference.train()

    results = []
    for one, around in (
        (model, _surroundings(kind, device)),
        (reference, contextlib.nullcontext),
    ):
        if kind.method == "base" or kind.tasks == ("inference",):
            with torch.no_grad(), around():
                results.append({"logits": _logits(one.eval(), protocol.last, tokens).flatten()})
            continue
        with around():
            results.append(_named(one, protocol.last, tokens))
    found, wanted = results
    expected = {name: Expectation(value.detach().double()) for name, value in wanted.items()}
    return judge(found, expected, exact=False, same=SAME_MODEL)


def _named(model: nn.Module, last: int, tokens: Tensor) -> dict[str, Tensor]:
    """Logits, and the gradients of one kind of parameter in one vector."""
    with torch.no_grad():
        logits = _logits(model, last, tokens)
    _gradient(model, last, tokens)
    parts: dict[str, list[Tensor]] = {"logits": [logits.flatten()]}
    for module in _projections(model).values():
        for name, parameter in Adapter(module).parameters().items():
            assert parameter.grad is not None
            parts.setdefault(name, []).append(parameter.grad.float().flatten())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}
