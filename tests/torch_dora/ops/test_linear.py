import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parity import oracle, tolerances
from torch_dora.ops import dora_linear, factored_norm

MIXED = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
IMPLEMENTATIONS = ["eager", "triton"]
NAMES = {
    "x": "d_x",
    "lora_a": "d_lora_a",
    "lora_b": "d_lora_b",
    "magnitude": "d_magnitude",
    "bias": "d_bias",
}


def call(layer, scale=0.7, **kwargs):
    return dora_linear(
        layer.x, layer.weight, layer.lora_a, layer.lora_b, layer.magnitude, scale, **kwargs
    )


def leaf(layer, *names):
    """The layer with those of its tensors as leaves that require a gradient."""
    return layer._replace(
        **{name: getattr(layer, name).detach().requires_grad_() for name in names}
    )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "adapter_dtype"), MIXED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("rows", "biased"), [((3, 11), True), ((3, 11), False), ((1,), False), ((), True)]
)
def test_agrees_with_the_oracle(
    adapted, assert_within, dtype, adapter_dtype, implementation, rows, biased
):
    layer = leaf(adapted(rows, dtype=dtype, adapter_dtype=adapter_dtype), *NAMES)
    bias = layer.bias if biased else None
    y = call(layer, bias=bias, implementation=implementation)
    assert y.dtype == dtype
    names = [name for name in NAMES if biased or name != "bias"]
    grads = torch.autograd.grad(y, [getattr(layer, name) for name in names], layer.dy)

    operands = layer.x, layer.weight, layer.lora_a, layer.lora_b, layer.magnitude, 0.7
    exact = oracle.dora_linear(*operands, bias=bias, dtype=dtype)
    bound = tolerances.dora_linear(layer.dy, *operands, dtype, bias=bias)
    assert_within(y, exact, bound.y.reshape(y.shape), implementation)
    exact = oracle.dora_linear_grads(layer.dy, *operands, dtype=dtype)
    for name, grad in zip(names, grads, strict=True):
        assert grad.dtype == getattr(layer, name).dtype
        limit = getattr(bound, NAMES[name]).reshape(grad.shape)
        assert_within(grad, getattr(exact, NAMES[name]), limit, implementation)


def test_a_trained_weight_gets_its_gradient(adapted):
    layer = leaf(adapted(dtype=torch.float64), "weight")
    call(layer).backward(layer.dy)
    exact = oracle.dora_linear_grads(
        layer.dy, layer.x, layer.weight, layer.lora_a, layer.lora_b, layer.magnitude, 0.7
    )
    torch.testing.assert_close(layer.weight.grad, exact.d_weight)


@pytest.mark.parametrize("dropped", [False, True])
def test_gradients_are_those_of_the_function_in_fp64(adapted, dropped):
    layer = adapted((2, 3), (4, 5, 2), torch.float64)
    norm = factored_norm(layer.weight, layer.lora_a, layer.lora_b, 0.7)
    names = [*NAMES, "weight"]
    leaves = [getattr(layer, name).requires_grad_() for name in names]
    adapter_x = torch.randn_like(layer.x).requires_grad_() if dropped else None

    def function(adapter_x, *values):
        made = layer._replace(**dict(zip(names, values, strict=True)))
        return call(made, bias=made.bias, norm=norm, adapter_x=adapter_x)

    torch.autograd.gradcheck(function, (adapter_x, *leaves))


