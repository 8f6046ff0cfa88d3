"""`apply_dora`, `remove_dora` and `merge_dora` on torch models."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.torch_dora.adapters import trained
from torch_dora import (
    DoRAConv,
    DoRAConv1D,
    DoRAEmbedding,
    DoRALayer,
    DoRALinear,
    DoRARule,
    apply_dora,
    merge_dora,
    remove_dora,
)


class Mixed(nn.Module):
    """Every layer that can be adapted, some in containers, one shared, and one that cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.ReLU()])
        self.named = nn.ModuleDict({"gate": nn.Linear(8, 8, bias=False)})
        self.norm = nn.LayerNorm(8)
        self.again = self.blocks[0]

    def forward(self, ids):
        x = self.conv(self.embed(ids).mT).mT
        x = self.blocks[1](self.blocks[0](self.norm(x))) + self.again(x)
        return x * self.named["gate"](x)


ALL = [DoRARule("conv", 2, 4.0), DoRARule(r"embed|blocks\.0|named\.gate", 3, 4.0)]
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 12]])


def test_every_layer_is_found_and_a_fresh_adapter_changes_no_bit():
    # Frozen from the start: torch multiplies by a weight that requires a gradient another way.
    model = Mixed().requires_grad_(False)
    expected = model(IDS)
    before = dict(model.named_parameters())
    adapted = apply_dora(model, ALL)
    assert adapted is model
    assert type(model.embed) is DoRAEmbedding
    assert type(model.conv) is DoRAConv
    assert type(model.blocks[0]) is DoRALinear
    assert model.again is model.blocks[0]
    assert type(model.named["gate"]) is DoRALinear
    assert torch.equal(model(IDS), expected)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    trained = {name for name, p in after.items() if p.requires_grad}
    assert trained == after.keys() - before.keys()


def test_removing_gives_the_base_back_exactly():
    model = Mixed().requires_grad_(False)
    layers, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    expected = model(IDS)
    trained(apply_dora(model, ALL))
    assert not torch.equal(model(IDS), expected)
    assert remove_dora(model) is model
    assert torch.equal(model(IDS), expected)
    assert model.state_dict().keys() == state.keys()
    assert type(model.blocks[0]) is nn.Linear
    assert model.conv is layers["conv"]
    assert model.again is model.blocks[0]


def test_merging_leaves_the_model_and_shares_the_rest():
    model = trained(apply_dora(Mixed(), ALL))
    expected = model(IDS)
    merged = merge_dora(model)
    assert {type(m) for m in merged.modules()} == {type(m) for m in Mixed().modules()}
    torch.testing.assert_close(merged(IDS), expected)
    assert merged.norm.weight.data_ptr() == model.norm.weight.data_ptr()
    assert merged.again is merged.blocks[0]
    assert torch.equal(model(IDS), expected)
    assert type(model.conv) is DoRAConv


def test_casting_what_was_merged_leaves_the_model():
    model = trained(apply_dora(Mixed(), ALL))
    model.named["gate"].bias = model.blocks[0].bias
    expected = model(IDS)
    merged = merge_dora(model)
    assert merged.named["gate"].bias is merged.blocks[0].bias
    merged.half()
    model.blocks[0].merge().half()
    assert merged.norm.weight.dtype == merged.blocks[0].bias.dtype == torch.float16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model(IDS), expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_says_what_it_changed(dtype):
    model = trained(apply_dora(Mixed().to(dtype), ALL))
    merged, report = merge_dora(model, return_report=True)
    assert torch.equal(merged(IDS), merge_dora(model)(IDS))
    assert [row.path for row in report.layers] == ["embed", "conv", "blocks.0", "named.gate"]
    assert [line.split()[0] for line in str(report).splitlines()[1:]] == [
        row.path for row in report.layers
    ]
    for row in report.layers:
        layer = model.get_submodule(row.path)
        w, a, b = (part.double() for part in layer.matrices())
        norm = (w + layer.scale * b @ a).norm(dim=-1, keepdim=True)
        g = layer.magnitude.double().reshape(norm.shape) / norm
        exact = g * (w + layer.scale * b @ a)
        weight = merged.get_submodule(row.path).weight
        stored = (weight.T if row.path == "embed" else weight).reshape(exact.shape)
        off, change = (stored - exact).norm(), (exact - w).norm()
        assert row.dtype == str(dtype).removeprefix("torch.")
        assert row.change == pytest.approx(float(change / w.norm()), rel=1e-4)
        if dtype == torch.float32:
            assert row.rounding == row.lost == row.max_abs == 0
        else:
            assert row.rounding == pytest.approx(float(off / exact.norm()), rel=1e-2)
            assert row.lost == pytest.approx(float(off / change), rel=1e-2)
            assert row.max_abs == pytest.approx(float((stored - exact).abs().max()), rel=1e-2)


