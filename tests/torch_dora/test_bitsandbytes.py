"""bitsandbytes' Linear4bit under adapters, against an fp64 oracle and PEFT."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from bitsandbytes.nn import modules as bnb
from peft import PeftModel
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import torch_dora
from parity.sides.torch import processes
from tests.torch_dora.quantised_layers import (
    Summed,
    adapter,
    assert_compiles,
    assert_norm_agrees,
    assert_projection_agrees,
)
from torch_dora.layers import dora_layers
from torch_dora.ops import dora_linear, factored_norm, quantised

SCALE, RANK, SHAPE = 0.7, 5, (32, 192)
RULE = torch_dora.DoRARule("all-linear", 4, 8)
KINDS = [("nf4", True, 64), ("nf4", False, 128), ("fp4", False, 64)]


def linear4bit(
    qtype="nf4",
    nested=True,
    blocksize=64,
    shape=SHAPE,
    dtype=torch.float32,
    storage=torch.uint8,
):
    out, width = shape
    made = bnb.Linear4bit(width, out, compute_dtype=dtype, quant_type=qtype)
    rng = np.random.default_rng(0)
    made.bias = nn.Parameter(torch.tensor(rng.normal(size=out), dtype=dtype))
    made.weight = bnb.Params4bit(
        torch.tensor(rng.normal(size=shape) / 14, dtype=dtype),
        blocksize=blocksize,
        compress_statistics=nested,
        quant_type=qtype,
        quant_storage=storage,
        module=made,
    )
    return made.to("cpu")


def model4bit(dtype=torch.bfloat16, storage=torch.uint8):
    shapes = ((64, 192), (192, 64))
    made = (linear4bit(shape=shape, dtype=dtype, storage=storage) for shape in shapes)
    return nn.Sequential(*made)


def meant(weight):
    """What the codes and scales stand for, in fp64."""
    state, packed = weight.quant_state, weight.data.numpy().reshape(-1)
    scales = state.absmax
    if state.nested:
        blocks = state.state2.absmax.double().numpy()
        spread = np.repeat(blocks, state.state2.blocksize)[: scales.numel()]
        scales = state.state2.code.double().numpy()[scales.numpy()] * spread
        scales = scales + state.offset.double().numpy()
    codes = np.stack([packed >> 4, packed & 15], 1).reshape(-1, state.blocksize)
    levels = state.code.double().numpy()[codes]
    return (levels * np.asarray(scales, np.float64)[:, None]).reshape(state.shape)


def trained(model):
    """Gives every adapter numbers as training would."""
    rng = np.random.default_rng(3)
    for layer in model:
        layer.lora_b.data.copy_(torch.tensor(rng.normal(size=layer.lora_b.shape) / 9))
        growth = torch.tensor(1 + 0.1 * rng.normal(size=layer.magnitude.shape))
        layer.magnitude.data.mul_(growth.to(layer.magnitude.device))
    return model


def rows(width, count=14, dtype=torch.float32):
    return torch.tensor(np.random.default_rng(2).normal(size=(count, width)), dtype=dtype)


@pytest.mark.parametrize("height", [1, 7, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_projection_and_gradients(kind, height, monkeypatch):
    monkeypatch.setattr(quantised, "BLOCK_BYTES", height * 16 * SHAPE[1])
    layer, (a, b) = linear4bit(*kind), adapter(*SHAPE)
    exact = meant(layer.weight)
    np.testing.assert_allclose(
        quantised.dense(quantised.as_matrix(layer.weight), torch.float32),
        exact,
        rtol=1e-6,
        atol=1e-7,
    )
    for implementation in ("eager", "triton"):
        assert_norm_agrees(layer.weight, exact, a, b, SCALE, implementation)
    assert_projection_agrees(layer.weight, exact, layer.bias.detach(), a, b, SCALE)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compilers are theirs
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_agrees_on_a_gpu(kind):
    layer, (a, b) = linear4bit(*kind), adapter(*SHAPE)
    exact = meant(layer.weight)
    layer.to("cuda")
    for implementation in ("eager", "triton"):
        assert_norm_agrees(layer.weight, exact, a, b, SCALE, implementation)
    assert_projection_agrees(layer.weight, exact, layer.bias.detach(), a, b, SCALE)
    model = trained(torch_dora.apply_dora(nn.Sequential(layer), RULE))
    assert_compiles(model, rows(SHAPE[1]).to("cuda"))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@torch.compiler.set_stance("force_eager")  # bitsandbytes would compile for ten seconds
def test_a_weight_without_rows_or_columns_or_of_odd_rows():
    for out, width in ((0, 64), (64, 0), (5, 3)):
        weight = linear4bit(shape=(out, width)).weight
        a, b = torch.ones(RANK, width), torch.ones(out, RANK)
        y = dora_linear(rows(width), weight, a, b, torch.ones(out), SCALE)
        assert y.shape == (14, out)
        if width % 2:
            with pytest.raises(NotImplementedError, match=r"\(5, 3\): .* an even number of them"):
                factored_norm(weight, a, b, SCALE, implementation="triton")
        else:
            norm = factored_norm(weight, a, b, SCALE, implementation="triton")
            assert torch.equal(norm, torch.zeros(out))


def test_a_model_is_adapted_trained_and_merged():
    base, x = model4bit(), rows(192, dtype=torch.bfloat16)
    plain, wide = base(x), base(x.float())
    model = torch_dora.apply_dora(copy.deepcopy(base), RULE)
    torch.testing.assert_close(model(x), plain, rtol=1e-2, atol=1e-2)
    # As Linear4bit: in its compute_dtype, and the result in x's.
    assert model(x.float()).dtype == wide.dtype == torch.float32
    trained(model)(x).float().square().sum().backward()
    assert all(layer.lora_a.grad.abs().max() > 0 for layer in model)
    merged, report = torch_dora.merge_dora(model, return_report=True)
    assert [type(layer) for layer in merged] == [nn.Linear] * 2
    assert merged[0].weight.dtype == torch.bfloat16
    assert report.layers[0].change > 0
    torch.testing.assert_close(merged(x), model(x), rtol=3e-2, atol=3e-2)
    assert torch.equal(torch_dora.remove_dora(model)(x), plain)


def test_dropout_of_the_input_too():
    rule = dataclasses.replace(RULE, dropout=0.5, dropout_mode="input")
    model = trained(torch_dora.apply_dora(nn.Sequential(linear4bit()), rule))
    plain = nn.Linear(SHAPE[1], SHAPE[0])
    plain.weight = nn.Parameter(torch.tensor(meant(model[0].weight), dtype=torch.float32))
    dense = torch_dora.apply_dora(nn.Sequential(plain), rule)
    results = []
    for one in (model, dense):
        for name in ("bias", "lora_a", "lora_b", "magnitude"):
            getattr(one[0], name).data = getattr(model[0], name).data.clone()
        x = rows(SHAPE[1]).requires_grad_()
        leaves = x, one[0].bias.requires_grad_(), one[0].lora_a, one[0].lora_b, one[0].magnitude
        torch.manual_seed(0)
        results.append(torch.autograd.grad(one(x).square().sum(), leaves))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-3)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compilers are theirs
def test_compiled_layers_are_one_graph():
    dropping = torch_dora.DoRARule(r"layers\.1", 4, 8, dropout=0.5, dropout_mode="input")
    model = torch_dora.apply_dora(Summed([linear4bit(), linear4bit()]), [dropping, RULE])
    assert [layer.dropout for layer in trained(model.layers)] == [0, 0.5]
    assert_compiles(model, rows(192))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")  # torch 2.11's
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of checks of shapes
def test_a_trace_computes_what_the_layer_does():
    model = trained(torch_dora.apply_dora(model4bit(torch.float32), RULE))
    traced = torch.jit.trace(model, rows(192))
    torch.testing.assert_close(traced(rows(192, count=3)), model(rows(192, count=3)))


# torch 2.11 about the buffer that it loads a program from.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_an_exported_program_computes_what_the_layer_does(tmp_path):
    model = trained(torch_dora.apply_dora(model4bit(torch.float32), RULE))
    torch.export.save(torch.export.export(model, (rows(192),)), tmp_path / "model.pt2")
    exported = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(exported(rows(192)), model(rows(192)))


def test_peft_reads_the_folder_and_computes_the_same(tmp_path):
    x = rows(192)
    model = trained(torch_dora.apply_dora(model4bit(torch.float32), RULE))
    torch_dora.peft.save_adapter(model, tmp_path)
    base = model4bit(torch.float32)
    base.is_loaded_in_4bit, base.config = True, {}
    # In evaluation Linear4bit puts its weight into another order for CPUs, which PEFT misreads.
    by_peft = PeftModel.from_pretrained(base, str(tmp_path)).train()
    torch.testing.assert_close(model(x), by_peft(x), rtol=1e-5, atol=1e-4)
    loaded = torch_dora.peft.load_adapter(model4bit(torch.float32), tmp_path)
    assert torch.equal(loaded(x), model(x))
    bank = torch_dora.AdapterBank(model4bit(torch.float32), slots=2, max_rank=4).load(1, tmp_path)
    mixed = torch_dora.with_bank(model4bit(torch.float32), bank, [1, -1])(x[:2, None])
    torch.testing.assert_close(mixed[0], model(x[:1]), rtol=1e-5, atol=1e-4)
    assert torch.equal(mixed[1:], model4bit(torch.float32)(x[:2, None])[1:])


def test_a_model_of_transformers_is_trained_merged_and_loaded_again(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    plain = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    plain.save_pretrained(tmp_path / "base")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    base = LlamaForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=config, device_map="cpu"
    ).train()
    ids = torch.arange(12).reshape(2, 6)
    before = base(ids).logits
    model = torch_dora.apply_dora(base, RULE)
    torch.testing.assert_close(model(ids).logits, before)
    assert isinstance(model.model.layers[0].mlp.up_proj, torch_dora.DoRALinear)
    trained([layer for _, layer in dora_layers(model)])
    merged = torch_dora.merge_dora(model)
    merged.save_pretrained(tmp_path / "merged")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-2, atol=1e-3)


def test_a_state_has_the_scales():
    model, x = trained(torch_dora.apply_dora(model4bit(), RULE)), rows(192, dtype=torch.bfloat16)
    other = torch_dora.apply_dora(model4bit(), RULE)
    other[0].weight.data.zero_()
    other[0].weight.quant_state.absmax.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_layer_whose_state_is_assigned_or_that_is_unpickled():
    model, x = trained(torch_dora.apply_dora(model4bit(), RULE)), rows(192, dtype=torch.bfloat16)
    assigned = torch_dora.apply_dora(model4bit(), RULE)
    assigned[0].weight.data.zero_()
    assigned.load_state_dict(model.state_dict(), assign=True)
    for other in (assigned, pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        plain = torch_dora.remove_dora(copy.deepcopy(model))
        assert torch.equal(torch_dora.remove_dora(other)(x), plain(x))


def sharded_by_fsdp(folder, storage):
    """Holds a model whose codes lie in several processes to what it computes in one."""
    torch.manual_seed(0)
    model = trained(torch_dora.apply_dora(model4bit(torch.float32, storage), RULE)).train()
    x = rows(192)
    y = model(x)
    leaves = {name: one for name, one in model.named_parameters() if one.requires_grad}
    wanted = torch.autograd.grad(y.square().sum(), list(leaves.values()))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert torch.equal(model(x), y)
    model(x).square().sum().backward()
    for name, gradient in zip(leaves, wanted, strict=True):
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, gradient)
    with pytest.raises(NotImplementedError, match=r"DTensor of quantised parts.*freeze before"):
        torch_dora.norms(model)
    with pytest.raises(
        NotImplementedError, match=r"0\.weight, codes of 4 bits.*before fully_shard"
    ):
        model.load_state_dict(torch_dora.apply_dora(model4bit(torch.float32), RULE).state_dict())
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    assert get_model_state_dict(model, options=options).keys() == leaves.keys()
    torch_dora.peft.save_adapter(model, folder)
    for _, layer in dora_layers(model):
        nn.init.zeros_(layer.lora_b)
    assert not torch.equal(model(x), y)
    torch_dora.peft.load_adapter(model, folder)
    assert torch.equal(model(x), y)


@pytest.mark.slow
@pytest.mark.parametrize("storage", [torch.uint8, torch.float32])
def test_fsdp_gathers_the_codes(tmp_path, storage):
    processes.run(sharded_by_fsdp, 2, "cpu", str(tmp_path / "adapter"), storage)


def test_what_is_not_as_it_was_quantised_is_refused():
    with pytest.raises(
        TypeError, match=r"'0' cannot .* not quantised yet; move its layer to a dev"
    ):
        torch_dora.apply_dora(nn.Sequential(bnb.Linear4bit(64, 32)), RULE)
    base = nn.Sequential(bnb.Linear8bitLt(64, 32, has_fp16_weights=False))
    with pytest.raises(ValueError, match=r"leaves out (.|\n)*0 \(Linear8bitLt\)"):
        torch_dora.apply_dora(base, RULE)
    with pytest.raises(TypeError, match=r"cannot be adapted(.|\n)*0 \(Linear8bitLt\)"):
        torch_dora.apply_dora(base, torch_dora.DoRARule("0", 2, 4))
    model = torch_dora.apply_dora(model4bit(), RULE)
    model[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(NotImplementedError, match=r"another order.*load the model again"):
        model(rows(192))
