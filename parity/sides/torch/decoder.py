"""transformers' Qwen3 with torch_dora, with PEFT, or without an adapter, on weights it is given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from parity.model.sizes import ADAPTER, PROJECTIONS, Run
from parity.model.weights import Result, Weights
from torch_dora import DoRARule, apply_dora

RULE = r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"


def compute(run: Run, weights: Weights, implementation: str | None) -> Result:
    """Returns the model's results, `torch_dora.DoRALinear` in place of every projection; "base" is
    the model without adapters, "peft" PEFT's own DoRA, all of it in the model's dtype."""
    model = _model(run, weights)
    if implementation == "base":
        with torch.no_grad():
            logits, loss = _forward(run, model, weights.tokens)
        return Result(logits, float(loss), {})
    with torch.device(weights.tokens.device):
        adapt(model, implementation, getattr(torch, run.dtype), run.sizes.rank, run.sizes.alpha)
    set_adapter(model, weights.adapter)
    checkpoint_layers(model)
    model.train()
    logits, loss = _forward(run, model, weights.tokens)
    loss.backward()
    gradients: dict[str, list[Tensor]] = {}
    for path, kind, parameter in parameters(model):
        if parameter.grad is None:
            raise RuntimeError(f"{path}.{kind} has no gradient")
        gradients.setdefault(f"{path}.{kind}", []).append(parameter.grad)
    return Result(logits.detach(), float(loss.detach()), gradients)


def adapt(
    model: Any,
    implementation: str | None,
    dtype: torch.dtype,
    rank: int,
    alpha: int,
    *,
    use_rslora: bool = True,
    use_dora: bool = True,
) -> None:
    """Adapts the projections of a decoder of transformers, in place.

    Args:
      implementation: of torch_dora, or "peft" for PEFT's layers.
      dtype: of lora_a and lora_b; of PEFT's, fp32 or the model's own.
      use_dora: by PEFT alone, LoRA where it is not set.
    """
    if implementation != "peft":
        options: Any = {"adapter_dtype": dtype, "implementation": implementation}
        apply_dora(model, DoRARule(RULE, rank, alpha, use_rslora=use_rslora, **options))
        return
    config = LoraConfig(
        r=rank, lora_alpha=alpha, use_rslora=use_rslora, use_dora=use_dora, target_modules=RULE
    )
    with warnings.catch_warnings():
        # PEFT asks transformers by a name that the newest transformers calls deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning)
        get_peft_model(model, config, autocast_adapter_dtype=dtype == torch.float32)


def checkpoint_layers(model: Any) -> None:
    """Lets a model of transformers compute its layers again in the backward pass."""
    # transformers is about to rename it.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()


def parameters(model: Any) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yields projection, name and parameter, ours or PEFT's, of every layer in turn."""
    for layer in model.model.layers:
        for projection in PROJECTIONS:
            module = layer.get_submodule(projection)
            found: list[Any] = [getattr(module, name, None) for name in ADAPTER]
            if found[0] is None:
                parts = (module.lora_A, module.lora_B, module.lora_magnitude_vector)
                found = [part["default"].weight for part in parts]
            for name, parameter in zip(ADAPTER, found, strict=True):
                yield projection, name, parameter


@torch.no_grad()
def set_adapter(model: Any, adapter: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills the adapters with what `adapter` has by projection, then by name, for each layer."""
    values = {
        (p, name): iter(every) for p, kinds in adapter.items() for name, every in kinds.items()
    }
    for projection, name, parameter in parameters(model):
        parameter.copy_(torch.as_tensor(next(values[projection, name])))
        parameter.requires_grad_()


def _model(run: Run, weights: Weights) -> Any:
    """Returns the base model, which shares `weights`' tensors; frozen."""
    config = Qwen3Config(
        **run.sizes.hf_config(run.layers, max(run.tokens, 40_960)), use_cache=False
    )
    # The fused attention of fp32 is not an fp32 product of matrices on every GPU.
    attention = "sdpa" if run.dtype == "bfloat16" else "eager"
    dtype = getattr(torch, run.dtype)
    transformers.utils.logging.disable_progress_bar()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.load_state_dict(weights.base, strict=True, assign=True)
    # The frequencies are no part of the state and still without values.
    with torch.device(weights.tokens.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.requires_grad_(False)


def _forward(run: Run, model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits [last, vocabulary] and the mean loss of the last tokens."""
    logits = model(input_ids=tokens[:, :-1], logits_to_keep=run.last).logits[0]
    return logits, F.cross_entropy(logits.float(), tokens[0, -run.last :])