def test_gpt2():
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=19, n_positions=8)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[1, 5, 18, 3]])
    expected = model(ids).logits
    apply_dora(model, DoRARule(r"transformer\.h\.\d+\.(attn\.c_attn|mlp\.c_proj)", 4, 8))
    assert type(model.transformer.h[1].attn.c_attn) is DoRAConv1D
    assert torch.equal(model(ids).logits, expected)
    logits = trained(model)(ids).logits
    assert not torch.allclose(logits, expected, atol=1e-3)
    merged = merge_dora(model)
    torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-5)
    assert merged.lm_head.weight is merged.transformer.wte.weight
    assert torch.equal(remove_dora(model)(ids).logits, expected)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("c_attn", None),
        ("wte", "transformer.wte, tied to lm_head"),
        ("lm_head", "lm_head, tied to transformer.wte"),
    ],
)
def test_merged_weights_that_are_no_longer_tied_are_told(name, told, caplog):
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=19, n_positions=8)
    model = trained(apply_dora(GPT2LMHeadModel(config).eval(), DoRARule(f".*{name}", 2, 4)))
    torch.testing.assert_close(merge_dora(model)(IDS).logits, model(IDS).logits)
    # transformers logs what it thinks of so small a configuration, once in a process.
    ours = [one.getMessage() for one in caplog.records if one.name.startswith("torch_dora")]
    assert [one.partition(":\n  ")[2] for one in ours] == ([told] if told else [])


def adapted_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, DoRALayer)]


def test_all_linear_leaves_out_embeddings_and_the_output_head():
    model = Mixed()
    model.output = nn.Linear(8, 3)
    apply_dora(model, [DoRARule("embed", 3, 4.0), DoRARule("all-linear", 2, 4.0)])
    assert adapted_names(model) == ["embed", "blocks.0", "named.gate"]
    with pytest.raises(ValueError, match=r"one adapter at a time.*\n  blocks\.0 \(DoRALinear\)"):
        apply_dora(model, DoRARule("all-linear", 2, 4.0))
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=19, n_positions=8)
    model = apply_dora(GPT2LMHeadModel(config), DoRARule("all-linear", 2, 4.0))
    assert [name.removeprefix("transformer.h.0.") for name in adapted_names(model)] == [
        "attn.c_attn",
        "attn.c_proj",
        "mlp.c_fc",
        "mlp.c_proj",
    ]


def test_all_linear_leaves_out_what_the_model_calls_its_output_embedding():
    model = Mixed()
    model.get_output_embeddings = lambda: model.named["gate"]
    assert adapted_names(apply_dora(model, DoRARule("all-linear", 2, 4.0))) == ["blocks.0"]
    model = Mixed()
    model.get_output_embeddings = lambda: None
    assert len(adapted_names(apply_dora(model, DoRARule("all-linear", 2, 4.0)))) == 2


def test_a_layer_is_a_model_and_dots_match_everything_with_parameters():
    linear = nn.Linear(3, 4)
    layer = apply_dora(linear, DoRARule("", 2, 4))
    assert type(layer) is DoRALinear
    assert layer.weight is linear.weight
    again = remove_dora(layer)
    assert type(again) is nn.Linear
    assert again.weight is linear.weight
    assert again.bias is linear.bias
    model = apply_dora(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), DoRARule(".*", 2, 4))
    assert type(model[0]) is DoRALinear


def test_the_first_match_wins_and_the_rule_reaches_the_layer():
    rules = [
        DoRARule(
            "0",
            3,
            6.0,
            use_rslora=True,
            dropout=0.25,
            dropout_mode="input",
            adapter_dtype=torch.bfloat16,
            implementation="eager",
        ),
        DoRARule(r"\d", 2, 4),
    ]
    first, second = apply_dora(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), rules)
    assert (first.rank, first.scale, first.implementation) == (3, 6 / 3**0.5, "eager")
    assert (first.dropout, first.dropout_mode) == (0.25, "input")
    assert first.lora_a.dtype == torch.bfloat16
    assert second.rank == 2


def test_training_and_moving():
    model = apply_dora(Mixed(), ALL)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = (model(IDS) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    again = apply_dora(Mixed(), ALL)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(IDS), model(IDS))
    model.to(torch.bfloat16)
    assert model(IDS).dtype == torch.bfloat16
    assert remove_dora(model)(IDS).dtype == torch.bfloat16


