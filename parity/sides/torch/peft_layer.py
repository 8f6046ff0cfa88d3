"""One layer by Hugging Face PEFT's DoRA over a quantised weight: what PEFT calls QDoRA."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.integrations import dequantize_module_weight
from torch import nn

from parity.cases import LayerInputs
from parity.torchao_weights import Parts, parts

Tensors = dict[str, torch.Tensor]


def layer(inputs: LayerInputs, scale: float) -> Tensors:
    """Returns norm, y and all gradients; the weight is one of torchao's."""
    found = parts(inputs.weight)
    base = _by_bitsandbytes(found) if found.qtype == "nf4" else linear(inputs.weight)
    if inputs.bias is not None:
        base.bias = nn.Parameter(inputs.bias.clone())
    rank = inputs.lora_a.shape[0]
    adapted, leaves = over(base, rank, scale * rank, in_4bit=found.qtype == "nf4")
    for name, leaf in leaves.items():
        leaf.data.copy_(getattr(inputs, name))
    magnitude = adapted.lora_magnitude_vector["default"]
    leaves["x"] = inputs.x.clone().requires_grad_()
    if inputs.bias is not None:
        leaves["bias"] = base.bias.requires_grad_()
    y = adapted(leaves["x"])
    gradients = torch.autograd.grad(y, list(leaves.values()), inputs.dy)
    with torch.no_grad():
        weight: Any = dequantize_module_weight(base)
        norm = magnitude.get_weight_norm(weight, leaves["lora_b"] @ leaves["lora_a"], scale)
    found = {f"d_{name}": one for name, one in zip(leaves, gradients, strict=True)}
    return {"norm": norm, "y": y.detach()} | found


def over(
    base: nn.Linear,
    rank: int,
    alpha: float,
    *,
    use_dora: bool = True,
    use_rslora: bool = False,
    wide: bool = True,
    in_4bit: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Returns PEFT's layer over a linear one, and the adapter's parameters by our names.

    Args:
      wide: adapters in fp32, PEFT's default, else in the weight's dtype.
    """
    options: dict[str, Any] = {"lora_alpha": alpha, "use_dora": use_dora, "use_rslora": use_rslora}
    config = LoraConfig(r=rank, target_modules=["0"], **options)
    model: Any = nn.Sequential(base)
    model.is_loaded_in_4bit = in_4bit
    with warnings.catch_warnings():
        # Of merging, which is not done here.
        warnings.filterwarnings("ignore", message=".*without `get_apply_tensor_subclass`")
        wrapped: Any = get_peft_model(model, config, autocast_adapter_dtype=wide)
    layer = wrapped.base_model.model[0]
    parts = {"lora_a": layer.lora_A, "lora_b": layer.lora_B}
    parts |= {"magnitude": layer.lora_magnitude_vector} if use_dora else {}
    return layer, {name: part["default"].weight for name, part in parts.items()}


def linear(weight: torch.Tensor) -> nn.Linear:
    """Returns a frozen layer that has this weight."""
    made = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def _by_bitsandbytes(found: Parts) -> nn.Linear:
    """Returns bitsandbytes' layer over the very codes and scales."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    packed = torch.tensor(found.codes[:, ::2] << 4 | found.codes[:, 1::2], dtype=torch.uint8)
    state = bitsandbytes.functional.QuantState(
        absmax=torch.tensor(found.scale).flatten(),
        shape=torch.Size(found.codes.shape),
        code=bitsandbytes.functional.get_4bit_type("nf4", device="cpu"),
        blocksize=found.codes.shape[1] // found.scale.shape[1],
        quant_type="nf4",
        dtype=torch.float32,
    )
    made = bitsandbytes.nn.Linear4bit(
        *found.codes.shape[::-1], bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.weight = bitsandbytes.nn.Params4bit(
        packed.reshape(-1, 1),
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        quant_type="nf4",
        bnb_quantized=True,
        module=made,
    )
    return made
