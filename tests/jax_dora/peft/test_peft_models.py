"""Real folders of the architectures that PEFT itself is tested with, both ways: every adapted layer
in Flax beside PEFT's. A model's code is not needed for it, its modules and their names are."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from torch import nn
from transformers.pytorch_utils import Conv1D

from jax_dora.layers import DoRALayer
from jax_dora.peft import load_adapter, save_adapter
from tests.jax_dora.peft.peft_folders import assert_same, tensors_of
from tests.torch_dora.architectures import MODELS, base, output
from tests.torch_dora.peft_folders import perturbed

TOLERANCE = 1e-6


class Holder(nnx.Module):
    """A module that holds others, and parameters that no adapter is for."""


def in_flax(module: nn.Module) -> Any:
    """Returns a module of PyTorch in Flax, with its weights; weights that are tied are apart."""
    rngs = nnx.Rngs(0)
    if isinstance(module, nn.ModuleList):
        return nnx.List([in_flax(one) for one in module])
    weights = {
        name: jnp.asarray(one.detach().numpy())
        for name, one in module.named_parameters(recurse=False)
    }
    if isinstance(module, nn.Embedding):
        layer = nnx.Embed(module.num_embeddings, module.embedding_dim, rngs=rngs)
        layer.embedding.set_value(weights["weight"])
        return layer
    if isinstance(module, nn.Linear | Conv1D):
        kernel = weights["weight"] if isinstance(module, Conv1D) else weights["weight"].T
        layer = nnx.Linear(*kernel.shape, use_bias="bias" in weights, rngs=rngs)
    elif isinstance(module, nn.Conv1d | nn.Conv2d):
        kernel = jnp.moveaxis(weights["weight"], (0, 1), (-1, -2))
        sizes = module.in_channels, module.out_channels, module.kernel_size
        padding = [(size, size) for size in module.padding]
        options = {"strides": module.stride, "padding": padding, "use_bias": "bias" in weights}
        layer = nnx.Conv(*sizes, **options, rngs=rngs)
    else:
        holder = Holder()
        for name, value in weights.items():
            setattr(holder, name, nnx.Param(value))
        for name, child in module.named_children():
            setattr(holder, name, in_flax(child))
        return holder
    layer.kernel.set_value(kernel)
    if layer.bias is not None:
        layer.bias.set_value(weights["bias"])
    return layer


def outputs(theirs: nn.Module, ours: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what an adapted layer and PEFT's compute for the same input, drawn from `seed`."""
    rng, base = np.random.default_rng(seed), theirs.base_layer
    if isinstance(base, nn.Embedding):
        x = rng.integers(0, base.num_embeddings, (2, 5))
        given = torch.from_numpy(x)
    elif isinstance(base, nn.Conv2d):
        x = rng.standard_normal((2, 8, 8, base.in_channels), np.float32)
        given = torch.from_numpy(x).permute(0, 3, 1, 2)
    else:
        x = rng.standard_normal((2, 5, ours.in_features), np.float32)
        given = torch.from_numpy(x)
    with torch.no_grad():
        expected = theirs(given)
    if isinstance(base, nn.Conv2d):
        expected = expected.permute(0, 2, 3, 1)
    return np.asarray(ours(jnp.asarray(x))), expected.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_an_architecture(name: str, tmp_path: Path) -> None:
    make, inputs, targets, fields = MODELS[name]
    inputs = {key: one.float() if one.is_floating_point() else one for key, one in inputs.items()}
    config = peft.LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=targets, **fields)
    model = peft.get_peft_model(base(make).float(), config)
    theirs = perturbed(model).eval()
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)

    ours = load_adapter(in_flax(base(make).float()), tmp_path / "theirs")

    adapted = dict(theirs.base_model.model.named_modules())
    layers = [(path, one) for path, one in nnx.iter_modules(ours) if isinstance(one, DoRALayer)]
    magnitudes = [one for one in tensors_of(tmp_path / "theirs") if "magnitude" in one]
    assert len(layers) == len(magnitudes)
    for seed, (path, layer) in enumerate(layers):
        other: Any = adapted[".".join(map(str, path))]
        found, expected = outputs(other, layer, seed)
        peak = max(1.0, np.abs(expected).max())
        assert np.abs(found - expected).max() <= TOLERANCE * peak, path
    save_adapter(ours, tmp_path / "ours", **fields)
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    again = peft.PeftModel.from_pretrained(base(make).float(), tmp_path / "ours")
    assert (output(again, inputs) - output(theirs, inputs)).abs().max() <= TOLERANCE
