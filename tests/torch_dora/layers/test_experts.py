"""Packed experts: every way in which a module reads them, against the oracle, expert by expert."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_dora
from parity import oracle
from tests.matrices import Problem, judge, within
from tests.tables import thinned
from tests.torch_dora.adapters import trained
from torch_dora import DoRAExperts, DoRARule, apply_dora, merge_dora, remove_dora
from torch_dora.layers import packed_experts

EXPERTS, ROWS, IN, OUT, RANK = 3, 5, 16, 24, 3
RULE = DoRARule("w", RANK, 4.0)
EXACT = DoRARule("w", RANK, 4.0, adapter_dtype=torch.float64)


def grouped(w, x):
    offs = torch.arange(ROWS, EXPERTS * ROWS + 1, ROWS, dtype=torch.int32)
    w = w if w.shape[1] == IN else w.transpose(-2, -1)
    return F.grouped_mm(x.flatten(0, 1), w, offs=offs).unflatten(0, (EXPERTS, ROWS))


def gathered(w, x):
    """A matrix for each row, in front of the row."""
    experts = torch.arange(EXPERTS).repeat_interleave(ROWS)
    return torch.bmm(w[experts], x.flatten(0, 1)[..., None])[..., 0].unflatten(0, (EXPERTS, ROWS))


# By the way: what it computes for each expert, and whether its weight is [experts, in, out].
WAYS = {
    "linear": (lambda w, x: torch.stack([F.linear(x[e], w[e]) for e in range(EXPERTS)]), False),
    "numbers in a tensor": (
        lambda w, x: torch.stack([F.linear(x[e], w[e]) for e in torch.arange(EXPERTS)]),
        False,
    ),
    "matmul": (lambda w, x: torch.stack([x[e] @ w[e] for e in range(EXPERTS)]), True),
    "in turn": (lambda w, x: torch.stack([a @ b.T for a, b in zip(x, w, strict=True)]), False),
    "bmm": (torch.bmm, True),
    "batched": (lambda w, x: torch.matmul(x, w.mT), False),
    "gathered": (gathered, False),
    "grouped": (grouped, False),
    "grouped, transposed": (grouped, True),
    "einsum": (lambda w, x: torch.einsum("eni,eoi->eno", x, w), False),
    "a slice": (lambda w, x: torch.cat([x[:1] @ w[:1], x[1:] @ w[1:]]), True),
    "one in a list": (lambda w, x: torch.cat([x[[e]] @ w[[e]].mT for e in range(EXPERTS)]), False),
}
WAYS["bmm"] = (lambda w, x: torch.bmm(x, w), True)
# These get W' as a tensor.
DENSE = ("einsum", "a slice", "one in a list")


class Experts(nn.Module):
    """Keeps the way as a name, so that it can be pickled."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.is_transposed = way, WAYS[way][1]
        shape = (EXPERTS, IN, OUT) if self.is_transposed else (EXPERTS, OUT, IN)
        self.first = nn.Parameter(torch.ones(2))
        self.w = nn.Parameter(torch.randn(shape))
        self.last = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return WAYS[self.way][0](self.w, x)


def make(way, dtype=torch.float32, rule=RULE):
    torch.manual_seed(0)
    base = Experts(way).to(dtype)
    x = torch.randn(EXPERTS, ROWS, IN).to(dtype)
    return base, x, apply_dora(copy.deepcopy(base), rule)


