"""Mixtures of experts of transformers: adapted whole, without a change of their code."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

import torch_dora
from dora_common.hyperparameters import ADAPTER_NAMES
from parity.tolerances.caps import COSINE
from tests.tables import thinned
from tests.torch_dora.adapters import trained
from tests.torch_dora.architectures import DECODER, IDS, base, of, output
from torch_dora import DoRARule, apply_dora, merge_dora, remove_dora
from torch_dora.layers import DoRAExperts, dora_layers
from torch_dora.peft import load_adapter, save_adapter

TOLERANCE = 1e-6
MOE = DECODER | {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
NO_HEADS = {name: size for name, size in DECODER.items() if name != "head_dim"}
LATENT = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 2,
}
MAMBA = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}
JETMOE = {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", DECODER | {"num_local_experts": 4}),
    "Qwen3MoE": ("Qwen3Moe", MOE | {"num_experts": 4}),
    "gpt-oss": ("GptOss", MOE | {"num_local_experts": 4}),
    "DeepSeek-V3": ("DeepseekV3", {n: v for n, v in MOE.items() if n != "head_dim"} | LATENT),
    "Llama4": ("Llama4", DECODER | {"num_local_experts": 4, "intermediate_size_mlp": 24}),
    "Jamba": ("Jamba", NO_HEADS | MAMBA),
    "JetMoE": ("JetMoe", NO_HEADS | JETMOE),
}
# These have one way to multiply by their experts.
ONE_WAY = ("Llama4", "JetMoE")
CASES = [
    (family, way)
    for family in FAMILIES
    for way in ("eager", "batched_mm", "grouped_mm")
    if way == "eager" or family not in ONE_WAY
]
QUICK = [("Mixtral", "eager"), ("Mixtral", "grouped_mm"), ("gpt-oss", "batched_mm")]
# Mamba reads the weight of dt_proj and never calls it.
RULE = DoRARule("all-linear", 3, 4.0, adapter_dtype=torch.float64)


def family(name: str, way: str = "eager") -> nn.Module:
    kind, sizes = FAMILIES[name]
    config = f"{kind}{'Text' * (name == 'Llama4')}Config"
    model = base(of(f"{kind}ForCausalLM", config, **sizes, experts_implementation=way))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # transformers leaves some experts uninitialised
                parameter.normal_(std=0.2)
    return model.requires_grad_(False)


def rule_of(name: str) -> DoRARule:
    exclude = r".*\.dt_proj" if name == "Jamba" else None
    return DoRARule("all-linear", 3, 4.0, adapter_dtype=torch.float64, exclude=exclude)


def materialised(model: nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Every adapted weight by the definition, by the parameter's name in the base model, and the
    adapters' tensors that they are computed of."""
    leaves, weights = {}, {}
    for name, layer in dora_layers(model):
        a, b, m = (
            getattr(layer, one).detach().double().clone().requires_grad_()
            for one in ("lora_a", "lora_b", "magnitude")
        )
        leaves |= {f"{name}.lora_a": a, f"{name}.lora_b": b, f"{name}.magnitude": m}
        is_packed = isinstance(layer, DoRAExperts)
        is_in_out = is_packed and layer.is_transposed
        weight = layer.weight.detach().double()
        direction = (weight.mT if is_in_out else weight) + layer.scale * b @ a
        merged = m[..., None] * direction / direction.detach().norm(dim=-1, keepdim=True)
        merged = merged.mT if is_in_out else merged
        weights[name if is_packed else f"{name}.weight"] = merged
    return weights, leaves


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{one}": getattr(layer, one)
        for name, layer in dora_layers(model)
        for one in ADAPTER_NAMES
    }


