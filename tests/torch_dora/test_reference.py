"""Without its adapters, an adapted model is its base model bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import modules as bnb
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers.pytorch_utils import Conv1D

import torch_dora
from tests.torch_dora.adapters import Experts, trained
from tests.torch_dora.peft_folders import IDS, base, llama, output, peft_folder, qwen3
from torch_dora import DoRARule, apply_dora, disable_adapters

LAYERS: dict[str, Any] = {
    "linear": (lambda: nn.Linear(6, 8), torch.randn(5, 6)),
    "conv": (lambda: nn.Conv1d(6, 8, 3), torch.randn(2, 6, 9)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), torch.randn(2, 4, 5, 5)),
    "conv1d": (lambda: Conv1D(8, 6), torch.randn(5, 6)),
    "embedding": (lambda: nn.Embedding(9, 8), torch.arange(8).reshape(2, 4)),
    "experts": (Experts, torch.randn(3, 5, 6)),
    "4 bits": (
        lambda: bnb.Linear4bit(64, 8, compute_dtype=torch.bfloat16).to("cpu"),
        torch.randn(5, 64),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_layer_is_its_base(kind: str, frozen: bool) -> None:
    make, x = LAYERS[kind]
    plain = nn.Sequential(make())
    model = trained(apply_dora(copy.deepcopy(plain), DoRARule(".*", rank=2, alpha=4)))
    if frozen:
        torch_dora.freeze(model)
    adapted = model(x)
    with disable_adapters(model):
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), adapted)
    with torch.no_grad(), disable_adapters(model.eval()):
        model(x)
    assert torch.equal(model(x), adapted)
    # A replaced tensor, as load_state_dict(assign=True) replaces it.
    [(name, _), *_] = plain.named_parameters()
    other = nn.Sequential(make())
    model.load_state_dict({name: other.state_dict()[name]}, strict=False, assign=True)
    if kind != "4 bits":
        plain.load_state_dict({name: other.state_dict()[name]}, strict=False)
        with disable_adapters(model):
            assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("make", [llama, qwen3])
def test_gradients_are_the_base_models(make: Any) -> None:
    plain = base(make)
    model = trained(apply_dora(base(make), DoRARule(".*_proj|.*embed_tokens", 4, 8)))
    x = plain.get_input_embeddings()(IDS).detach()
    found = []
    for one in (plain, model):
        leaf = x.clone().requires_grad_()
        with disable_adapters(model):
            one(inputs_embeds=leaf).logits.square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
    assert not any(p.grad is not None for p in model.parameters())


def test_the_adapters_are_on_again_after_errors_and_nested_statements() -> None:
    model = trained(apply_dora(nn.Sequential(nn.Linear(6, 8)), DoRARule("0", 2, 4)))
    x = torch.randn(5, 6)
    adapted = model(x)
    with pytest.raises(RuntimeError, match="stop"), disable_adapters(model):  # noqa: PT012
        with disable_adapters(model):
            assert not torch.equal(model(x), adapted)
        assert not torch.equal(model(x), adapted)
        raise RuntimeError("stop")
    assert torch.equal(model(x), adapted)


def test_recomputation_happens_inside() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    model = trained(apply_dora(copy.deepcopy(plain), DoRARule("0", 2, 4)))
    x = torch.randn(5, 6, requires_grad=True)
    [want] = torch.autograd.grad(plain(x).sum(), x)
    for reentrant in (False, True):
        with disable_adapters(model):
            y: Any = checkpoint(model, x, use_reentrant=reentrant)
            y.sum().backward()
        assert torch.equal(x.grad, want)
        x.grad = None
    with disable_adapters(model):
        y = checkpoint(model, x, use_reentrant=False)
    with pytest.raises(CheckpointError):
        y.sum().backward()


@pytest.mark.ci
# torch 2.11's compiler uses what 2.11 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_torch_compile() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    model = trained(apply_dora(copy.deepcopy(plain), DoRARule(".*", 2, 4)))
    x = torch.randn(5, 6)
    adapted = model(x)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), adapted)
    with disable_adapters(model):
        assert torch.equal(compiled(x), plain(x))
    torch.testing.assert_close(compiled(x), adapted)


def test_what_a_folder_has_replaced_is_refused(tmp_path: Path) -> None:
    folder, theirs = peft_folder(tmp_path, llama, target_modules=["q_proj"])
    model = torch_dora.peft.load_adapter(base(llama), folder)
    theirs.eval()
    with disable_adapters(model), theirs.disable_adapter():
        assert torch.equal(output(model), output(theirs))
    folder, _ = peft_folder(
        tmp_path / "norm", llama, target_modules=["q_proj"], modules_to_save=["norm"]
    )
    torch_dora.peft.load_adapter(model, folder)
    with (
        pytest.raises(
            NotImplementedError,
            match=rf"reference:\n  (.|\n)*  model\.norm\.weight, from {folder}$",
        ),
        disable_adapters(model),
    ):
        pass


def test_what_has_no_adapter_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="Linear has no DoRA layer"),
        disable_adapters(nn.Linear(3, 3)),
    ):
        pass
