"""`to_lora`: the best LoRA of a DoRA adapter, against NumPy's SVD in fp64 and PEFT."""

import copy

import numpy as np
import peft
import pytest
import torch
from torch import nn

from parity import oracle
from tests.torch_dora.adapters import Experts, trained
from tests.torch_dora.peft_folders import IDS, Convolutions, base, gpt2, llama
from tests.torch_dora.test_adapt import ALL, Mixed
from tests.torch_dora.test_adapt import IDS as MIXED_IDS
from tests.torch_dora.test_bitsandbytes import linear4bit
from tests.torch_dora.test_quantised import linear as ao_linear
from torch_dora import DoRARule, apply_dora, to_lora
from torch_dora.layers import dora_layers
from torch_dora.ops.quantised import as_matrix, dense
from torch_dora.peft import load_adapter, save_adapter


def change_of(layer) -> np.ndarray:
    """Returns W' - W of a layer's matrices [n, out, in], in fp64."""
    weight, *pair = layer.matrices()
    weight = dense(as_matrix(weight), torch.float32)
    stacks = [one.reshape(-1, *one.shape[-2:]) for one in (weight, *pair)]
    magnitudes = layer.magnitude.reshape(len(stacks[0]), -1)
    return np.stack(
        [
            np.asarray(oracle.merged_weight(w, a, b, m, layer.scale) - oracle.fp64(w))
            for w, a, b, m in zip(*stacks, magnitudes, strict=True)
        ]
    )


@torch.no_grad()
def assert_best(model, rank, *, tolerance=1e-5):
    """Holds every layer's LoRA, and the report, to the singular values of W' - W in fp64."""
    lora, report = to_lora(model, rank, limit=1.0)
    found = dict(dora_layers(lora))
    assert [row.path for row in report.layers] == [name for name, _ in dora_layers(model)]
    for row, (name, layer) in zip(report.layers, dora_layers(model), strict=True):
        new, change = found[name], change_of(layer)
        assert type(new) is type(layer)
        assert (new.rank, new.scale) == (rank, 1)
        assert torch.equal(new.norm(), new.magnitude)
        of_matrix = new.matrices()[1].shape[-2]
        a, b = (one.reshape(-1, *one.shape[-2:]).double().numpy() for one in new.matrices()[1:])
        values = np.linalg.svd(change, compute_uv=False)
        norms = np.linalg.norm(change, axis=(1, 2))
        errors = np.linalg.norm(values[:, of_matrix:], axis=1) / norms
        off = np.linalg.norm(b @ a - change, axis=(1, 2)) / norms
        np.testing.assert_allclose(off, errors, atol=tolerance)
        assert row.error == pytest.approx(errors.max(), abs=tolerance)
    return lora, report


def test_every_kind_of_layer():
    model = trained(apply_dora(Mixed(), ALL))
    expected = model(MIXED_IDS)
    lora, report = assert_best(model, 2)
    assert max(row.error for row in report.layers) > 0.2
    assert torch.equal(model(MIXED_IDS), expected)
    assert lora.again is lora.blocks[0]
    assert lora.norm.weight.data_ptr() == model.norm.weight.data_ptr()
    # Of full rank, and above that of some layers, a LoRA is all that the adapter is.
    torch.testing.assert_close(assert_best(model, 16)[0](MIXED_IDS), expected)


def test_packed_experts_each_have_their_own():
    model = trained(apply_dora(Experts(), DoRARule("down_proj", 2, 4)))
    x = torch.randn(3, 4, 6)
    assert_best(model, 3)
    torch.testing.assert_close(to_lora(model, 6, limit=0)[0](x), model(x))


@pytest.mark.parametrize(
    "make",
    [linear4bit, lambda: ao_linear("int8"), lambda: ao_linear("nf4")],
    ids=["bnb", "int8", "nf4"],
)
def test_a_quantised_base_stays_as_it_is(make):
    model = trained(apply_dora(nn.Sequential(make()), DoRARule("0", 5, 8)))
    layer = model[0]
    lora, _ = assert_best(model, 7)
    assert type(lora[0].weight) is type(layer.weight)
    x = torch.randn(3, layer.in_features)
    full, _ = to_lora(model, min(layer.in_features, layer.out_features), limit=0)
    torch.testing.assert_close(full(x), model(x), rtol=1e-3, atol=1e-3)