def judge_experts(model, x, dtype) -> None:
    layer = model.w_dora
    assert type(layer) is DoRAExperts
    x = x.clone().requires_grad_()
    y = model(x)
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy)
    assert y.dtype == dtype
    weight = layer.weight_matrix()

    def part(tensor, e):
        return np.asarray(oracle.fp64(tensor.detach()[e]))

    for e in range(EXPERTS):
        problem = Problem(
            x=part(x, e),
            dy=part(dy, e),
            kernel=part(weight, e).T,
            lora_a=part(layer.lora_a, e).T,
            lora_b=part(layer.lora_b, e).T,
            magnitude=part(layer.magnitude, e),
            y=part(y, e),
            d_lora_a=part(layer.lora_a.grad, e).T,
            d_lora_b=part(layer.lora_b.grad, e).T,
            d_magnitude=part(layer.magnitude.grad, e),
        )
        within(x.grad[e], *judge(problem, layer.scale, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [way for way in WAYS if way not in DENSE])
def test_products_agree_with_the_oracle(way, dtype):
    _, x, model = make(way, dtype)
    judge_experts(trained(model), x, dtype)


@pytest.mark.parametrize("way", DENSE)
def test_whatever_else_reads_them_gets_the_merged_weight(way):
    # In fp64, where W' is not rounded before the product, the derived bounds hold too.
    _, x, model = make(way, torch.float64, EXACT)
    judge_experts(trained(model), x, torch.float64)
    _, x, model = make(way, torch.bfloat16)
    y = trained(model)(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, merge_dora(model)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_a_fresh_adapter_changes_no_bit(way, dtype):
    base, x, model = make(way, dtype)
    assert torch.equal(model(x), base(x))


@pytest.mark.parametrize("way", thinned(WAYS, ["linear", "grouped", "bmm"]))
def test_merging_and_removing(way):
    base, x, model = make(way)
    names = [name for name, _ in base.named_parameters()]
    plain = base(x)
    y = trained(model)(x)
    assert not torch.allclose(y, plain, atol=0.1)
    merged, report = merge_dora(model, return_report=True)
    torch.testing.assert_close(merged(x), y, rtol=1e-5, atol=1e-5)
    assert [row.path for row in report.layers] == ["w"]
    assert torch.equal(model(x), y)
    removed = remove_dora(model)
    for one in (merged, removed):
        assert type(one) is Experts
        assert [name for name, _ in one.named_parameters()] == names
    assert torch.equal(removed(x), plain)


@pytest.mark.parametrize("way", ["linear", "grouped"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_and_given_norms_change_no_bit(way, reentrant):
    _, x, model = make(way)
    trained(model).requires_grad_(True)
    x.requires_grad_()

    def gradients(call):
        model.zero_grad()
        call(x).square().sum().backward()
        return [p.grad.clone() for name, p in model.named_parameters() if "w_dora." in name]

    expected = gradients(model)
    again = gradients(lambda x: checkpoint(model, x, use_reentrant=reentrant))
    values = torch_dora.norms(model)
    assert {name: value.shape for name, value in values.items()} == {"w": (EXPERTS, OUT)}
    with torch_dora.with_norms(model, values):
        given = gradients(model)
    for others in zip(expected, again, given, strict=True):
        assert all(torch.equal(others[0], other) for other in others)
    y = model(x)
    assert torch.equal(torch_dora.freeze(model)(x), y)


def test_states_copies_and_pickles():
    base, x, model = make("linear")
    y = trained(model)(x)
    assert [*model.state_dict()] == [
        "first",
        "last",
        "w_dora.weight",
        "w_dora.lora_a",
        "w_dora.lora_b",
        "w_dora.magnitude",
    ]
    other = apply_dora(Experts("linear"), RULE)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), y)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(x), y)
        assert isinstance(one, Experts)
        with torch.no_grad():
            one.w.tensor()  # the copy reads its own layer
            one.w_dora.magnitude.mul_(2)
        assert not torch.equal(one(x), y)
        assert torch.equal(model(x), y)
    # The base model's own state, and a parameter that is assigned, replace the weight alone.
    other.load_state_dict(base.state_dict(), strict=False)
    assert torch.equal(other(x), y)
    with torch.no_grad():
        other.w = nn.Parameter(2 * base.w)
    assert type(other.w_dora) is DoRAExperts
    assert torch.equal(other.w_dora.weight, 2 * base.w)
    assert not torch.equal(other(x), y)


@pytest.mark.parametrize("mode", ["adapter", "input"])
@pytest.mark.parametrize("way", ["linear", "bmm"])
def test_dropout_drops_of_the_correction_alone(way, mode, monkeypatch):
    rule = dataclasses.replace(EXACT, dropout=0.5, dropout_mode=mode)
    _, x, model = make(way, torch.float64, rule)
    trained(model).eval()
    base = remove_dora(copy.deepcopy(model))
    layer = model.w_dora
    w, g = layer.weight_matrix(), layer.g(torch.float64)[:, None]
    ba = layer.scale * layer.lora_b @ layer.lora_a
    monkeypatch.setattr(F, "dropout", lambda x, *_: x * 2)
    expected = base(x) + (g - 1) * (x @ w.mT) * (1 + (mode == "input")) + g * (2 * x @ ba.mT)
    torch.testing.assert_close(model.train()(x), expected)
    with pytest.raises(NotImplementedError, match=r"dropout is 0\.5 for packed experts"):
        model.w.tensor()
    model.eval().w.tensor()


def test_metadata_is_the_weights_and_an_address_is_refused():
    _, _, model = make("bmm", torch.bfloat16)
    w = model.w
    assert (w.shape, w.dtype, w.ndim, len(w)) == ((EXPERTS, IN, OUT), torch.bfloat16, 3, EXPERTS)
    assert w.transpose(1, 2).shape == w.transpose(-2, -1).shape == (EXPERTS, OUT, IN)
    assert w[1].T.shape == w[1].t().shape == (OUT, IN)
    assert w.transpose(0, 1).shape == (IN, EXPERTS, OUT)
    assert w.requires_grad
    with pytest.raises(TypeError, match="have no memory of their own"):
        w.data_ptr()


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x @ (w * 1)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dy, None


@pytest.mark.parametrize("way", WAYS)
def test_functional_calls(way):
    _, x, model = make(way)
    trained(model)
    values = {name: p.detach() for name, p in model.named_parameters() if "w_dora." in name}
    assert len(values) == 4

    def loss(values):
        return torch.func.functional_call(model, values, (x,)).square().sum()

    found = torch.func.grad(loss)(values)
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    adapters = [value for name, value in leaves.items() if "weight" not in name]
    expected = torch.autograd.grad(loss(leaves), adapters)
    for name, value in zip([n for n in leaves if "weight" not in n], expected, strict=True):
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


def test_a_taken_name_is_left():
    base, _, _ = make("bmm")
    base.w_dora = nn.Linear(2, 3)
    with pytest.raises(TypeError, match="cannot be adapted"):
        apply_dora(nn.Sequential(base), DoRARule("0", RANK, 4.0))


def test_a_function_that_would_lose_the_gradient_is_refused():
    _, x, model = make("bmm")
    with pytest.raises(RuntimeError, match=r"read where gradients are on.*grouped_mm"):
        Opaque.apply(x, model.w)
    with torch.no_grad():
        Opaque.apply(x, model.w)
    Opaque.apply(x, torch_dora.freeze(model).w)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["linear", "grouped", "bmm"])