def gradients(logits: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad(logits, [*leaves.values()], cotangent.to(logits.dtype))
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize(("name", "way"), thinned(CASES, QUICK))
def test_a_mixture_computes_the_definition(name: str, way: str) -> None:
    plain = family(name)
    adapted = trained(apply_dora(family(name, way), rule_of(name)))
    coverage = torch_dora.coverage(adapted)
    assert all(row.status != "adaptable" for row in coverage.weights if "experts" in row.path)
    assert coverage.share("adapted") > 0.8
    weights, leaves = materialised(adapted)
    exact = torch.func.functional_call(plain, weights, (IDS,), {"use_cache": False}).logits
    expected = gradients(exact, leaves)
    assert (exact - output(plain, {"input_ids": IDS})).abs().max() > 0.1
    own = parameters(adapted)
    assert sum(one.requires_grad for one in adapted.parameters()) == len(own) == len(leaves)
    if way != "grouped_mm":
        logits = adapted(IDS, use_cache=False).logits
        found = gradients(logits, own)
        assert (logits - exact).abs().max() <= TOLERANCE * exact.abs().max()
        for one, value in expected.items():
            assert (found[one] - value).abs().max() <= TOLERANCE * value.abs().max(), one
        return
    # torch has no grouped product in fp64.
    logits = adapted.float()(IDS, use_cache=False).logits
    found = gradients(logits, own)
    pairs = [(found[one], value) for one, value in expected.items()]
    for one, value in [(logits, exact), *pairs]:
        cosine = torch.cosine_similarity(one.flatten().double(), value.flatten(), dim=0)
        assert cosine >= COSINE["float32"]


@pytest.mark.parametrize("name", thinned(FAMILIES, ["gpt-oss"]))
def test_a_mixture_is_merged_restored_and_stored(name: str, tmp_path: Any) -> None:
    inputs = {"input_ids": IDS}
    model = family(name)
    state, plain = copy.deepcopy(model.state_dict()), output(model, inputs)
    trained(apply_dora(model, rule_of(name)))
    expected = output(model, inputs)
    assert (expected - plain).abs().max() > 0.1
    merged = merge_dora(model)
    assert merged.state_dict().keys() == state.keys()
    assert (output(merged, inputs) - expected).abs().max() <= TOLERANCE
    assert torch.equal(output(torch_dora.freeze(copy.deepcopy(model)), inputs), expected)

    save_adapter(model, tmp_path / "adapter", for_peft=False)
    again = load_adapter(family(name), tmp_path / "adapter")
    assert torch.equal(output(again, inputs), expected)
    assert {type(layer) for _, layer in dora_layers(again)} == {
        type(layer) for _, layer in dora_layers(model)
    }
    # Over the adapter that is there, too.
    assert torch.equal(output(load_adapter(again, tmp_path / "adapter"), inputs), expected)
    assert torch.equal(output(remove_dora(model), inputs), plain)
    assert model.state_dict().keys() == state.keys()


# transformers cannot checkpoint JetMoE.
@pytest.mark.parametrize("name", thinned([n for n in FAMILIES if n != "JetMoE"], ["Mixtral"]))
def test_checkpointing_changes_no_gradient(name: str) -> None:
    model = trained(apply_dora(family(name), rule_of(name))).train()
    leaves = parameters(model)
    expected = gradients(model(IDS, use_cache=False).logits, leaves)
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    found = gradients(model(IDS, use_cache=False).logits, leaves)
    for one, value in expected.items():
        assert torch.equal(found[one], value), one


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_peft_reads_and_writes_lora_of_experts(name: str, tmp_path: Any) -> None:
    inputs, experts = {"input_ids": IDS}, r"model\.layers\.\d\.mlp\.experts|.*\.q_proj"
    rule = DoRARule(experts, 2, 3.0, adapter_dtype=torch.float64)
    model = trained(apply_dora(family(name), rule))
    with pytest.raises(NotImplementedError, match=r"use_dora=True for packed experts.*for_peft=F"):
        save_adapter(model, tmp_path / "none")
    for _, layer in dora_layers(model):
        layer.reset_magnitude()
    save_adapter(model, tmp_path / "ours", use_dora=False)
    theirs: Any = peft.PeftModel.from_pretrained(family(name), tmp_path / "ours")
    expected = output(theirs, inputs)
    assert (output(model, inputs) - expected).abs().max() <= TOLERANCE
    assert (output(family(name), inputs) - expected).abs().max() > 1e-3
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_adapter(family(name), tmp_path / "theirs")
    assert (output(again, inputs) - expected).abs().max() <= TOLERANCE


def test_lora_of_experts_that_peft_swaps_is_refused(tmp_path: Any) -> None:
    model = apply_dora(family("Llama4"), DoRARule(r".*\.experts", 2, 3.0))
    match = "exchanged; expected use_dora=True"
    with pytest.raises(NotImplementedError, match=match):
        save_adapter(model, tmp_path / "ours", use_dora=False)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"])
    theirs: Any = peft.get_peft_model(family("Llama4"), config)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(NotImplementedError, match=match):
        load_adapter(family("Llama4"), tmp_path / "theirs")


def test_generation_by_a_mixture() -> None:
    model = trained(apply_dora(family("Mixtral"), RULE)).eval()
    merged = merge_dora(model)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), merged.generate(IDS, **options))
