"""torch.compile sees whole graphs and computes what eager code does."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from tests.tables import slow
from torch_dora import DoRALinear
from torch_dora.ops import choose, compose, compose_delta, dora_linear, norm
from torch_dora.ops.operator import is_compiled, is_exporting
from torch_dora.ops.triton import compose_forward

IMPLEMENTATIONS = ["eager", "triton"]

# What torch's compilers call is theirs: 2.11's use several things that 2.11 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gradients(function, x, parameters):
    torch.manual_seed(1)
    y = function(x)
    dy = torch.randn_like(y)
    return [y, *torch.autograd.grad(y, [x, *parameters], dy)]


@pytest.mark.parametrize(
    ("implementation", "dtype", "mode"),
    [
        slow("eager", torch.float32, None),
        ("triton", torch.bfloat16, None),
        slow("triton", torch.float32, "adapter"),
        slow("eager", torch.bfloat16, "input"),
    ],
)
@pytest.mark.ci
def test_a_layer_is_one_graph(device, implementation, dtype, mode):
    dropout = {} if mode is None else {"dropout": 0.5, "dropout_mode": mode}
    layer = DoRALinear(
        24,
        40,
        rank=4,
        alpha=8,
        dtype=dtype,
        device=device,
        implementation=implementation,
        **dropout,
    )
    torch.nn.init.normal_(layer.lora_b)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    for rows in (5, 9):
        x = torch.randn(2, rows, 24, device=device, dtype=dtype, requires_grad=True)
        want, got = gradients(layer, x, parameters), gradients(compiled, x, parameters)
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            torch.testing.assert_close(g, w)
    with torch.no_grad():
        layer.eval()
        torch.testing.assert_close(compiled(x), layer(x))


# Inductor recommends TF32, which would not compute the same.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_inductor_computes_the_same(device):
    layer = DoRALinear(24, 40, rank=4, alpha=8, device=device)
    torch.nn.init.normal_(layer.lora_b)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(6, 24, device=device, requires_grad=True)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    for got, want in zip(
        gradients(compiled, x, parameters), gradients(layer, x, parameters), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("op", [compose, compose_delta])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_operator_is_one_graph(operands, op, implementation):
    base, lora, g, dy = operands((6, 24))
    leaves = [t.requires_grad_() for t in (base, lora, g)]

    def call(*tensors):
        return op(*tensors, 0.7, implementation=implementation)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(call(*leaves), leaves, dy)
    for got, exact in zip(torch.autograd.grad(compiled(*leaves), leaves, dy), want, strict=True):
        torch.testing.assert_close(got, exact)


def test_only_the_product_keeps_a_kernel_in_training(monkeypatch, operands, device):
    """The compiler fuses compose, and the gradient of both, with the operations around them."""
    monkeypatch.setattr(choose, "triton_wins", lambda call: True)
    monkeypatch.setattr(compose_forward, "wins", lambda call: True)
    programs = []

    def record(program, _):
        programs.append(program.code)
        return make_boxed_func(program)

    backend = aot_autograd(fw_compiler=record)
    layer = DoRALinear(24, 40, rank=4, alpha=8, dtype=torch.bfloat16, device=device)
    x = torch.randn(6, 24, device=device, dtype=torch.bfloat16)
    torch.compile(layer, fullgraph=True, backend=backend)(x).sum().backward()
    forward, backward = programs
    assert "torch_dora.expand_compose" in forward
    assert "torch_dora" not in backward

    programs.clear()
    leaves = [t.requires_grad_() for t in operands((6, 24))[:3]]
    call = lambda *tensors: compose(*tensors, 0.7)  # noqa: E731
    torch.compile(call, fullgraph=True, backend=backend)(*leaves).sum().backward()
    assert len(programs) == 2
    assert "torch_dora" not in "".join(programs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_of_the_norm_computes_g_in_inference(device, dtype):
    programs = []

    def record(program, _):
        programs.append(program.code)
        return make_boxed_func(program)

    layer = DoRALinear(24, 40, rank=4, alpha=8, dtype=dtype, device=device, implementation="triton")
    torch.nn.init.normal_(layer.lora_b)
    torch.nn.init.uniform_(layer.magnitude, 1, 2)
    x = torch.randn(6, 24, device=device, dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    is_half = dtype == torch.bfloat16  # The norm of an fp32 weight is not one kernel.
    assert ("torch_dora.one_pass_scale" in programs[0]) == is_half
    assert ("torch_dora.factored_norm" in programs[0]) == (not is_half)
    compiled(x)
    assert "torch_dora.factored_norm" in programs[1]
    if is_half:
        adapter = layer.lora_a.detach(), layer.lora_b.detach(), layer.magnitude.detach()
        torch.library.opcheck(norm._one_pass_scale.op, (layer.weight, *adapter, 0.5, 1e-6))


def test_g_is_fp64_for_x_in_fp64_in_compiled_inference():
    weight, lora_a, lora_b = (torch.randn(n).bfloat16() for n in ((40, 24), (4, 24), (40, 4)))

    def call(magnitude):
        operands = weight, lora_a, lora_b, magnitude, 0.5, torch.float64, "triton"
        return norm.adapted_scale(*operands)

    magnitude = torch.rand(40)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(magnitude), call(magnitude))


def test_a_compiled_program_is_not_an_exported_one():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x + is_compiled() + 2 * is_exporting()

    model, x = Model(), torch.zeros(2)
    assert model(x)[0] == 0
    assert torch.compile(model, fullgraph=True, backend="eager")(x)[0] == 1
    for strict in (False, True):
        exported = torch.export.export(model, (x,), strict=strict)
        assert exported.module()(x)[0] == 2


def test_gradients_of_single_examples_are_one_graph(adapted):
    x, weight, lora_a, lora_b, magnitude, *_ = adapted()

    def loss(x, magnitude):
        return dora_linear(x, weight, lora_a, lora_b, magnitude, 0.7).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))
    compiled = torch.compile(gradients, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, magnitude), gradients(x, magnitude), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 0.7), (torch.bfloat16, 0.7), (torch.float64, 0.0)]
)
def test_the_norms_operator_keeps_its_contract_with_torch(adapted, dtype, scale):
    layer = adapted(dtype=dtype)
    tensors = layer.weight, layer.lora_a, layer.lora_b
    torch.library.opcheck(norm._factored_norm.op, (*tensors, scale, "eager"))