def test_a_bf16_base():
    model = trained(apply_dora(nn.Sequential(nn.Linear(24, 40).bfloat16()), DoRARule("0", 5, 8)))
    assert_best(model, 4)


def test_a_tied_head_stays_tied():
    model = trained(apply_dora(base(gpt2), DoRARule(".*wte", 4, 8)))
    lora, _ = to_lora(model, 8, limit=1)
    assert lora.lm_head.weight is lora.transformer.wte.weight


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (llama, DoRARule("all-linear", 4, 8)),
        (
            gpt2,
            [
                DoRARule(r".*c_attn|.*c_fc", 4, 8, use_rslora=True),
                DoRARule(".*wte", 2, 1, use_rslora=True),
            ],
        ),
        (Convolutions, DoRARule("embed|conv|image|volume|score.0", 3, 4)),
    ],
    ids=["llama", "gpt2", "convolutions"],
)
@torch.no_grad()
def test_peft_loads_what_is_saved_and_computes_the_same(make, rules, tmp_path):
    model = trained(apply_dora(base(make), rules))
    lora, _ = to_lora(model, 2, limit=1)
    with pytest.raises(ValueError, match=r"use_dora is False .* or to_lora for a DoRA adapter"):
        save_adapter(model, tmp_path / "no", use_dora=False)
    save_adapter(lora, tmp_path / "lora", use_dora=False)
    theirs = peft.PeftModel.from_pretrained(base(make), tmp_path / "lora").eval()
    assert not theirs.peft_config["default"].use_dora
    found, expected, full = (getattr(one(IDS), "logits", one(IDS)) for one in (theirs, lora, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, full, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        getattr(load_adapter(base(make), tmp_path / "lora")(IDS), "logits", expected), expected
    )


def test_a_layer_above_the_limit_is_refused_and_the_named_rank_does():
    model = trained(apply_dora(base(llama), DoRARule(".*q_proj|.*down_proj", 4, 8)))
    with pytest.raises(ValueError, match="at least") as error:
        to_lora(model, 2, limit=0.1)
    needed = int(str(error.value).partition("at least ")[2].partition(",")[0])
    _, report = to_lora(model, needed, limit=0.1)
    assert all(row.error <= 0.1 for row in report.layers)
    with pytest.raises(ValueError, match=r"self_attn.q_proj: error 0"):
        to_lora(model, needed - 1, limit=0.1)


def test_what_is_not_finite_or_has_no_adapter_is_refused():
    with pytest.raises(ValueError, match="no DoRA layer"):
        to_lora(Mixed(), 2, limit=1)
    model = trained(apply_dora(Mixed(), ALL))
    broken = copy.deepcopy(model)
    broken.blocks[0].magnitude.data[3] = float("nan")
    with pytest.raises(ValueError, match=r"the change of blocks.0 by its adapter holds NaN"):
        to_lora(broken, 2, limit=1)
    with pytest.raises(ValueError, match="rank is 3 and the convolution has 2 groups"):
        to_lora(model, 3, limit=1)
    with pytest.raises(TypeError, match="limit is None"):
        to_lora(model, 2, limit=None)


def test_a_small_change_is_not_lost_beside_the_weight():
    layer = apply_dora(nn.Sequential(nn.Linear(48, 32)), DoRARule("0", 2, 2))[0]
    with torch.no_grad():
        layer.lora_b.normal_(std=1e-7)
        layer.reset_magnitude()
    # The change is a few ulps of the weight: g(W + sBA) - W has hardly a digit of it.
    expected = layer.scale * layer.lora_b.double() @ layer.lora_a.double()
    torch.testing.assert_close(layer.weight_change().double(), expected, rtol=1e-5, atol=1e-12)
