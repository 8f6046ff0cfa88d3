"""transformers' Qwen3 with torch_dora's layers, with PEFT's, or without an adapter, on given
weights."""

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
    """Returns the results of the model, in which every projection is a `torch_dora.DoRALinear`. The
    implementation "base" is the model without adapters, "peft" PEFT's DoRA; all in the model's
    dtype."""
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
    rule: str = RULE,
) -> None:
    """Adapts the projections of a transformers decoder, in place.

    Args:
      implementation: of torch_dora, or "peft" for PEFT's layers.
      dtype: of lora_a and lora_b; for PEFT, fp32 or the model's own dtype.
      use_dora: for PEFT only; False is LoRA.
      rule: a regular expression for the names of the projections.
    """
    if implementation != "peft":
        options: Any = {"adapter_dtype": dtype, "implementation": implementation}
        apply_dora(model, DoRARule(rule, rank, alpha, use_rslora=use_rslora, **options))
        return
    config = LoraConfig(
        r=rank, lora_alpha=alpha, use_rslora=use_rslora, use_dora=use_dora, target_modules=rule
    )
    with warnings.catch_warnings():
        # PEFT uses a name that the newest transformers has deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning)
        get_peft_model(model, config, autocast_adapter_dtype=dtype == torch.float32)


def checkpoint_layers(model: Any) -> None:
    """Turns on activation checkpointing in a transformers model."""
    # transformers is about to rename this method.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()


def parameters(model: Any) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yields (projection, name, parameter) of the adapters, torch_dora's or PEFT's, layer by
    layer."""
    for layer in model.model.layers:
        for projection in PROJECTIONS:
            module = layer.get_submodule(projection)
            adapter: list[Any] = [getattr(module, name, None) for name in ADAPTER]
            if adapter[0] is None:
                parts = (module.lora_A, module.lora_B, module.lora_magnitude_vector)
                adapter = [part["default"].weight for part in parts]
            for name, parameter in zip(ADAPTER, adapter, strict=True):
                yield projection, name, parameter


@torch.no_grad()
def set_adapter(model: Any, adapter: Mapping[str, Mapping[str, Any]]) -> None:
    """Copies the values of `adapter`, which has one value per layer by projection and name, into
    the model."""
    values = {
        (p, name): iter(layers) for p, kinds in adapter.items() for name, layers in kinds.items()
    }
    for projection, name, parameter in parameters(model):
        parameter.copy_(torch.as_tensor(next(values[projection, name])))
        parameter.requires_grad_()


def _model(run: Run, weights: Weights) -> Any:
    """Returns the frozen base model, which shares the tensors of `weights`."""
    config = Qwen3Config(
        **run.sizes.hf_config(run.layers, max(run.tokens, 40_960)), use_cache=False
    )
    # On some GPUs the fused attention does not multiply fp32 matrices in fp32.
    attention = "sdpa" if run.dtype == "bfloat16" else "eager"
    dtype = getattr(torch, run.dtype)
    transformers.utils.logging.disable_progress_bar()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.load_state_dict(weights.base, strict=True, assign=True)
    # The state has no frequencies, so they are still without values.
    with torch.device(weights.tokens.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.requires_grad_(False)


def _forward(run: Run, model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits [last, vocabulary] and the mean loss of the last tokens."""
    logits = model(input_ids=tokens[:, :-1], logits_to_keep=run.last).logits[0]
    return logits, F.cross_entropy(logits.float(), tokens[0, -run.last :])
