"""Which convolutions PEFT adapts as a DoRA layer, by PEFT itself, and that both packages take them
all and no others."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from torch import nn

import jax_dora
import torch_dora
from tests.torch_dora.peft_folders import perturbed

POSITIONS = 12

# Of a torch.nn.Conv1d(4, 6, ...) and of the nnx.Conv that computes the same.
ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "strided": ({"kernel_size": 3, "stride": 2, "padding": 2}, {"strides": 2, "padding": 2}),
    "dilated, of one position": (
        {"kernel_size": 1, "dilation": 3},
        {"kernel_size": 1, "kernel_dilation": 3, "padding": "VALID"},
    ),
    "circular, of one position": (
        {"kernel_size": 1, "padding": "same", "padding_mode": "circular"},
        {"kernel_size": 1, "padding": "CIRCULAR"},
    ),
    "circular, not padded": (
        {"kernel_size": 3, "padding_mode": "circular"},
        {"padding": "VALID"},
    ),
    "circular, valid": (
        {"kernel_size": 3, "padding": "valid", "padding_mode": "circular"},
        {"padding": [(0, 0)]},
    ),
}
OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "grouped": ({"groups": 2}, {"feature_group_count": 2}, "2 groups"),
    "dilated": (
        {"dilation": 2, "padding": 2},
        {"kernel_dilation": 2, "padding": 2},
        r"dilation \(2,\)",
    ),
    "dilated, padded to the same size": (
        {"dilation": 2, "padding": "same"},
        {"kernel_dilation": 2},
        r"dilation \(2,\)",
    ),
    "circular": (
        {"padding": "same", "padding_mode": "circular"},
        {"padding": "CIRCULAR"},
        "circular padding",
    ),
    "reflected": (
        {"padding": "same", "padding_mode": "reflect"},
        {"padding": "REFLECT"},
        "reflect padding",
    ),
}


class Flax(nnx.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        options = {"kernel_size": 3} | settings
        self.conv = nnx.Conv(4, 6, rngs=nnx.Rngs(0), **options)

    def __call__(self, x):
        return self.conv(x)


def torch_model(settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.conv = nn.Conv1d(4, 6, **({"kernel_size": 3} | settings))
    model.forward = model.conv.forward
    return model


def flax_model(settings: dict[str, Any], theirs: nn.Module) -> Flax:
    """With the weights of `torch_model`."""
    model = Flax(settings)
    model.conv.kernel[...] = jnp.asarray(theirs.conv.weight.detach().numpy().transpose(2, 1, 0))
    model.conv.bias[...] = jnp.asarray(theirs.conv.bias.detach().numpy())
    return model


def adapted_by_peft(settings: dict[str, Any]) -> Any:
    model = torch_model(settings)
    model.forward = lambda x: model.conv(x)
    config = peft.LoraConfig(r=4, lora_alpha=6, use_dora=True, target_modules=["conv"])
    return perturbed(peft.PeftModel(model, config)).eval()


def batch() -> torch.Tensor:
    return torch.randn(2, 4, POSITIONS, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("case", ADAPTED)
def test_what_peft_adapts_so_do_both_packages(case: str, tmp_path: Path) -> None:
    in_torch, in_flax = ADAPTED[case]
    theirs = adapted_by_peft(in_torch)
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(batch()).numpy()
        # As a DoRA layer: its weight could be merged.
        merged = theirs.merge_and_unload()(batch()).numpy()
    np.testing.assert_allclose(merged, expected, atol=1e-5, rtol=0)

    base = torch_model(in_torch)
    ours = flax_model(in_flax, base)
    model = torch_dora.peft.load_adapter(base, tmp_path / "theirs")
    model.forward = lambda x: model.conv(x)
    with torch.no_grad():
        found = model.eval()(batch()).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    ours = jax_dora.peft.load_adapter(ours, tmp_path / "theirs")
    found = np.asarray(ours(jnp.asarray(batch().numpy().swapaxes(1, 2)))).swapaxes(1, 2)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)

    torch_dora.peft.save_adapter(model, tmp_path / "torch")
    jax_dora.peft.save_adapter(ours, tmp_path / "jax")
    tensors = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    for folder in ("torch", "jax"):
        again = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert again.keys() == tensors.keys()
        for key, tensor in tensors.items():
            np.testing.assert_array_equal(again[key], tensor)


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups:UserWarning")
@pytest.mark.parametrize("case", OTHERWISE)
def test_what_is_no_dora_layer_in_peft_is_refused(case: str, tmp_path: Path) -> None:
    in_torch, in_flax, told = OTHERWISE[case]
    theirs = adapted_by_peft(in_torch)
    theirs.save_pretrained(tmp_path)
    # PEFT cannot run it, or not merge it, or its merged weight computes something else.
    with torch.no_grad():
        try:
            adapter = theirs(batch())
            merged = theirs.merge_and_unload()(batch())
        except (RuntimeError, NotImplementedError):
            pass
        else:
            assert (adapter - merged).abs().max() > 0.1

    base = torch_model(in_torch)
    before = base.conv
    with pytest.raises(NotImplementedError, match=f"conv has {told}"):
        torch_dora.peft.load_adapter(base, tmp_path)
    assert base.conv is before
    flax = flax_model(in_flax, base)
    with pytest.raises(NotImplementedError, match=f"conv has {told}"):
        jax_dora.peft.load_adapter(flax, tmp_path)
    torch_dora.apply_dora(base, torch_dora.DoRARule("conv", 4, 4))
    with pytest.raises(NotImplementedError, match=f"conv has {told}"):
        torch_dora.peft.save_adapter(base, tmp_path / "a")
    refuses_to_save(flax, told, tmp_path / "a")


def refuses_to_save(model: Flax, told: str, folder: Path) -> None:
    model = jax_dora.apply_dora(model, jax_dora.DoRARule("conv", 4, 4), rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match=f"conv has {told}"):
        jax_dora.peft.save_adapter(model, folder)
    assert not folder.exists()


def test_input_dilation_is_refused(tmp_path: Path) -> None:
    refuses_to_save(Flax({"input_dilation": 2}), "input dilation", tmp_path / "a")


def test_no_weight_holds_what_peft_adds_to_a_grouped_convolution() -> None:
    """lora_A reads every channel, so that one of a group moves the outputs of the others."""
    with pytest.warns(UserWarning, match="groups > 1"):
        model = adapted_by_peft({"groups": 2})
    x = batch().requires_grad_()
    model(x)[:, :3].sum().backward()
    others = x.grad[:, 2:]
    assert others.abs().min() > 0


def test_causal_padding_is_zeros_before_the_input(tmp_path: Path) -> None:
    theirs = adapted_by_peft({})
    theirs.save_pretrained(tmp_path)
    model = flax_model({"padding": "CAUSAL"}, torch_model({}))
    model = jax_dora.peft.load_adapter(model, tmp_path)
    with torch.no_grad():
        expected = theirs(nn.functional.pad(batch(), (2, 0))).numpy()
    found = np.asarray(jax.jit(model)(jnp.asarray(batch().numpy().swapaxes(1, 2)))).swapaxes(1, 2)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_a_magnitude_per_input_feature_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """LyCORIS's default: `dora_scale` [1, in], which for as many outputs has PEFT's very shape."""
    rngs = nnx.Rngs(0)
    layer = nnx.Conv(4, 4, (3,), rngs=rngs) if kind == "conv" else nnx.Linear(4, 4, rngs=rngs)
    base = nnx.Dict(q=layer)
    adapted = jax_dora.apply_dora(base, jax_dora.DoRARule("q", 2, 4.0), rngs=rngs)
    jax_dora.peft.save_adapter(adapted, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    ones = (1,) * (kind == "conv")
    tensors = {
        key.replace("lora_magnitude_vector", "dora_scale"): array.reshape(1, 4, *ones)
        if "magnitude" in key
        else array
        for key, array in load_file(file).items()
    }
    save_file(tensors, file)

    told = r"q\.dora_scale has shape \[1, 4.*LyCORIS's shape for a magnitude per input"
    with pytest.raises(ValueError, match=told):
        jax_dora.peft.load_adapter(base, tmp_path)
    theirs = nn.Module()
    theirs.q = nn.Conv1d(4, 4, 3, padding="same") if kind == "conv" else nn.Linear(4, 4)
    with pytest.raises(ValueError, match=told):
        torch_dora.peft.load_adapter(theirs, tmp_path)
