"""A transformers model with random weights, adapted by torch_dora or PEFT."""

import gc
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from benchmarks.model.protocol import Protocol
from parity.sides.torch.decoder import adapt, checkpoint_layers


class Side(NamedTuple):
    """One way to adapt the model.

    Attributes:
      package: "torch_dora" or "PEFT".
      method: "DoRA" or "LoRA".
      compiled: whether each layer is compiled.
      wide: whether adapters are fp32, under autocast; otherwise they are bf16.
      in_4bit: whether the base's projections are in bitsandbytes' NF4.
      frozen: whether the norms are constants, for inference.
    """

    package: str
    method: str
    compiled: bool = False
    wide: bool = False
    in_4bit: bool = False
    frozen: bool = False

    @property
    def name(self) -> str:
        precision = "fp32 adapters" if self.wide else "bf16 adapters"
        further = ", nf4" * self.in_4bit + ", frozen" * self.frozen + ", compiled" * self.compiled
        return f"{self.package} {self.method}, {precision}{further}"


def random_llama(sizes: Protocol, layers: int, device: str, use_cache: bool = False) -> Any:
    """Returns a frozen transformers Llama with random bf16 weights, drawn on the device."""
    fields = sizes.hf_config(layers, 8192)
    del fields["model_type"]
    return random_model(LlamaConfig(**fields, use_cache=use_cache), device)


def random_model(
    config: PretrainedConfig,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    kind: Any = AutoModelForCausalLM,
) -> Any:
    """Returns a frozen transformers model of an Auto class, with random weights, drawn on the
    device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = kind.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.requires_grad_(False)


def adapted(side: Side, sizes: Protocol, layers: int, rank: int, alpha: int, device: str) -> Any:
    """Returns a decoder in training mode with adapters on all projections, and with activation
    checkpointing of its layers."""
    model = random_llama(sizes, layers, device)
    if side.in_4bit:
        _quantise(model, device)
    checkpoint_layers(model)
    with torch.device(device):
        adapt(
            model,
            "peft" if side.package == "PEFT" else None,
            torch.float32 if side.wide else torch.bfloat16,
            rank,
            alpha,
            use_dora=side.method == "DoRA",
        )
    return model.train()


def free() -> None:
    """Frees compiled programs and the memory that the allocator keeps."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _quantise(model: Any, device: str) -> None:
    """Replaces the projections of a decoder, in place, by NF4 layers with double quantisation."""
    from bitsandbytes.nn import modules

    for module in list(model.model.layers.modules()):
        for name, linear in module.named_children():
            if isinstance(linear, torch.nn.Linear):
                n_out, n_in = linear.weight.shape
                options: Any = {"bias": False, "compute_dtype": torch.bfloat16}
                layer: Any = modules.Linear4bit(n_in, n_out, **options)
                packed: Any = modules.Params4bit
                layer.weight = packed(linear.weight.data, quant_type="nf4", module=layer)
                setattr(module, name, layer.to(device))
    model.is_loaded_in_4bit = True  # PEFT reads this.