class Shapes(TorchDispatchMode):
    """Records the shape of every result of an operator."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        # A transposed view is no new matrix.
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in given:
            self.seen.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_matrix_of_the_weights_shape_is_made(adapted, implementation):
    layer = leaf(adapted(sizes=(40, 56, 8)), *NAMES)
    with Shapes() as shapes:
        call(layer, bias=layer.bias, implementation=implementation).backward(layer.dy)
    assert (8, 40) in shapes.seen
    assert not {(56, 40), (40, 56)} & shapes.seen


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inner_is_kept_only_for_a_trained_magnitude(adapted, implementation):
    def kept(trained: bool) -> list[tuple[int, ...]]:
        layer = leaf(adapted((33,), (40, 56, 8)), "x", "lora_a", "lora_b")
        layer.magnitude.requires_grad_(trained)
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: shapes.append(tuple(t.shape)), lambda t: t
        ):
            call(layer, implementation=implementation)
        return shapes

    assert (33, 56) in kept(True)
    assert (33, 56) not in kept(False)


def test_nothing_is_kept_without_a_gradient(adapted):
    layer = leaf(adapted(), *NAMES)
    with torch.no_grad():
        assert call(layer).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_g_of_one_and_lora_of_zero_are_the_base_layer_bit_for_bit(adapted, dtype, implementation):
    layer = adapted(dtype=dtype)
    layer.lora_b.zero_()
    operands = layer.weight, layer.lora_a, layer.lora_b
    norm = factored_norm(*operands, 0.7, implementation=implementation)
    layer = layer._replace(magnitude=norm)
    for bias in (layer.bias, None):
        y = call(layer, bias=bias, implementation=implementation)
        assert torch.equal(y, F.linear(layer.x, layer.weight, bias))


def test_mixed_x_and_weight_promote(adapted):
    layer = adapted(dtype=torch.bfloat16)
    assert call(layer._replace(x=layer.x.float())).dtype == torch.float32


def test_autocast_is_what_it_is_for_a_linear_layer(adapted, device):
    layer = leaf(adapted(), *NAMES)
    with torch.autocast(device, torch.bfloat16):
        y = call(layer, bias=layer.bias)
        assert y.dtype == F.linear(layer.x, layer.weight, layer.bias).dtype == torch.bfloat16
        y.float().square().sum().backward()
    assert all(getattr(layer, name).grad.dtype == torch.float32 for name in NAMES)
    exact = oracle.dora_linear(
        layer.x, layer.weight, layer.lora_a, layer.lora_b, layer.magnitude, 0.7, bias=layer.bias
    )
    torch.testing.assert_close(y.double(), exact, rtol=0.03, atol=0.03)


def test_a_given_norm_is_used_and_changes_no_bit(adapted):
    layer = adapted()
    norm = factored_norm(layer.weight, layer.lora_a, layer.lora_b, 0.7)
    assert torch.equal(call(layer, norm=norm), call(layer))
    torch.testing.assert_close(call(layer, norm=2 * norm), call(layer) / 2)


def test_checkpointing_changes_no_bit(adapted):
    layer = leaf(adapted(), *NAMES)
    leaves = [getattr(layer, name) for name in NAMES]

    def run(*tensors):
        return call(layer._replace(**dict(zip(NAMES, tensors, strict=True))), bias=tensors[-1])

    plain = torch.autograd.grad(run(*leaves), leaves, layer.dy)
    saved = checkpoint(run, *leaves, use_reentrant=False)
    for got, want in zip(torch.autograd.grad(saved, leaves, layer.dy), plain, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_contiguous_operands(adapted, implementation):
    layer = adapted((6,))
    strided = layer._replace(
        x=layer.x.T.contiguous().T, weight=layer.weight.T.contiguous().T, dy=None
    )
    got = call(strided, bias=layer.bias.repeat_interleave(2)[::2], implementation=implementation)
    torch.testing.assert_close(got, call(layer, bias=layer.bias, implementation=implementation))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(3, 7)}, ValueError, r"x has shape \(3, 7\); its last axis .* 8 input"),
        ({"x": torch.ones(3, 8, dtype=torch.int32)}, TypeError, "x has dtype torch.int32"),
        ({"magnitude": torch.ones(6, 1)}, ValueError, r"magnitude has shape \(6, 1\)"),
        ({"bias": torch.ones(5)}, ValueError, r"bias has shape \(5,\); expected \(6\)"),
        ({"lora_b": torch.ones(6, 3)}, ValueError, r"lora_b has shape \(6, 3\); expected \(6, 2\)"),
        ({"adapter_x": torch.ones(4, 8)}, ValueError, r"adapter_x has shape \(4, 8\)"),
        ({"scale": float("nan")}, ValueError, "scale is nan"),
        ({"norm": torch.ones(5)}, ValueError, r"norm has shape \(5,\); expected \(6\)"),
        ({"implementation": "mosaic"}, ValueError, "'mosaic' is not a torch implementation"),
    ],
)
def test_bad_input_is_named(change, error, message):
    arguments = {
        "x": torch.ones(3, 8),
        "weight": torch.ones(6, 8),
        "lora_a": torch.ones(2, 8),
        "lora_b": torch.ones(6, 2),
        "magnitude": torch.ones(6),
        "scale": 1.0,
    }
    with pytest.raises(error, match=message):
        dora_linear(**arguments | change)
