"""torch.func's transforms: grad and vmap of operators and layers, against autograd and a loop."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.func import functional_call, grad, hessian, vmap

from tests.torch_dora.adapters import trained
from torch_dora import DoRAConv, DoRAEmbedding, DoRALinear, DoRARule, apply_dora, merge_dora
from torch_dora.ops import compose, compose_delta, dora_linear, factored_norm

SCALE = 0.7


def tensors_of(layer):
    return layer.x, layer.weight, layer.lora_a, layer.lora_b, layer.magnitude, layer.bias


def linear(x, weight, lora_a, lora_b, magnitude, bias):
    return dora_linear(x, weight, lora_a, lora_b, magnitude, SCALE, bias=bias)


def loss(*tensors):
    return linear(*tensors).square().sum()


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def by_autograd(function, tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


def test_grad_is_autograds(adapted):
    tensors = tensors_of(adapted())
    close(grad(loss, argnums=tuple(range(6)))(*tensors), by_autograd(loss, tensors))


@pytest.mark.parametrize("op", [compose, compose_delta])
def test_grad_of_compose_is_autograds(operands, op):
    base, lora, g, _ = operands((6, 24))

    def loss(*tensors):
        return op(*tensors, SCALE).square().sum()

    close(grad(loss, argnums=(0, 1, 2))(base, lora, g), by_autograd(loss, (base, lora, g)))


def test_vmap_is_a_loop(adapted):
    layers = [tensors_of(adapted()) for _ in range(3)]
    found = vmap(linear)(*(torch.stack(each) for each in zip(*layers, strict=True)))
    close(found, [linear(*layer) for layer in layers])


def test_vmap_of_the_norm_is_a_loop(adapted):
    layers = [adapted() for _ in range(3)]
    weights = torch.stack([layer.weight for layer in layers], dim=1)
    _, lora_a, lora_b = layers[0][1:4]

    def norm(weight):
        return factored_norm(weight, lora_a, lora_b, SCALE)

    expected = [factored_norm(layer.weight, lora_a, lora_b, SCALE) for layer in layers]
    close(vmap(norm, in_dims=1)(weights), expected)


def test_gradients_of_single_examples(adapted):
    x, *parameters = tensors_of(adapted())
    gradients = grad(loss, argnums=(2, 3, 4))
    found = vmap(gradients, in_dims=(0, None, None, None, None, None))(x, *parameters)
    expected = [by_autograd(loss, (one, *parameters))[2:5] for one in x]
    close(found, (torch.stack(each) for each in zip(*expected, strict=True)))


def test_grad_and_autograd_of_vmap(adapted):
    tensors = tensors_of(adapted())

    def batched(*tensors):
        return vmap(linear, in_dims=(0, *[None] * 5))(*tensors).square().sum()

    expected = by_autograd(loss, tensors)
    close(grad(batched, argnums=tuple(range(6)))(*tensors), expected)
    close(by_autograd(batched, tensors), expected)


# torch's own forward mode calls torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_second_derivatives(adapted):
    """The norm is a constant, so that y is linear in the magnitude: d²|y|² / dm² = 2 (dy/dm)²."""
    layer = adapted(dtype=torch.float64)
    x, *_, magnitude, bias = tensors_of(layer)
    found = hessian(loss, argnums=4)(*tensors_of(layer))
    slope = (linear(*tensors_of(layer)) - bias) / magnitude
    torch.testing.assert_close(found, torch.diag(2 * slope.square().flatten(0, -2).sum(0)))
    assert len(x) > 1


LAYERS = pytest.mark.parametrize(
    ("layer", "x"),
    [
        (DoRALinear(6, 8, rank=2, alpha=3), torch.randn(4, 6)),
        (DoRAConv(nn.Conv1d(6, 8, 3, groups=2), rank=2, alpha=3), torch.randn(2, 6, 5)),
        (DoRAEmbedding(nn.Embedding(9, 8), rank=2, alpha=3), torch.arange(9)),
    ],
)


@LAYERS
def test_gradients_of_a_layers_parameters(layer, x):
    parameters = {name: p.detach() for name, p in layer.named_parameters() if p.requires_grad}

    def loss(parameters):
        return functional_call(layer, parameters, (x,)).square().sum()

    found = grad(loss)(parameters)
    loss(dict(layer.named_parameters())).backward()
    close(found.values(), [layer.get_parameter(name).grad for name in found])


# As above.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@LAYERS
def test_forward_mode_is_the_transpose_of_backward(layer, x):
    parameters = {name: p for name, p in trained(layer).named_parameters() if p.requires_grad}
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, tangents[name]) for name, p in parameters.items()}
        found = forward_ad.unpack_dual(functional_call(layer, duals, (x,))).tangent
    dy = torch.randn_like(found)
    gradients = torch.autograd.grad(layer(x), list(parameters.values()), dy)
    pairs = zip(gradients, tangents.values(), strict=True)
    expected = sum((one * tangent).sum() for one, tangent in pairs)
    torch.testing.assert_close((dy * found).sum(), expected, rtol=1e-4, atol=1e-4)


def test_a_named_kernel_refuses(operands):
    base, lora, g, _ = operands((3, 6, 24))
    with pytest.raises(NotImplementedError, match=r"inside torch\.func's transforms"):
        vmap(lambda base, lora: compose(base, lora, g, SCALE, implementation="triton"))(base, lora)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")  # torch 2.11's
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of checks of shapes
@pytest.mark.parametrize(
    ("base", "shape"),
    [(nn.Linear(6, 5), (3, 6)), (nn.Conv1d(6, 4, 2), (2, 6, 5)), (nn.Embedding(7, 4), None)],
)
def test_a_trace_computes_what_the_layer_does(base, shape, tmp_path):
    kind = {nn.Linear: DoRALinear, nn.Conv1d: DoRAConv, nn.Embedding: DoRAEmbedding}[type(base)]
    layer = trained(kind.from_base(base, rank=2, alpha=3))
    x, other = (torch.randint(7, (2, 3)) if shape is None else torch.randn(shape) for _ in range(2))
    traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(other), layer(other))
    traced.save(str(tmp_path / "traced.pt"))
    again = torch.jit.load(str(tmp_path / "traced.pt"))
    torch.testing.assert_close(again(other), layer(other))


def test_a_decomposed_program_has_the_layer_s_gradients():
    model = trained(apply_dora(nn.Sequential(nn.Linear(6, 5)), DoRARule("0", 2, 4)))
    x = torch.randn(3, 6)
    program = torch.export.export(model, (x,)).run_decompositions().module()
    leaves = {name: one for name, one in model.named_parameters() if one.requires_grad}
    wanted = torch.autograd.grad(model(x).square().sum(), list(leaves.values()))
    program(x).square().sum().backward()
    close([program.get_parameter(name).grad for name in leaves], wanted)


def test_stages_of_a_pipeline_compute_what_the_model_does():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    model = trained(apply_dora(model, DoRARule("all-linear", 2, 4)))
    x = torch.randn(3, 6)
    stages = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    y = stages.get_stage_module(1)(stages.get_stage_module(0)(x))
    assert torch.equal(y, model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_a_script_is_refused_and_one_of_the_merged_model_is_not():
    model = nn.Sequential(nn.Sequential(trained(DoRALinear(6, 5, rank=2, alpha=3))))
    with pytest.raises(NotImplementedError, match=r"cannot compile a DoRALinear.*jit\.trace"):
        torch.jit.script(model)
    x = torch.randn(3, 6)
    torch.testing.assert_close(torch.jit.script(merge_dora(model))(x), model(x))