class Squared(nn.Linear):
    def forward(self, input):
        return super().forward(input) ** 2


@pytest.mark.parametrize(
    ("model", "rules", "error", "match"),
    [
        (
            Mixed(),
            [DoRARule(r"blocks\.0", 2, 4), DoRARule("block", 2, 4)],
            ValueError,
            r"rules\[1\], path 'block', matches no layer.*\n  again\n  blocks\.0\n  conv\n",
        ),
        (
            Mixed(),
            [DoRARule(r"blocks\.\d", 2, 4), DoRARule("again", 2, 4)],
            ValueError,
            r"rules\[1\].*earlier rules take",
        ),
        (
            Mixed(),
            DoRARule(".*", 2, 4),
            TypeError,
            r"Linear, torch.nn.Conv1d.*\n  norm \(LayerNorm\)$",
        ),
        (nn.Sequential(Squared(2, 3)), DoRARule("0", 2, 4), TypeError, r"\n  0 \(Squared\)"),
        (
            nn.Sequential(DoRALinear(2, 3, rank=1, alpha=1)),
            DoRARule("0", 2, 4),
            ValueError,
            r"one adapter at a time.*\n  0 \(DoRALinear\)",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.Conv1d(4, 4, 1, groups=4)),
            DoRARule(r"\d", 2, 4),
            ValueError,
            "'1' cannot be adapted: rank is 2 and the convolution has 4 groups",
        ),
        ([], DoRARule("0", 2, 4), TypeError, "model is a list"),
        (Mixed(), [], ValueError, "rules is empty"),
        (Mixed(), ["conv"], TypeError, r"rules\[0\] is a str"),
    ],
)
def test_refusals_leave_the_model_alone(model, rules, error, match):
    modules = model.modules() if isinstance(model, nn.Module) else []
    before = [type(module) for module in modules]
    with pytest.raises(error, match=match):
        apply_dora(model, rules)
    if before and not any(issubclass(kind, DoRALinear) for kind in before):
        assert [type(module) for module in model.modules()] == before
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_adapted_model_is_refused_without_a_warning(caplog):
    model = apply_dora(nn.Sequential(nn.Linear(3, 4)), DoRARule("all-linear", 2, 4))
    with pytest.raises(ValueError, match="one adapter at a time"):
        apply_dora(model, DoRARule("all-linear", 2, 4))
    with pytest.raises(ValueError, match="'typo', matches no layer") as caught:
        apply_dora(model, [DoRARule("all-linear", 2, 4), DoRARule("typo", 2, 4)])
    assert "leaves out" not in str(caught.value)
    assert not caplog.messages


def test_lazy_parameters_are_refused():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 4))
    with pytest.raises(ValueError, match=r"call the model once(.|\n)*\n  0\.bias\n  0\.weight$"):
        apply_dora(model, DoRARule("1", 2, 4))
    assert type(model[1]) is nn.Linear
    model(torch.randn(2, 3))
    assert type(apply_dora(model, DoRARule("0", 2, 4))[0]) is DoRALinear


def test_a_rule_out_of_range():
    with pytest.raises(ValueError, match="mosaic"):
        DoRARule("a", 2, 4.0, implementation="mosaic")
    with pytest.raises(TypeError, match=r"adapter_dtype is torch\.int8"):
        DoRARule("a", 2, 4.0, adapter_dtype=torch.int8)


@torch.no_grad()
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["lora_a", "lora_b", "magnitude"])
def test_an_adapter_that_is_not_finite_is_not_merged(name, value):
    model = trained(apply_dora(Mixed(), ALL))
    getattr(model.blocks[0], name)[1] = value
    message = rf"^blocks\.0\.{name} holds NaN or infinity, in \d of .* use an earlier checkpoint$"
    with pytest.raises(ValueError, match=message):
        merge_dora(model)


@torch.no_grad()
def test_weights_that_are_not_finite_or_zero_are_merged_as_they_are():
    base = nn.Linear(8, 4)
    base.weight[1], base.weight[2] = math.nan, 0
    model = apply_dora(base, DoRARule("", 2, 4))
    model.magnitude[1:3] = 1
    merged = merge_dora(model).weight
    assert merged.isfinite().all(1).tolist() == [True, False, True, True]
    assert not merged[2].any()


def test_nothing_to_merge():
    with pytest.raises(ValueError, match="model holds no adapter"):
        merge_dora(Mixed())
    with pytest.raises(TypeError, match="model is a dict"):
        remove_dora({})
