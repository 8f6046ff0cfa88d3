"""Convolution, embedding and GPT-2's Conv1D: against the oracle, row by row."""

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from parity import oracle, tolerances
from tests.matrices import Problem, judge, within
from tests.torch_dora.adapters import trained
from torch_dora import DoRAConv, DoRAConv1D, DoRAEmbedding, DoRALinear, DoRARule, apply_dora
from torch_dora.ops import norm as norm_module

OPTIONS = {"rank": 4, "alpha": 5.0}

CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(6, 8, 3, padding=1), (2, 6, 11)),
    "2d, strided": (lambda: nn.Conv2d(6, 8, (3, 2), stride=(2, 1), bias=False), (2, 6, 7, 6)),
    "2d, circular, dilated": (
        lambda: nn.Conv2d(6, 8, 3, padding=2, dilation=2, padding_mode="circular"),
        (2, 6, 7, 6),
    ),
    "2d, grouped": (lambda: nn.Conv2d(6, 8, 3, padding="same", groups=2), (2, 6, 5, 4)),
    "3d, unbatched": (lambda: nn.Conv3d(6, 8, (2, 1, 2)), (6, 3, 4, 3)),
}


def differentiate(layer, x):
    """(y, dy, dx or None) for a random cotangent dy; the adapter's gradients are left in .grad."""
    x = x.clone().requires_grad_(x.is_floating_point())
    y = layer(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    y.backward(dy)
    return y.detach(), dy, x.grad


def rows_of(array):
    return np.asarray(oracle.fp64(array)).reshape(-1, array.shape[-1])


def problem_of(layer, kernel, x, y, dy, bias=None):
    """What is to be judged of a layer whose weight, as [in, out], is `kernel`."""
    return Problem(
        x=x,
        dy=rows_of(dy),
        kernel=kernel,
        lora_a=rows_of(layer.lora_a).T,
        lora_b=rows_of(layer.lora_b).T,
        magnitude=oracle.fp64(layer.magnitude).numpy(),
        bias=bias,
        y=rows_of(y),
        d_lora_a=rows_of(layer.lora_a.grad).T,
        d_lora_b=rows_of(layer.lora_b.grad).T,
        d_magnitude=layer.magnitude.grad,
    )


def of_bias(problem, norm, dtype):
    """The share of d_magnitude's bound that a bias has: inner comes of the base's sum with it,
    which was rounded, less the bias."""
    with_bias = problem.x @ problem.kernel + problem.bias
    return tolerances.stored_inner(problem.dy, with_bias, dtype) / norm


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *itertools.product(CONVOLUTIONS, [torch.float32]),
        ("1d", torch.bfloat16),
        ("2d, grouped", torch.bfloat16),
    ],
)
def test_convolution_agrees_with_the_oracle(case, dtype):
    make, shape = CONVOLUTIONS[case]
    torch.manual_seed(0)
    base = make().to(dtype)
    layer = trained(DoRAConv(base, **OPTIONS))
    x = torch.randn(shape).to(dtype)
    y, dy, dx = differentiate(layer, x)
    assert y.dtype == dtype

    groups, channel = base.groups, 0 if case.endswith("unbatched") else 1
    exact_dx, bound_dx = [], []
    for group in range(groups):

        def part(tensor, axis, group=group):
            return np.split(np.asarray(oracle.fp64(tensor)), groups, axis)[group]

        def by_row(tensor):
            return rows_of(np.moveaxis(part(tensor, channel), channel, -1))

        own = torch.tensor(part(x, channel), requires_grad=True)
        window = base.weight.shape[1:]
        size = int(np.prod(window))
        windows = type(base)(
            window[0],
            size,
            base.kernel_size,
            stride=base.stride,
            padding=base.padding,
            dilation=base.dilation,
            padding_mode=base.padding_mode,
            bias=False,
            dtype=torch.float64,
        )
        with torch.no_grad():
            windows.weight.copy_(torch.eye(size, dtype=torch.float64).reshape(size, *window))
        rows = windows(own).movedim(channel, -1)
        bias = None if base.bias is None else part(base.bias, 0)
        magnitude = part(layer.magnitude, 0)
        weight, lora_a = part(base.weight, 0), part(layer.lora_a, 0)
        problem = Problem(
            x=rows_of(rows.detach()),
            dy=by_row(dy),
            kernel=weight.reshape(len(weight), -1).T,
            lora_a=lora_a.reshape(len(lora_a), -1).T,
            lora_b=part(layer.lora_b, 0).T,
            magnitude=magnitude,
            bias=bias,
            y=by_row(y),
            d_lora_a=part(layer.lora_a.grad, 0).reshape(len(lora_a), -1).T,
            d_lora_b=part(layer.lora_b.grad, 0).T,
            d_magnitude=part(layer.magnitude.grad, 0),
        )
        extra = None
        if bias is not None:
            norm = np.asarray(layer.norm().double()).reshape(groups, -1)[group]
            extra = of_bias(problem, norm, dtype)
        in_rows = judge(problem, layer.scale, dtype, extra_d_magnitude=extra)
        for total, of_rows in zip((exact_dx, bound_dx), in_rows, strict=True):
            cotangent = torch.tensor(of_rows).reshape(rows.shape)
            (back,) = torch.autograd.grad(rows, own, cotangent, retain_graph=True)
            total.append(np.asarray(back))
    within(dx, np.concatenate(exact_dx, channel), np.concatenate(bound_dx, channel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_fresh_convolution_changes_no_bit(case, dtype):
    make, shape = CONVOLUTIONS[case]
    base = make().to(dtype)
    layer = DoRAConv(copy.deepcopy(base), **OPTIONS)
    x = torch.randn(shape).to(dtype)
    assert torch.equal(layer(x), base(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_agrees_with_the_oracle(dtype):
    torch.manual_seed(0)
    base = nn.Embedding(41, 24, dtype=dtype)
    layer = trained(DoRAEmbedding(base, **OPTIONS))
    ids = torch.randint(41, (3, 7))
    y, dy, _ = differentiate(layer, ids)
    problem = problem_of(layer, rows_of(base.weight), np.eye(41)[ids.flatten()], y, dy)
    judge(problem, layer.scale, dtype)


def test_embedding_is_fresh_exactly_and_keeps_its_padding_untrained():
    base = nn.Embedding(41, 24, padding_idx=3)
    layer = DoRAEmbedding(base, **OPTIONS)
    ids = torch.tensor([[3, 4], [5, 3]])
    assert torch.equal(layer(ids), base(ids))
    trained(layer)(ids).sum().backward()
    assert torch.all(layer.lora_a.grad[:, 3] == 0)
    assert torch.any(layer.lora_a.grad[:, 4] != 0)


def test_embedding_scales_lora_a_s_gradient_by_frequency_as_the_base_does():
    gradients = []
    for by_freq in (False, True):
        torch.manual_seed(0)
        base = nn.Embedding(41, 24, scale_grad_by_freq=by_freq)
        layer = trained(DoRAEmbedding(base, **OPTIONS))
        layer(torch.tensor([5, 7, 5, 5])).sum().backward()
        gradients.append(layer.lora_a.grad)
    counts = torch.ones(41)
    counts[5] = 3
    torch.testing.assert_close(gradients[1], gradients[0] / counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt2s_conv1d_agrees_with_the_oracle(dtype):
    torch.manual_seed(0)
    base = Conv1D(10, 14).to(dtype)
    nn.init.normal_(base.bias)
    layer = trained(DoRAConv1D(base, **OPTIONS))
    x = torch.randn(3, 5, 14).to(dtype)
    y, dy, dx = differentiate(layer, x)
    bias = oracle.fp64(base.bias).numpy()
    problem = problem_of(layer, rows_of(base.weight), rows_of(x), y, dy, bias)
    extra = of_bias(problem, np.asarray(layer.norm().double()), dtype)
    exact_dx, bound_dx = judge(problem, layer.scale, dtype, extra_d_magnitude=extra)
    within(rows_of(dx), exact_dx, bound_dx)


def test_a_fresh_conv1d_changes_no_bit():
    base = Conv1D(10, 14)
    nn.init.normal_(base.bias)
    layer = DoRAConv1D(base, **OPTIONS)
    x = torch.randn(3, 5, 14)
    assert torch.equal(layer(x), base(x))


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda **o: DoRAConv(nn.Conv1d(6, 8, 3, bias=False), **o), torch.randn(2, 6, 9)),
        (lambda **o: DoRAConv1D(Conv1D(10, 6), **o), torch.randn(4, 6)),
    ],
)
def test_dropout_by_both_conventions(make, x):
    """Both results, taken apart into what layers without dropout compute."""
    torch.manual_seed(1)
    plain = make(**OPTIONS).double()
    trained(plain)
    x = x.double()
    found = {}
    for mode in ("adapter", "input"):
        layer = copy.deepcopy(plain)
        layer.dropout, layer.dropout_mode = 0.5, mode
        torch.manual_seed(7)
        found[mode] = layer(x)
        torch.manual_seed(7)
        dropped = F.dropout(x, 0.5)
        channel = 1 if x.ndim == 3 else -1
        g = plain.g(torch.float64)
        g = g.reshape([-1 if axis == channel % x.ndim else 1 for axis in range(x.ndim)])
        base = plain.base
        g_lora = plain(dropped) - g * base(dropped)
        expected = base(x) + (g - 1) * base(x if mode == "adapter" else dropped) + g_lora
        torch.testing.assert_close(found[mode], expected)
        layer.eval()
        torch.testing.assert_close(layer(x), plain(x))
    assert not torch.allclose(found["adapter"], found["input"], atol=1e-3)


@pytest.mark.parametrize(
    ("base", "name", "x"),
    [
        (torch.nn.Linear(4, 3), "input", torch.ones(2, 4)),
        (torch.nn.Conv1d(2, 3, 1), "input", torch.ones(1, 2, 5)),
        (torch.nn.Embedding(4, 3), "input", torch.ones(2, dtype=torch.int64)),
        (Conv1D(3, 4), "x", torch.ones(2, 4)),
    ],
)
def test_the_argument_has_the_base_layers_name(base, name, x):
    layer = apply_dora(torch.nn.ModuleList([base]), [DoRARule("0", rank=2, alpha=2)])[0]
    assert torch.equal(layer(**{name: x}), layer(x))


class Doubled(nn.Embedding):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: DoRAConv(nn.Linear(2, 3), **OPTIONS),
            TypeError,
            "a Linear; DoRAConv adapts .*Conv3d",
        ),
        (lambda: DoRAConv1D(nn.Conv1d(2, 3, 1), **OPTIONS), TypeError, "DoRAConv adapts"),
        (
            lambda: DoRAEmbedding(nn.Linear(2, 3), **OPTIONS),
            TypeError,
            "a Linear; DoRAEmbedding adapts",
        ),
        (
            lambda: DoRAEmbedding(Doubled(2, 3), **OPTIONS),
            TypeError,
            "a Doubled; DoRAEmbedding adapts",
        ),
        (lambda: DoRAConv(nn.Conv1d(6, 6, 3, groups=3), **OPTIONS), ValueError, "rank is 4.*of 3"),
        (
            lambda: DoRAConv(nn.Conv1d(6, 6, 3, groups=3), rank=np.int64(4), alpha=1),
            ValueError,
            "rank is 4.*of 3",
        ),
        (
            lambda: DoRAEmbedding(nn.Embedding(2, 3), dropout=0.1, **OPTIONS),
            ValueError,
            r"dropout is 0\.1 for an embedding",
        ),
        (
            lambda: DoRAEmbedding(nn.Embedding(2, 3, max_norm=1.0), **OPTIONS),
            NotImplementedError,
            r"max_norm is 1\.0",
        ),
        (lambda: DoRAConv(nn.Conv1d(2, 3, 1), rank=0, alpha=1), ValueError, "rank is 0"),
    ],
)
def test_refusals(make, error, match):
    with pytest.raises(error, match=match):
        make()


