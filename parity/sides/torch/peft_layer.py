"""One layer with Hugging Face PEFT's DoRA over a quantised weight, which PEFT calls QDoRA."""

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
    """Returns norm, y and all gradients; the weight is quantised by torchao."""
    codes = parts(inputs.weight)
    is_nf4 = codes.qtype == "nf4"
    base = _bitsandbytes_linear(codes, inputs.x) if is_nf4 else frozen_linear(inputs.weight)
    if inputs.bias is not None:
        base.bias = nn.Parameter(inputs.bias.clone())
    rank = inputs.lora_a.shape[0]
    adapted, leaves = adapt_linear(base, rank, scale * rank, in_4bit=is_nf4)
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
    results = {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"norm": norm, "y": y.detach()} | results


def adapt_linear(
    base: nn.Linear,
    rank: int,
    alpha: float,
    *,
    use_dora: bool = True,
    use_rslora: bool = False,
    wide: bool = True,
    in_4bit: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Returns PEFT's layer that adapts `base`, and the adapter's parameters by our names.

    Args:
      wide: whether adapters are in fp32, PEFT's default, or in the weight's dtype.
    """
    options: dict[str, Any] = {"lora_alpha": alpha, "use_dora": use_dora, "use_rslora": use_rslora}
    config = LoraConfig(r=rank, target_modules=["0"], **options)
    model: Any = nn.Sequential(base)
    model.is_loaded_in_4bit = in_4bit
    with warnings.catch_warnings():
        # This warning is about merging, which is not done here.
        warnings.filterwarnings("ignore", message=".*without `get_apply_tensor_subclass`")
        wrapped: Any = get_peft_model(model, config, autocast_adapter_dtype=wide)
    layer = wrapped.base_model.model[0]
    parts = {"lora_a": layer.lora_A, "lora_b": layer.lora_B}
    parts |= {"magnitude": layer.lora_magnitude_vector} if use_dora else {}
    return layer, {name: part["default"].weight for name, part in parts.items()}


def frozen_linear(weight: torch.Tensor) -> nn.Linear:
    """Returns a frozen layer with this weight."""
    layer = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _bitsandbytes_linear(weight: Parts, x: torch.Tensor) -> nn.Linear:
    """Returns bitsandbytes' layer with the same codes and scales, for inputs like x."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    packed = torch.tensor(weight.codes[:, ::2] << 4 | weight.codes[:, 1::2], dtype=torch.uint8)
    state = bitsandbytes.functional.QuantState(
        absmax=torch.tensor(weight.scale).flatten(),
        shape=torch.Size(weight.codes.shape),
        code=bitsandbytes.functional.get_4bit_type("nf4", device="cpu"),
        blocksize=weight.codes.shape[1] // weight.scale.shape[1],
        quant_type="nf4",
        dtype=x.dtype,
    )
    layer = bitsandbytes.nn.Linear4bit(
        *weight.codes.shape[::-1], bias=False, compute_dtype=x.dtype, quant_type="nf4"
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        packed.reshape(-1, 1),
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        quant_type="nf4",
        bnb_quantized=True,
        module=layer,
    )
    return layer.to(x.device)
