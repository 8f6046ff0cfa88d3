"""The layers of a live PeftModel compute by torch_dora; everything else about them stays PEFT's."""

import contextlib
import copy
import io
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torchao.quantization as torchao
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from bitsandbytes.nn import modules as bnb
from peft.tuners.lora import dora, variants
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from parity import tolerances
from parity.sides.torch import processes
from tests.tables import ci
from tests.torch_dora.peft_folders import (
    IDS,
    Convolutions,
    assert_same,
    base,
    gpt2,
    llama,
    output,
    perturbed,
    tensors_of,
)
from tests.torch_dora.test_trainer import losses, trainer
from torch_dora.ops import plan
from torch_dora.peft import accelerate, restore
from torch_dora.peft import variants as of_torch_dora

pytestmark = pytest.mark.filterwarnings(
    # PEFT, transformers and bitsandbytes about their own.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning",
    "ignore:Already unmerged:UserWarning",
    "ignore:LoRA adapter added to ConvNd layer with groups:UserWarning",
    "ignore:TorchaoLoraLinear was instantiated without:UserWarning",
)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {"target_modules": "all-linear"}),
    "dropout": (llama, {"target_modules": "all-linear", "lora_dropout": 0.3}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"], "use_rslora": True}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2 dropout": (
        gpt2,
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_dropout": 0.3},
    ),
    "conv": (Convolutions, {"target_modules": ["conv", "image", "volume", "embed", "0"]}),
    "conv dropout": (Convolutions, {"target_modules": ["conv", "image"], "lora_dropout": 0.3}),
}


def config(**fields: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**({"r": 4, "lora_alpha": 6, "use_dora": True} | fields))


def peft_model(name: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    make, fields = MODELS[name]
    return perturbed(peft.get_peft_model(base(make).to(dtype), config(**fields), **options))


def both(model: Any) -> tuple[Any, Any]:
    """PEFT's model and an accelerated copy of it, all of whose layers are taken."""
    ours = copy.deepcopy(model)
    report = accelerate(ours)
    assert report.accelerated
    assert not report.left
    return model, ours


def results(model: Any, autocast: bool = False) -> dict[str, Tensor]:
    """The result and the gradients, in training."""
    model.train().zero_grad()
    torch.manual_seed(3)
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        y = model(IDS.to(device))
    y = y if isinstance(y, Tensor) else y.logits
    y.float().square().mean().backward()
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: one.detach().double().cpu() for name, one in ({"y": y} | named).items()}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    return {n: float((found[n] - w).norm() / w.norm().clamp(min=1e-6)) for n, w in wanted.items()}