LAYERS = {
    "conv": lambda **options: DoRAConv(nn.Conv1d(6, 8, 3), **options),
    "embedding": lambda **options: DoRAEmbedding(nn.Embedding(9, 8), **options),
    "conv1d": lambda **options: DoRAConv1D(Conv1D(8, 6), **options),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("implementation", ["triton", "eager"])
def test_a_named_implementation_takes_the_norm_too(kind, implementation, monkeypatch):
    layer = LAYERS[kind](implementation=implementation, **OPTIONS)
    compute, chosen = norm_module._factored_norm, []
    monkeypatch.setattr(
        norm_module, "_factored_norm", lambda *a: (chosen.append(a[4]), compute(*a))[1]
    )
    layer.norm()
    assert chosen == [implementation]


def test_the_scale_follows_alpha():
    layer = DoRALinear(8, 4, rank=2, alpha=16)
    nn.init.normal_(layer.lora_b)
    layer.alpha = 4
    assert layer.scale == 2
    expected = layer.weight + 2 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer.norm(), expected.norm(dim=1))
    assert layer.state_dict().keys() == {"weight", "bias", "lora_a", "lora_b", "magnitude"}
    with pytest.raises(AttributeError):
        layer.scale = 3.0
    with pytest.raises(ValueError, match="alpha is nan"):
        layer.alpha = float("nan")
