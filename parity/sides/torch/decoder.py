"""transformers' Qwen3 with torch_dora, with PEFT, or without an adapter, on weights it is given."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from parity.model.sizes import ADAPTER, PROJECTIONS, Run
from parity.model.weights import Projection, Result, Weights
from torch_dora import DoRALinear

Adapters = dict[str, dict[str, nn.Parameter]]  # by path, then by ADAPTER's names


def compute(run: Run, weights: Weights, implementation: str | None) -> Result:
    """Returns what the model computes, `torch_dora.DoRALinear` in place of every projection; "base"
    is the model without adapters, "peft" PEFT's own DoRA, all of it in the model's dtype."""
    model = _model(run, weights)
    if implementation == "base":
        with torch.no_grad():
            logits, loss = _forward(run, model, weights.tokens)
        return Result(logits, float(loss), {})
    adapt = _adapt_by_peft if implementation == "peft" else _adapt
    adapters = adapt(run, weights, model, implementation)
    return _with_gradients(run, weights, model, adapters)


def _adapt(run: Run, weights: Weights, model: Any, implementation: str | None) -> Adapters:
    found = {}
    for path, projection in _projections(weights).items():
        layer = DoRALinear.from_linear(
            model.get_submodule(path),
            rank=run.sizes.rank,
            alpha=run.sizes.alpha,
            use_rslora=True,
            adapter_dtype=projection.lora_a.dtype,
            implementation=implementation,
        )
        model.set_submodule(path, layer)
        found[path] = dict(zip(ADAPTER, (layer.lora_a, layer.lora_b, layer.magnitude), strict=True))
    return found


def _adapt_by_peft(run: Run, weights: Weights, model: Any, _: str | None) -> Adapters:
    with warnings.catch_warnings(), torch.device(weights.tokens.device):
        # PEFT asks transformers by a name that the newest transformers calls deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning)
        apply_peft(model, run.sizes.rank, run.sizes.alpha, autocast=False)
    return {path: peft_adapter(model.get_submodule(path)) for path in _projections(weights)}


def apply_peft(model: Any, rank: int, alpha: int, *, autocast: bool) -> None:
    """Adapts a decoder's projections with PEFT's DoRA (rsLoRA), in place; with `autocast`, in fp32
    whatever the model's dtype."""
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        use_rslora=True,
        use_dora=True,
        target_modules=[name for names in PROJECTIONS.values() for name in names],
    )
    get_peft_model(model, config, autocast_adapter_dtype=autocast)


def peft_adapter(layer: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters of one of PEFT's layers by `ADAPTER`'s names."""
    parts = (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
    return dict(zip(ADAPTER, (part["default"].weight for part in parts), strict=True))


def _model(run: Run, weights: Weights) -> Any:
    """The base model, which shares `weights`' tensors; frozen."""
    sizes = run.sizes
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=run.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=max(run.tokens, 40_960),
        rms_norm_eps=sizes.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
    )
    # The fused attention of fp32 is not an fp32 product of matrices on every GPU.
    attention = "sdpa" if run.dtype == "bfloat16" else "eager"
    dtype = getattr(torch, run.dtype)
    transformers.utils.logging.disable_progress_bar()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.load_state_dict(weights.frozen(), strict=True, assign=True)
    # The frequencies are no part of the state and still without values.
    with torch.device(weights.tokens.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.requires_grad_(False)


def _projections(weights: Weights) -> dict[str, Projection]:
    return {
        f"model.layers.{index}.{block}.{name}": layer.projections[name]
        for index, layer in enumerate(weights.layers)
        for block, names in PROJECTIONS.items()
        for name in names
    }


def _with_gradients(run: Run, weights: Weights, model: Any, found: Adapters) -> Result:
    with torch.no_grad():
        for path, projection in _projections(weights).items():
            for name, parameter in found[path].items():
                if parameter.dtype not in (projection.lora_a.dtype, torch.float32):
                    raise TypeError(f"{path}.{name} is {parameter.dtype} in a {run.dtype} run")
                parameter.copy_(getattr(projection, name))
                parameter.requires_grad_()
    # transformers is about to rename it.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    model.train()
    logits, loss = _forward(run, model, weights.tokens)
    loss.backward()
    gradients: dict[str, list[Tensor]] = {}
    for path, parameters in found.items():
        for kind, parameter in parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"{path}.{kind} has no gradient")
            gradients.setdefault(f"{path.rpartition('.')[2]}.{kind}", []).append(parameter.grad)
    return Result(logits.detach(), float(loss.detach()), gradients)


def _forward(run: Run, model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [last, vocabulary] and the mean loss of the last tokens."""
    logits = model(input_ids=tokens[:, :-1], logits_to_keep=run.last).logits[0]
    return logits, F.cross_entropy(logits.float(), tokens[0, -run.last :])