def assert_agree(ours: Any, theirs: Any, **options: Any) -> None:
    assert max(distance(results(ours, **options), results(theirs, **options)).values()) < 2e-4


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's norm, which forms BA, raises."""

    def get_lora_weight(*_: Any, **__: Any) -> None:
        raise AssertionError("PEFT computed BA")

    for kind in (dora.DoraLinearLayer, dora.DoraEmbeddingLayer, dora._DoraConvNdLayer):
        monkeypatch.setattr(kind, "get_lora_weight", get_lora_weight)


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_pefts(name: str, device: str) -> None:
    theirs, ours = both(peft_model(name).to(device))
    if device == "cpu" or "dropout" not in name:  # a GPU's masks depend on the kernel
        assert_agree(ours, theirs)
    torch.testing.assert_close(output(ours.cpu()), output(theirs.cpu()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_forms_the_product(name: str, no_products: None) -> None:
    model = peft_model(name)
    with pytest.raises(AssertionError, match="computed BA"):
        results(model)
    accelerate(model)
    results(model)
    for layer in model.modules():  # and PEFT's own loop over adapters calls torch_dora, too
        vars(layer).pop("forward", None)
    results(model)


@pytest.fixture
def direct_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which calls go the direct way. On a CPU its kernels are interpreted."""
    found: list[bool] = []
    find, takes = plan.find, plan._takes

    def counted(*arguments: Any, **named: Any) -> Any:
        found.append((chosen := find(*arguments, **named)) is not None)
        return chosen

    def on_a_cpu(tensors: Any, scale: float, dtype: torch.dtype, name: str | None) -> bool:
        return takes(tensors, scale, dtype, name if tensors[0].is_cuda else "triton")

    monkeypatch.setattr(plan, "_PLANS", {})
    monkeypatch.setattr(plan, "find", counted)
    monkeypatch.setattr(plan, "_takes", on_a_cpu)
    return found


class SameMask(nn.Module):
    """A dropout whose mask is the same in every dtype."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) > 0.3
        return torch.where(kept.to(x.device), x / 0.7, 0)


@pytest.mark.parametrize("name", ["llama", "dropout", "gpt2 dropout"])
@pytest.mark.parametrize(("wide", "autocast"), [(True, True), (True, False), (False, False)])
def test_direct_calls_are_as_near_to_fp64_as_pefts(
    name: str, wide: bool, autocast: bool, direct_calls: list[bool], device: str
) -> None:
    model = peft_model(name, torch.bfloat16, autocast_adapter_dtype=wide).to(device)
    if "dropout" in name:
        for layer in lora_layers(model):
            layer.lora_dropout["default"] = SameMask()
    theirs, ours = both(model)
    exact = results(copy.deepcopy(theirs).double())
    peak = max(distance(results(theirs, autocast), exact).values())
    floor = 4 * tolerances.unit_roundoff("bfloat16")
    assert max(distance(results(ours, autocast), exact).values()) <= 2 * peak + floor
    assert direct_calls
    assert all(direct_calls)


# PEFT's convolutions refuse fp32 adapters without autocast.
@pytest.mark.parametrize(
    ("name", "wide", "autocast"),
    [
        *itertools.product(["llama"], [True, False], [True, False]),
        *((name, both, both) for name in ("embedding", "gpt2", "conv") for both in (True, False)),
    ],
)
def test_half_precision_is_as_near_to_fp64_as_pefts(
    name: str, wide: bool, autocast: bool, device: str
) -> None:
    model = peft_model(name, torch.bfloat16, autocast_adapter_dtype=wide).to(device)
    theirs, ours = both(model)
    exact = results(copy.deepcopy(theirs).double())
    peak = max(distance(results(theirs, autocast), exact).values())
    floor = 4 * tolerances.unit_roundoff("bfloat16")
    assert max(distance(results(ours, autocast), exact).values()) <= 2 * peak + floor


def test_everything_else_stays_pefts(tmp_path: Path) -> None:
    """Adapters of several kinds, switched, active together, merged, disabled, deleted and saved."""
    theirs, ours = both(peft_model())
    for model in (theirs, ours):
        torch.manual_seed(1)
        model.add_adapter("plain", config(target_modules="all-linear", use_dora=False))
        # New layers, and a second DoRA adapter on the old ones.
        model.add_adapter("more", config(r=2, target_modules=["embed_tokens", "q_proj", "lm_head"]))
        perturbed(model, 5)
    kinds = {type(v) for layer in lora_layers(ours) for v in layer.lora_variant.values()}
    assert not kinds & {variants.DoraLinearVariant, variants.DoraEmbeddingVariant}

    def assert_same_output() -> None:
        torch.testing.assert_close(output(ours), output(theirs), atol=1e-5, rtol=1e-4)

    for active in ("plain", "more", ["default", "more"], ["default", "plain"], "default"):
        for model in (theirs, ours):
            model.base_model.set_adapter(active)
        assert_same_output()
    for model in (theirs, ours):
        model.base_model.merge_adapter(safe_merge=True)
    assert torch.equal(output(ours), output(theirs))
    for model in (theirs, ours):
        model.base_model.unmerge_adapter()
    assert_same_output()
    with theirs.disable_adapter(), ours.disable_adapter():
        assert torch.equal(output(ours), output(theirs))
    for model in (theirs, ours):
        model.delete_adapter("more")
        model.set_adapter("default")
    assert_same_output()
    assert_same(ours.state_dict(), theirs.state_dict())
    for model, folder in ((theirs, "theirs"), (ours, "ours")):
        model.save_pretrained(tmp_path / folder, save_embedding_layers=False)
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    with pytest.raises(ValueError, match="adapter_names` when DoRA"):
        ours(IDS, adapter_names=["default", "plain"])
    assert torch.equal(output(ours.merge_and_unload()), output(theirs.merge_and_unload()))


def lora_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_variant")]


def test_restored_layers_compute_as_before() -> None:
    theirs, ours = both(peft_model("embedding"))
    restore(ours)
    assert [vars(module).keys() for module in ours.modules()] == [
        vars(module).keys() for module in theirs.modules()
    ]
    ours.add_adapter("more", config(target_modules=["q_proj"]))
    for layer in lora_layers(ours):
        for variant in layer.lora_variant.values():
            assert type(variant).__module__ == "peft.tuners.lora.variants"
    wanted, found = results(theirs), results(ours)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_accelerated_models_of_their_own(how: str, no_products: None) -> None:
    model = peft_model("dropout")
    accelerate(model)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert_agree(copied, model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.fill_(0)
    assert output(copied).abs().max() == 0 < output(model).abs().max()
    copied.add_adapter("more", config(target_modules=["embed_tokens"]))
    assert not any("more" in layer.lora_variant for layer in lora_layers(model))


# What is done to a layer between two calls.
CHANGES: dict[str, Any] = {
    "scaling": lambda layer: layer.scaling.update(default=2.5),
    "weight in place": lambda layer: layer.base_layer.weight.data.mul_(1.5),
    "weight": lambda layer: replace(layer.base_layer),
    "no bias": lambda layer: setattr(layer.base_layer, "bias", None),
    "lora_A": lambda layer: replace(layer.lora_A["default"]),
    "lora_B": lambda layer: layer.lora_B.update({"default": copy.deepcopy(layer.lora_B["more"])}),
    "magnitude": lambda layer: layer.lora_magnitude_vector["default"].weight.data.mul_(1.5),
    "frozen": lambda layer: layer.lora_magnitude_vector.requires_grad_(False),
    "dropout": lambda layer: layer.lora_dropout.update({"default": nn.Dropout(0.4)}),
    "dropout in place": lambda layer: layer.lora_dropout.update({"default": nn.Dropout(0.4, True)}),
    "adapter": lambda layer: layer.set_adapter("more"),
    "dtype": lambda layer: layer.double(),
}


def replace(module: Any) -> None:
    weight = module.weight
    module.weight = nn.Parameter(1.5 * weight.detach(), requires_grad=weight.requires_grad)


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_calls_are_seen(name: str) -> None:
    plain = nn.Sequential(nn.Embedding(40, 6), nn.Linear(6, 5), nn.Linear(5, 4)).eval()
    options = config(target_modules=["1", "2"])
    theirs: Any = peft.get_peft_model(plain, options)
    theirs.add_adapter("more", options)
    theirs, ours = both(perturbed(theirs))
    before = results(ours)
    for model in (theirs, ours):
        for layer in lora_layers(model):
            CHANGES[name](layer)
        model.to(lora_layers(model)[0].base_layer.weight.dtype)
    assert_agree(ours, theirs)
    after = results(ours)
    if name != "dtype":
        assert before.keys() != after.keys() or max(distance(after, before).values()) > 1e-3


@pytest.mark.parametrize("part", ["base_layer", "lora_A", "lora_B", "lora_magnitude_vector"])
def test_hooks_of_parts_run(part: str) -> None:
    _, ours = both(peft_model())
    layer, seen = lora_layers(ours)[0], []
    output(ours)
    module = getattr(layer, part)
    module = module if part == "base_layer" else module["default"]
    module.register_forward_hook(lambda *_: seen.append(part))
    is_left = part != "base_layer"
    warned = pytest.warns(UserWarning, match="has hooks") if is_left else contextlib.nullcontext()
    with warned:
        output(ours)
    assert seen


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_biases_of_adapters_are_left_to_peft(part: str) -> None:
    theirs, ours = both(peft_model())
    for model in (theirs, ours):
        linear = getattr(lora_layers(model)[0], part)["default"]
        linear.bias = nn.Parameter(torch.linspace(1, 2, linear.out_features))
    with pytest.warns(UserWarning, match="its Linear has a bias"):
        found = output(ours)
    torch.testing.assert_close(found, output(theirs))


@pytest.mark.parametrize("how", ["autocast", "hooks"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bases_that_are_stored_in_fp8(how: str, dropout: float) -> None:
    """By hooks as those of diffusers' layerwise casting."""

    def cast(dtype: torch.dtype) -> Any:
        return lambda module, *_: setattr(module.weight, "data", module.weight.data.to(dtype))

    dtype = torch.float32 if how == "autocast" else torch.bfloat16
    options = config(target_modules=["0", "1"], lora_dropout=dropout)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), options)
    model = perturbed(model.to(dtype))
    x = torch.randn(2, 6, dtype=dtype)
    for layer in lora_layers(model):
        cast(torch.float8_e4m3fn)(layer.base_layer)
        if how == "hooks":
            layer.base_layer.register_forward_pre_hook(cast(torch.bfloat16))
            layer.base_layer.register_forward_hook(cast(torch.float8_e4m3fn))
    found = []
    for one in both(model):
        for is_training in (True, False):
            torch.manual_seed(3)
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                found.append(one.train(is_training)(x))
    torch.testing.assert_close(found[2:], found[:2], rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("name", ["llama", "dropout", "conv"])
def test_flops_are_counted_in_either_pass_of_a_checkpoint(name: str, no_products: None) -> None:
    """The counter's hooks of all modules are there in one of two forward passes."""
    _, ours = both(peft_model(name))
    for parts in ([True, False], [False, True]):
        forward, backward = (
            FlopCounterMode(display=False) if counted else contextlib.nullcontext()
            for counted in parts
        )
        with forward as flops:
            y = checkpoint(ours.train(), IDS, use_reentrant=False)
            y = y if isinstance(y, Tensor) else y.logits
        with backward as more:
            y.square().mean().backward()
        assert (flops or more).get_total_flops() > 0


def test_hooks_of_all_modules_run() -> None:
    """As profilers and other tools register them; here one that changes the adapters' results."""
    theirs, ours = both(peft_model())
    seen: list[list[str]] = []

    def hook(module: nn.Module, _: Any, y: Tensor) -> Tensor | None:
        seen[-1].append(type(module).__name__)
        return 2 * y if isinstance(module, nn.Linear) and module.out_features == 4 else None

    handle = register_module_forward_hook(hook)
    try:
        seen.append([])
        found = [results(theirs)]
        seen.append([])
        with pytest.warns(UserWarning, match="hooks of all modules"):
            found.append(results(ours))
    finally:
        handle.remove()
    assert max(distance(*found).values()) < 2e-4
    assert seen[0] == seen[1]


def test_weights_that_are_no_parameters_in_the_backward_pass() -> None:
    """As FSDP sets them, whose parameters are flat: checkpointing must save the same tensors."""
    theirs, ours = both(peft_model())
    wanted = results(theirs)
    torch.manual_seed(3)
    y = checkpoint(ours.train(), IDS, use_reentrant=False).logits
    weights = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    for layer in lora_layers(ours):
        for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
            vars(part["default"])["weight"] = part["default"]._parameters.pop("weight")
    y.square().mean().backward()
    found = {"y": y.detach().double()} | {n: p.grad.double() for n, p in weights.items()}
    assert max(distance(found, wanted).values()) < 2e-4


class OtherVariant(variants.DoraLinearVariant):
    pass


def test_layers_that_are_left_to_peft_are_listed() -> None:
    model = nn.Sequential(
        *(nn.Linear(6, 6) for _ in range(5)), nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 6, 1, groups=2)
    )
    model = peft.get_peft_model(model, config(r=2, target_modules=[*"01234", "6"]))
    perturbed(model)
    theirs = copy.deepcopy(model)
    layers: Any = model.base_model.model
    layers[1].lora_A["default"].register_forward_hook(lambda *_: None)
    layers[2].lora_B["default"] = nn.Sequential(layers[2].lora_B["default"])
    layers[2].lora_B["default"].weight = layers[2].lora_B["default"][0].weight
    layers[3].lora_variant["default"] = OtherVariant()
    layers[4].ephemeral_gpu_offload = True
    report = accelerate(model)
    assert report.accelerated == ("base_model.model.0",)
    for at, reason in {
        1: "its Linear is wrapped by itself or has hooks",
        2: "its Sequential is wrapped",
        3: "a variant of its own, OtherVariant",
        4: "ephemeral_gpu_offload",
        6: "grouped convolution",
    }.items():
        assert reason in report.left[f"base_model.model.{at}"]
    assert "1 DoRA layers, and PEFT computes 5:" in str(report)
    layers[4].ephemeral_gpu_offload = False
    x = torch.randn(3, 6)
    torch.testing.assert_close(model(x), theirs(x))


def gradients(model: Any, x: Tensor) -> dict[str, Tensor]:
    """The result and the gradients of the adapters, in training."""
    model.train().zero_grad()
    torch.manual_seed(3)
    y = model(x)
    y.square().sum().backward()
    named = ((n, p.grad) for n, p in model.named_parameters())
    return {"y": y.detach()} | {name: grad for name, grad in named if grad is not None}


@pytest.mark.parametrize("mode", ["circular", "reflect"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_other_padding_than_zeros_is_left_to_peft(mode: Any, dropout: float) -> None:
    """After dropout PEFT's magnitude corrects a product of an input that is padded with zeros."""
    plain = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1, padding_mode=mode))
    options = config(target_modules=["0"], lora_dropout=dropout)
    theirs = perturbed(peft.get_peft_model(plain, options))
    ours = copy.deepcopy(theirs)
    assert f"with {mode} padding" in accelerate(ours).left["base_model.model.0"]
    x = torch.randn(2, 4, 7)
    assert max(distance(gradients(ours, x), gradients(theirs, x)).values()) < 2e-4


def test_convolutions_of_one_example() -> None:
    """PEFT fails or adds an axis."""
    plain = nn.Sequential(nn.Conv1d(4, 6, 3), nn.Unflatten(-2, (1, 6)), nn.Conv2d(1, 3, 2))
    _, ours = both(perturbed(peft.get_peft_model(plain, config(target_modules=["0", "2"]))))
    x = torch.randn(4, 7)
    torch.testing.assert_close(ours(x), ours(x[None])[0])


@pytest.mark.parametrize("kind", ["linear", "embedding", "convolution"])
def test_scalings_that_are_tensors_are_left_to_peft(kind: str) -> None:
    """As PEFT's prepare_model_for_compiled_hotswap makes them; they may be trained."""
    made: dict[str, tuple[nn.Module, Tensor]] = {
        "linear": (nn.Linear(6, 5), torch.randn(3, 6)),
        "embedding": (nn.Embedding(9, 6), torch.randint(0, 9, (3, 4))),
        "convolution": (nn.Conv1d(6, 5, 2), torch.randn(3, 6, 4)),
    }
    plain, x = made[kind]
    model = peft.get_peft_model(nn.Sequential(plain), config(target_modules=["0"]))
    theirs, ours = both(perturbed(model))
    scales = [torch.tensor(0.7, requires_grad=True) for _ in range(2)]
    for one, scale in zip((theirs, ours), scales, strict=True):
        lora_layers(one)[0].scaling["default"] = scale
    wanted = gradients(theirs, x) | {"scale": scales[0].grad}
    with pytest.warns(UserWarning, match="its scaling is a Tensor"):
        found = gradients(ours, x) | {"scale": scales[1].grad}
    assert max(distance(found, wanted).values()) < 2e-4


def test_bases_with_a_call_of_their_own() -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * super().__call__(x)

    plain = nn.Sequential(Doubled(6, 5))
    theirs, ours = both(perturbed(peft.get_peft_model(plain, config(target_modules=["0"]))))
    x = torch.randn(3, 6)
    assert max(distance(gradients(ours, x), gradients(theirs, x)).values()) < 2e-4


def test_layers_with_hooks_compile_to_one_program() -> None:
    """PEFT's convolutions do, too, and not its linear layers."""
    plain = nn.Sequential(nn.Conv1d(4, 6, 3))
    _, ours = both(perturbed(peft.get_peft_model(plain, config(target_modules=["0"]))))
    lora_layers(ours)[0].lora_A["default"].register_forward_hook(lambda _, __, y: 2 * y)
    x = torch.randn(2, 4, 7)
    with pytest.warns(UserWarning, match="has hooks"):
        wanted = ours(x)
    compiled: Any = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_checkpointed_layers_compile_to_one_program() -> None:
    """PEFT's do not, since each call empties its cache of norms."""
    plain = nn.Sequential(nn.Embedding(9, 6), nn.Conv1d(5, 4, 2))
    theirs, ours = both(perturbed(peft.get_peft_model(plain, config(target_modules=["0", "1"]))))
    ids = torch.randint(0, 9, (3, 5))
    wanted = gradients(theirs, ids)

    def call(ids: Tensor) -> Any:
        return checkpoint(ours.train(), ids, use_reentrant=False)

    torch.compile(call, backend="aot_eager", fullgraph=True)(ids).square().sum().backward()
    found = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert max(distance({"y": ours(ids).detach()} | found, wanted).values()) < 2e-4


def test_restored_layers_keep_accelerates_hooks() -> None:
    theirs, ours = both(peft_model())
    for layer in lora_layers(ours):
        add_hook_to_module(layer, ModelHook())
    restore(ours)
    assert torch.equal(output(ours), output(theirs))
    remove_hook_from_submodules(ours)
    assert torch.equal(output(ours), output(theirs))


def test_wrong_models_are_refused() -> None:
    with pytest.raises(TypeError, match=r"peft_model is a str; expected a peft\.PeftModel"):
        accelerate("model")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"Linear has 0 LoRA layers of PEFT, none with a DoRA"):
        accelerate(nn.Linear(2, 2))
    plain = peft.get_peft_model(base(llama), config(use_dora=False, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"2 LoRA layers .*use_dora=True"):
        accelerate(plain)


def test_wrong_inputs_raise_pefts_errors() -> None:
    theirs, ours = both(peft_model("llama", torch.bfloat16))
    for model in (theirs, ours):
        layer = next(layer for layer in lora_layers(model))
        with pytest.raises(RuntimeError, match="same dtype"):
            layer(torch.ones(2, 24))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            layer(torch.ones(2, 23, dtype=torch.bfloat16))


@pytest.mark.parametrize("error", [TypeError, ValueError, NotImplementedError])
@pytest.mark.parametrize("name", ["llama", "dropout"])
def test_errors_of_torch_dora_reach_the_caller(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = both(peft_model(name))

    def fail(*_: Any, **__: Any) -> None:
        raise error("an error of torch_dora")

    for function in ("dora_linear", "corrected_linear"):
        monkeypatch.setattr(of_torch_dora, function, fail)
    with pytest.raises(error, match="an error of torch_dora"):
        results(ours)


def test_layers_that_are_refused_later_are_warned_of_once() -> None:
    _, ours = both(peft_model())
    first, second, third = lora_layers(ours)[:3]
    for layer in (first, second):
        layer.lora_A["default"].register_forward_hook(lambda *_: None)
    third.ephemeral_gpu_offload = True
    with pytest.warns(UserWarning, match="PEFT computes the accelerated layer") as seen:
        torch.stack([output(ours), output(ours)])
    texts = [str(one.message) for one in seen]
    assert len(texts) == 2
    assert "q_proj, adapter 'default': its Linear is wrapped by itself or has hooks" in texts[0]
    assert "v_proj, adapter 'default': ephemeral_gpu_offload moves its tensors" in texts[1]
    assert len(accelerate(ours).left) == 3
    output(ours)  # without a warning: the report names them


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(6, 6), nn.Conv1d(6, 6, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x.unsqueeze(2)).squeeze(2))


def test_what_no_report_told_is_warned_of() -> None:
    model: Any = peft.get_peft_model(Grouped(), config(target_modules=["linear"]))
    accelerate(model)
    model.add_adapter("more", config(target_modules=["linear", "conv"]))
    x = torch.randn(2, 6)
    model.set_adapter("more")
    with pytest.warns(
        UserWarning, match=r"layer conv, adapter 'more': .*grouped convolution"
    ) as seen:
        model(x)
    assert seen[0].filename == __file__
    layer = model.base_model.model.linear
    layer.lora_A["default"].register_forward_hook(lambda *_: None)
    assert len(accelerate(model).left) == 2
    for adapter in ("more", "default"):  # without a warning
        model.add_adapter(f"with {adapter}", config(target_modules=["linear"]))
        model.set_adapter(adapter)
        model(x)
    layer.ephemeral_gpu_offload = True
    model.set_adapter("more")
    with pytest.warns(UserWarning, match=r"layer .*linear, adapter 'more': ephemeral_gpu_offload"):
        layer.lora_variant["more"].forward(layer, "more", x, layer.base_layer(x))


def test_norms_are_cached_while_pefts_caching_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = both(peft_model("embedding"))
    caches = [m._dora_cache for m in ours.modules() if hasattr(m, "_dora_cache")]
    wanted = output(theirs)
    with peft.helpers.DoraCaching():
        torch.testing.assert_close(output(ours), wanted, atol=1e-5, rtol=1e-4)
        assert all(caches)
        kept = [list(cache.values()) for cache in caches]
        output(ours)
        for cache, old in zip(caches, kept, strict=True):
            assert all(a is b for a, b in zip(cache.values(), old, strict=True))
        results(ours)
        assert not any(caches)
        output(ours)
        assert all(caches)
    output(ours)
    assert not any(caches)


def quantised(kind: str) -> Any:
    """A model whose weights bitsandbytes or torchao has quantised, with PEFT's adapter."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    if kind == "torchao":
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig(version=2))
    else:
        for at, linear in enumerate(model):
            out, width = linear.weight.shape
            if kind == "4bit":
                new: Any = bnb.Linear4bit(width, out, compute_dtype=torch.float32)
            else:
                new = bnb.Linear8bitLt(width, out, has_fp16_weights=False, threshold=6.0)
            new.load_state_dict(linear.state_dict())
            model[at] = new.to("cpu")
        setattr(model, f"is_loaded_in_{kind}", True)
    return perturbed(peft.get_peft_model(model, config(target_modules=["0", "1"])))


@pytest.mark.parametrize("kind", ["4bit", "8bit", "torchao"])
@pytest.mark.filterwarnings("ignore:MatMul8bitLt", "ignore:.*inputs will be cast from")
def test_quantised_bases(kind: str, no_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = quantised(kind)
    monkeypatch.undo()
    theirs = quantised(kind)
    assert not accelerate(ours).left
    x = torch.randn(3, 64)
    found = []
    for model in (theirs, ours):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found.append(
            {"y": y.detach()}
            | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        )
    assert max(distance(*found).values()) < 2e-4


@pytest.mark.parametrize("way", [ci("compiled"), "checkpointed"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compilers_and_checkpoints(way: str) -> None:
    made = peft_model()
    if way == "compiled":
        del made.base_model.model.model.layers[1:]
    theirs, ours = both(made)
    if way == "compiled":
        ours.compile(fullgraph=True, backend="aot_eager")
    else:
        for model in (theirs, ours):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": True})
    assert_agree(ours, theirs)


def test_replicas_of_data_parallel_compute_with_their_own_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies for two devices, whose tensors are twice the model's on the second one."""

    def copied(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[Any]:
        return [[(1 + device) * one.clone() for one in tensors] for device in devices]

    module = sys.modules["torch.nn.parallel.replicate"]  # torch.nn.parallel names its function so
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copied)
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    theirs, ours = both(peft_model())
    wanted, found = (nn.parallel.replicate(model, [0, 1]) for model in (theirs, ours))
    for want, got in zip(wanted, found, strict=True):
        torch.testing.assert_close(output(got), output(want), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(output(found[0]), output(found[1]))
    restore(ours)
    assert not any("forward" in vars(module) for module in ours.modules())


def wrapped(kind: str) -> float:
    """Steps of an accelerated model under DDP or FSDP, with gradient checkpointing, compared with
    PEFT's in one process."""
    theirs, ours = both(peft_model().train())
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    steps: list[list[Tensor]] = []
    for model in (theirs, ours):
        is_ours = model is ours
        whole = model
        if is_ours and kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif is_ours and kind == "fsdp1":
            device = torch.device("cpu")
            model = FullyShardedDataParallel(model, use_orig_params=True, device_id=device)
        elif is_ours:
            for layer in model.base_model.model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        for _ in range(2):
            rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
            ids = IDS[rank::count] if is_ours else IDS
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(model):
            tensors = [p for p in whole.parameters() if p.requires_grad]
            steps.append([getattr(p, "full_tensor", p.clone)().detach() for p in tensors])
    pairs = zip(*steps, strict=True)
    return max(float((a - b).norm() / b.norm()) for b, a in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_wrapped_in_several_processes(kind: str) -> None:
    assert processes.run(wrapped, 2, "cpu", kind) < 1e-4


@pytest.mark.ci
def test_trainer_accumulates_saves_and_resumes_as_with_peft(tmp_path: Path) -> None:
    found = {}
    for kind in ("theirs", "ours"):
        model = peft_model("llama")
        if kind == "ours":
            accelerate(model)
        run = trainer(model, tmp_path / kind, callback=transformers.TrainerCallback())
        run.train()
        resumed = peft_model("llama")
        if kind == "ours":
            accelerate(resumed)
        again = trainer(resumed, tmp_path / kind, callback=transformers.TrainerCallback())
        again.train(resume_from_checkpoint=str(tmp_path / kind / "checkpoint-2"))
        found[kind] = losses(run), losses(again), tensors_of(tmp_path / kind / "checkpoint-4")
    np.testing.assert_allclose(found["ours"][0], found["theirs"][0], rtol=1e-4)
    np.testing.assert_allclose(found["ours"][1], found["ours"][0], rtol=1e-4)
    for name, tensor in found["theirs"][2].items():
        torch.testing.assert_close(found["ours"][2][name], tensor, atol=1e-4, rtol=1e-3)


PROGRAM = """
import pickle, sys
import peft
from torch import nn
class Model(nn.Sequential): pass
config = peft.LoraConfig(use_dora=True, target_modules=["0"])
model = peft.get_peft_model(Model(nn.Linear(4, 4)), config)
pickle.dumps(model)
print(sys.argv[1:], __name__, type(model.base_model.model[0].lora_variant["default"]).__module__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"]])
def test_a_program_that_nobody_edits(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", "-m", "torch_dora.accelerate"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, *how, "--steps", "3"],
        cwd=tmp_path,
        env={"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['--steps', '3'] __main__ torch_dora.peft.variants\n"
    assert "torch_dora computes 1 DoRA layers" in done.stderr
    done = subprocess.run(command, env={"PYTHONPATH": root}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "usage: python -m torch_dora.accelerate" in done.stderr