def test_compiled(way):
    # A compiled program has grouped products in bf16 only.
    dtype = torch.bfloat16 if way == "grouped" else torch.float32
    _, x, model = make(way, dtype)
    y = merge_dora(trained(model))(x)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, y)
    found.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "w_dora.lora" in name)


def test_experts_of_no_known_layout_are_left_out():
    model = nn.Sequential(Experts("linear"))
    del model[0].is_transposed
    with pytest.raises(TypeError, match=r"is_transposed(.|\n)*\n  0 \(Experts\)"):
        apply_dora(model, DoRARule("0", RANK, 4.0))
    assert "set the module's is_transposed" in torch_dora.coverage(model).weights[0].how


@pytest.mark.parametrize(
    ("gate_up", "down", "is_transposed"),
    [
        ((3, 12, 8), (3, 8, 6), False),
        ((3, 8, 12), (3, 6, 8), True),
        ((3, 8, 8), (3, 8, 4), False),
        ((3, 8, 8), (3, 4, 8), True),
        ((3, 8, 8), (3, 8, 8), None),
        ((3, 12, 8), (3, 6, 8), None),
        ((3, 12, 8), (8, 6), None),
    ],
)
def test_the_shapes_of_gated_experts_tell_their_layout(gate_up, down, is_transposed):
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.zeros(gate_up))
    module.down_proj = nn.Parameter(torch.zeros(down))
    for _ in range(2):
        found = {experts.is_transposed for experts in packed_experts(module).values()}
        assert found == ({is_transposed} - {None})
        if is_transposed is not None:  # the same when one of the two is adapted
            apply_dora(module, DoRARule("down_proj", 2, 4.0))
            assert [*packed_experts(module)] == ["gate_up_proj"]
            remove_dora(module)
    module.gate_up_proj = None  # as in LongCat's layers without experts
    assert not packed_experts(module)
