"""The direct call computes what the long way does, and leaves everything else to it."""

import contextlib
import copy
import ctypes
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from triton.knobs import runtime

from parity import tolerances
from torch_dora import DoRALinear, freeze
from torch_dora.ops import dora_linear, plan, scales
from torch_dora.ops.choose import TRITON_MODE
from torch_dora.ops.triton import expand_compose, one_pass_norm
from torch_dora.ops.triton.jit import SameLaunch

DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]
SIZES = {"in_features": 24, "out_features": 40, "rank": 4, "alpha": 8}


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls that go the direct way."""
    found, find = [], plan.find

    def counted(*arguments):
        found.append((chosen := find(*arguments)) is not None)
        return chosen

    monkeypatch.setattr(plan, "find", counted)
    return found


def layer(device, **options):
    options = SIZES | {"dtype": torch.bfloat16, "implementation": "triton"} | options
    made = DoRALinear(**options, device=device)
    with torch.no_grad():
        torch.nn.init.normal_(made.lora_b)
        made.magnitude.mul_(1 + torch.rand_like(made.magnitude))
    return made


def results(call, x, dy, made=None):
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = call(x)
    trained = [parameter for parameter in (made or call).parameters() if parameter.requires_grad]
    return [y, *torch.autograd.grad(y, [x, *trained], dy)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "option"),
    [
        # Every option with both dtypes of either, and all four pairs in turn.
        (*DTYPES[(2 * number + turn) % 4], option)
        for number, option in enumerate(
            [
                {},
                {"bias": False},
                {"dropout": 0.5, "dropout_mode": "adapter"},
                {"frozen": True},
                {"no_magnitude": True},
                {"half_magnitude": True},
                {"autocast": True},
            ]
        )
        for turn in range(2)
    ],
    ids=str,
)
def test_computes_as_the_long_way(device, calls, monkeypatch, dtype, adapter_dtype, option):
    option = dict(option)
    names = ("frozen", "no_magnitude", "half_magnitude", "autocast")
    changes = {name: option.pop(name, False) for name in names}
    made = layer(device, dtype=dtype, adapter_dtype=adapter_dtype, **option)
    if changes["frozen"]:
        made = freeze(copy.deepcopy(made))
        for parameter in (made.lora_a, made.lora_b, made.magnitude):
            parameter.requires_grad_(True)
    made.magnitude.requires_grad_(not changes["no_magnitude"])
    if changes["half_magnitude"]:  # as PEFT makes them in half precision
        made.magnitude.data = made.magnitude.data.to(dtype)
    x = torch.randn(2, 5, 24, device=device, dtype=dtype)
    if changes["autocast"]:
        x = x.float()
    dy = torch.randn(2, 5, 40, device=device, dtype=dtype)
    with torch.autocast(x.device.type, dtype, enabled=changes["autocast"]):
        got = results(made, x, dy)
        assert calls == [True]
        monkeypatch.setattr(plan, "find", lambda *_: None)
        want = results(made, x, dy)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w)


def exact_correction(made, x, dy):
    """The result and gradients of PEFT's dropout in fp64, from the merged weight, on the CPU."""
    wide = copy.deepcopy(made).cpu().double().requires_grad_(True)
    torch.manual_seed(3)
    dropped = F.dropout(x, made.dropout)
    kept = (dropped != 0).cpu() / (1 - made.dropout)
    x = x.cpu().double().requires_grad_()
    direction = wide.weight + wide.scale * wide.lora_b @ wide.lora_a
    g = wide.magnitude.double() / direction.detach().norm(dim=1)
    y = F.linear(x, wide.weight, wide.bias)
    y = y + F.linear(x * kept, g[:, None] * direction - wide.weight)
    named = {"x": x} | dict(wide.named_parameters())
    found = torch.autograd.grad(y, [*named.values()], dy.cpu().double())
    return {"y": y} | dict(zip(named, found, strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "adapter_dtype"), DTYPES)
@pytest.mark.parametrize(
    "option",
    [{}, {"bias": False}, {"matrix"}, {"autocast"}, {"frozen"}, {"trains weight"}, {"rings"}],
    ids=str,
)
def test_dropout_of_the_correction(device, calls, monkeypatch, dtype, adapter_dtype, option):
    changes = option if isinstance(option, set) else {}
    options = {"dropout": 0.5, "dropout_mode": "input"} | ({} if changes else option)
    made = layer(device, dtype=dtype, adapter_dtype=adapter_dtype, **options)
    if changes == {"frozen"}:
        made.constant_norm = made.norm()
        made.magnitude.requires_grad_(False)
    if changes == {"trains weight"}:
        made.requires_grad_(True)
    if changes == {"rings"}:  # These do not add ΔY to y.
        monkeypatch.setattr(plan.Plan, "expand_delta", None)
    x = torch.randn(2, 5, 24, device=device, dtype=dtype)
    x = x.flatten(0, 1) if changes == {"matrix"} else x
    dy = torch.randn(*x.shape[:-1], 40, device=device, dtype=dtype)
    wide = x.float() if changes == {"autocast"} else x
    exact = exact_correction(made, wide, dy)
    names = ["y", "x", *(n for n, p in made.named_parameters() if p.requires_grad)]
    errors = []
    for _ in range(2):
        with torch.autocast(x.device.type, dtype, enabled=changes == {"autocast"}):
            found = dict(zip(names, results(made, wide, dy), strict=True))
        kinds = {"y": dtype, "x": wide.dtype}
        for name, one in found.items():
            assert one.dtype == kinds.get(name, getattr(made, name, one).dtype)
        errors.append({n: (found[n].cpu() - exact[n]).norm() / exact[n].norm() for n in names})
        monkeypatch.setattr(plan, "find", lambda *_: None)
    assert calls == [True]
    for name in names:
        assert errors[0][name] <= 2 * errors[1][name] + tolerances.unit_roundoff(dtype), name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_drops_the_same(device, calls, use_reentrant):
    made = layer(device, dropout=0.5, dropout_mode="input")
    x = torch.randn(2, 5, 24, device=device, dtype=torch.bfloat16)
    dy = torch.randn(2, 5, 40, device=device, dtype=torch.bfloat16)
    want = results(made, x, dy)
    x.requires_grad_()
    torch.manual_seed(3)
    y = checkpoint(made, x, use_reentrant=use_reentrant)
    y.backward(dy)
    assert all(calls)
    trained = [parameter.grad for parameter in made.parameters() if parameter.requires_grad]
    for g, w in zip([y, x.grad, *trained], want, strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_mode_sees_the_operator_of_a_backward_pass(device, calls, dropout):
    made = layer(device, dropout=dropout, dropout_mode="input")
    x = torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    dy = torch.randn(3, 40, device=device, dtype=torch.bfloat16)
    want = results(made, x, dy)
    x.requires_grad_()
    torch.manual_seed(3)
    y = made(x)
    with OperatorNames() as seen:
        y.backward(dy)
    assert calls == [True, True]
    assert "torch_dora.compose_backward.default" in seen.names
    trained = [parameter.grad for parameter in made.parameters() if parameter.requires_grad]
    for g, w in zip([y, x.grad, *trained], want, strict=True):
        assert torch.equal(g, w)


class OperatorNames(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(str(operator))
        return operator(*args, **(kwargs or {}))


def test_a_layer_without_a_direct_call_drops_once(device, calls):
    made = layer(device, dropout=0.5, dropout_mode="input", dtype=torch.float32)
    x = torch.randn(2, 5, 24, device=device)
    torch.manual_seed(3)
    y = made(x)
    torch.manual_seed(3)
    F.dropout(x, 0.5)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(made(x), y)
    assert torch.equal(torch.get_rng_state(), after)
    assert not any(calls)


def test_everything_else_goes_the_long_way(device, calls):
    made, x = layer(device), torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    adapter = made.lora_a, made.lora_b, made.magnitude
    dora_linear(x, made.weight, *adapter, 2.0, implementation="triton")
    for weight, magnitude, scale in (
        (made.weight.float(), made.magnitude, 2.0),
        (made.weight, made.magnitude, 0.0),
        (made.weight, made.magnitude, 2),
    ):
        dora_linear(x, weight, *adapter[:2], magnitude, scale, implementation="triton")
    dora_linear(x, made.weight, *adapter, 2.0, implementation="eager")
    vmap(lambda x: dora_linear(x, made.weight, *adapter, 2.0))(x[:, None])
    dora_linear(x[:0], made.weight, *adapter, 2.0, implementation="triton")
    with pytest.raises(ValueError, match=r"scale is nan"):
        dora_linear(x, made.weight, *adapter, float("nan"), implementation="triton")
    with pytest.raises(ValueError, match="magnitude has shape"):
        dora_linear(x, made.weight, *adapter[:2], made.magnitude[1:], 2.0, implementation="triton")
    dora_linear(x.float(), made.weight, *adapter, 2.0, implementation="triton")
    assert calls[0]
    assert len(calls) > 8
    assert not any(calls[1:])


def test_parameters_changed_before_the_backward_pass_are_an_error(device, calls):
    made, x = layer(device), torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    for name in ("weight", "lora_a", "lora_b"):
        y = made(x)
        with torch.no_grad():
            getattr(made, name).mul_(2)
        with pytest.raises(RuntimeError, match=r"changed in place .* before optimizer\.step"):
            y.sum().backward()
    assert calls == [True] * 3


@pytest.mark.parametrize("adapter_dtype", [torch.float16, torch.float32])
def test_large_scale_does_not_overflow_float16(device, calls, adapter_dtype):
    """s·z does not fit into float16, and the results do."""
    made = layer(device, dtype=torch.float16, adapter_dtype=adapter_dtype, alpha=2**13, bias=False)
    with torch.no_grad():
        made.lora_b.mul_(2**-13)
    x = 256 * torch.randn(3, 24, device=device, dtype=torch.float16)
    dy = torch.randn(3, 40, device=device, dtype=torch.float16) / 2**13
    got = results(made, x, dy)
    assert calls == [True]
    operands = [one.double().detach() for one in (x, made.lora_a, made.lora_b, made.magnitude)]
    x, a, b, magnitude = [one.requires_grad_() for one in operands]
    weight = made.weight.double()
    norm = (weight + made.scale * b @ a).norm(dim=1).detach()
    y = magnitude / norm * (x @ weight.T + made.scale * x @ a.T @ b.T)
    want = [y, *torch.autograd.grad(y, [x, a, b, magnitude], dy.double())]
    assert (made.scale * x @ a.T).abs().max() > torch.finfo(torch.float16).max
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() < 5e-3 * w.norm()


@pytest.mark.parametrize("bias", [True, False])
def test_result_may_be_changed_in_place(device, calls, bias):
    made = layer(device, bias=bias)
    x = torch.randn(2, 3, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    residual, dy = torch.randn(2, 2, 3, 40, device=device, dtype=torch.bfloat16)
    y = made(x)
    want = [(y + residual).detach(), *torch.autograd.grad(y, [x, made.lora_a, made.magnitude], dy)]
    y = made(x)
    y += residual
    got = [y.detach(), *torch.autograd.grad(y, [x, made.lora_a, made.magnitude], dy)]
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    with torch.no_grad():
        y = made(x)
    y += residual.requires_grad_()  # made without a gradient, and now with one
    assert y.requires_grad
    assert calls == [True] * 3


def test_second_derivative_by_the_magnitude_alone_is_an_error(device, calls):
    made, x = layer(device), torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    freeze(made).magnitude.requires_grad_(True)
    made.lora_a.requires_grad_(False)
    made.lora_b.requires_grad_(False)
    y = made(x.requires_grad_())
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert calls == [True]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (y.sum() + dx.square().sum()).backward()


def test_batched_gradients_are_an_error(device, calls):
    x = torch.randn(3, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = layer(device)(x)
    assert calls == [True]
    with pytest.raises(NotImplementedError, match="is_grads_batched=True"):
        torch.autograd.grad(y, x, torch.stack([y, y]), is_grads_batched=True)


def test_gradients_of_a_checkpoint_may_be_recorded(device, calls):
    """It gives its saved tensors once."""
    made, x = layer(device), torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    dy = torch.randn(3, 40, device=device, dtype=torch.bfloat16)
    want = results(made, x, dy)
    y = checkpoint(made, x.requires_grad_(), use_reentrant=False)
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    got = torch.autograd.grad(y, [x, *trained], dy, create_graph=True)
    for g, w in zip(got, want[1:], strict=True):
        assert torch.equal(g, w)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        got[0].float().square().sum().backward()


def test_autocast_is_part_of_a_plan(device):
    made, x = layer(device), torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    adapter = made.lora_a, made.lora_b, made.magnitude
    for dtype in (None, torch.float16, torch.bfloat16, None, torch.float16):
        with torch.autocast(x.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            found = plan.find((x, None, made.weight, None, *adapter, None), 2.0, "triton")
            y = made(x)
        assert found is not None
        assert found.dtype == y.dtype == (dtype or torch.bfloat16)


@pytest.mark.parametrize("current", [0, 1])
def test_a_call_makes_the_gpu_of_its_tensors_current(monkeypatch, current):
    """With tensors that claim to be on the second GPU. In a backward pass it is current, and a
    checkpoint's repeated call must go the way of the first one."""
    devices, find = [current], plan.find

    @contextlib.contextmanager
    def enter(_):
        devices.append(1)
        yield

    def on_second_gpu(*arguments):
        found = find(*arguments)
        found.gpu = 1
        return found

    def launch(*_):
        assert devices[-1] == 1
        raise RuntimeError("launched")

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(plan, "_PLANS", {})
    monkeypatch.setattr(plan, "find", on_second_gpu)
    monkeypatch.setattr(scales, "for_gradient", launch)
    with pytest.raises(RuntimeError, match="launched"):
        layer("cpu")(torch.randn(3, 24, dtype=torch.bfloat16))


def test_data_of_another_rank_is_refused(device, calls):
    """A layer of that rank has made a plan of the same shapes."""
    made, other = layer(device), layer(device, rank=8, alpha=16)
    x = torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    other(x)
    made.lora_a.data, made.lora_b.data = other.lora_a.data, other.lora_b.data
    with pytest.raises(ValueError, match=r"lora_a is set to the shape \(8, 24\); .*rank 4, .*"):
        made(x)
    assert calls == [True, False]


def test_a_layer_may_have_a_parametrised_bias(device):
    made, x = layer(device), torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        made.bias.copy_(torch.randn_like(made.bias))
        want = made(x) - made.bias
    torch.nn.utils.parametrize.register_parametrization(made, "bias", torch.nn.Tanh())
    got = made(x)
    assert (got - torch.tanh(made.parametrizations.bias.original) - want).abs().max() < 0.1


def test_inference_tensors_need_no_versions_without_a_gradient(device, calls):
    with torch.inference_mode():
        made = layer(device)
        x = torch.randn(3, 24, device=device, dtype=torch.bfloat16)
        want = made(x)
    made.requires_grad_(False)
    assert torch.equal(made(x), want)
    assert calls == [True] * 2


@pytest.mark.parametrize("dropout_mode", [None, "adapter", "input"])
def test_a_mode_may_see_one_pass_of_a_checkpoint(device, calls, dropout_mode):
    """The repeated call goes the way of the first one, and shows the mode all products."""
    options = {"dropout": 0.5, "dropout_mode": dropout_mode} if dropout_mode else {}
    made = layer(device, **options)
    dy = torch.randn(6, 40, device=device, dtype=torch.bfloat16)
    x = torch.randn(6, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    leaves, found, flops = [x, made.lora_a, made.lora_b, made.magnitude], {}, {}
    # Once more without a mode at the end: the layer is not bound to the long way.
    for parts in [(False, False), (True, True), (True, False), (False, True), (False, False)]:
        modes = [FlopCounterMode(display=False) if on else contextlib.nullcontext() for on in parts]
        torch.manual_seed(3)
        with modes[0]:
            y = checkpoint(made, x, use_reentrant=False)
        with modes[1]:
            y.backward(dy)
        found[parts] = [leaf.grad for leaf in leaves]
        x.grad = None
        made.zero_grad()
        flops[parts] = [getattr(mode, "get_total_flops", int)() for mode in modes]
        for g, w in zip(found[parts], found[False, False], strict=True):
            torch.testing.assert_close(g, w, rtol=2**-6, atol=2**-6 * w.abs().max().item())
    # The long way asks twice.
    assert calls == [True] * 2 + [False] * 8 + [True] * 4
    assert flops[True, False][0] == flops[True, True][0]
    # The first pass's norm is used again.
    norm = 2 * made.weight.numel() * made.rank
    assert flops[False, True][1] == flops[True, True][1] - norm


@pytest.mark.parametrize("implementation", ["triton", "eager"])
def test_a_layers_flops_are_those_of_its_products(device, implementation):
    made = layer(device, implementation=implementation)
    x = torch.randn(6, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as got:
        made(x).sum().backward()
    with FlopCounterMode(display=False) as want:
        a, b = (one.detach().bfloat16().requires_grad_() for one in (made.lora_a, made.lora_b))
        (F.linear(x, made.weight) + F.linear(F.linear(x, a), b)).sum().backward()
        with torch.no_grad():
            if implementation == "triton":
                torch.mm(b, a)
            else:  # ‖W + sBA‖ from W Aᵀ and B(A Aᵀ)
                torch.mm(made.weight, a.T)
                torch.mm(b, torch.mm(a, a.T))
    assert got.get_total_flops() == want.get_total_flops()


def test_checkpointing_sees_fewer_tensors_than_loras(device, calls):
    """It calls Python three times for each one."""
    made, x = layer(device, bias=False), torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    saved: list[torch.Tensor] = []
    pack = lambda tensor: saved.append(tensor) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made(x.requires_grad_()).sum().backward()
    assert calls == [True]
    # x, and inner with z; of LoRA's three products: W, x, A, z and B.
    assert len(saved) == 2


@pytest.mark.parametrize(
    ("frozen", "sizes"),
    [("lora_a", [40 + 4]), ("lora_b", [24, 40]), ("magnitude", [4, 24]), ("", [24, 40 + 4])],
)
def test_nothing_is_kept_for_the_gradient_of_what_is_frozen(device, calls, frozen, sizes):
    made, x = layer(device, bias=False), torch.randn(8, 24, device=device, dtype=torch.bfloat16)
    if frozen:
        getattr(made, frozen).requires_grad_(False)
    saved = []
    pack = lambda tensor: saved.append(tensor.numel() / 8) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made(x.requires_grad_()).sum().backward()
    assert calls == [True]
    assert sorted(saved) == sizes


def test_a_plan_of_the_cpu_is_not_of_the_meta_device():
    """Neither of them has a number."""
    made, x = layer("cpu", bias=False), torch.randn(3, 24, dtype=torch.bfloat16)
    tensors = x, None, made.weight, None, made.lora_a, made.lora_b, made.magnitude, None
    runs = plan.find(tensors, 2.0, "triton") is not None
    assert runs == (TRITON_MODE == "interpreted")
    tensors = [None if one is None else one.detach().to("meta") for one in tensors]
    assert plan.find(tuple(tensors), 2.0, "triton") is None


def test_operands_may_be_strided(device, calls, monkeypatch):
    made, x = layer(device, bias=False), torch.randn(3, 24, device=device, dtype=torch.bfloat16)

    def strided(operand):
        return operand.detach().repeat_interleave(2, -1)[..., ::2]

    operands = [strided(one) for one in (x, made.weight, made.lora_a, made.lora_b, made.magnitude)]
    got = dora_linear(*operands, 2.0, implementation="triton")
    assert calls == [True]
    monkeypatch.setattr(plan, "find", lambda *_: None)
    torch.testing.assert_close(got, dora_linear(*operands, 2.0, implementation="triton"))


@pytest.fixture
def by_address(monkeypatch):
    """Notes the launches by addresses. On a CPU the interpreter gets the tensors there."""
    noted, at, ask = [], SameLaunch.at, SameLaunch._ask

    def note(launch, addresses):
        noted.append(launch)
        at(launch, addresses)

    def ask_and_keep(launch, *tensors):
        ask(launch, *tensors)
        if not tensors[0].is_cuda:
            kinds = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors]
            launch.run = functools.partial(run, launch, kinds)

    def run(launch, kinds, *passed):
        assert passed[:4] == (*launch.launch.blocks, 77)
        addresses = passed[4 : 4 + len(kinds)]
        assert passed[4 + len(kinds) :] == launch.launch.passed
        ask(launch, *map(tensor_at, addresses, kinds))

    def tensor_at(address, kind):
        if kind is None:
            return None
        dtype, shape = kind
        memory = (ctypes.c_char * (shape.numel() * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    monkeypatch.setattr(plan, "_PLANS", {})
    for launches in (one_pass_norm._passes, expand_compose._same):
        launches.cache_clear()
    monkeypatch.setattr(SameLaunch, "at", note)
    monkeypatch.setattr(SameLaunch, "_ask", ask_and_keep)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    yield noted
    for launches in (one_pass_norm._passes, expand_compose._same):
        launches.cache_clear()


# In float16: where it casts an adapter to bfloat16, the interpreter truncates.
@pytest.mark.parametrize("adapter_dtype", [torch.float16, torch.float32])
def test_kernels_launched_by_addresses_compute_the_same(
    device, calls, by_address, monkeypatch, adapter_dtype
):
    made = layer(device, dtype=torch.float16, adapter_dtype=adapter_dtype, rank=5)
    x = torch.randn(2, 5, 24, device=device, dtype=torch.float16)
    dy = torch.randn(2, 5, 40, device=device, dtype=torch.float16)
    want = results(made, x, dy)
    assert not by_address

    def launches():
        by_address.clear()
        for g, w in zip(results(made, x, dy), want, strict=True):
            assert torch.equal(g, w)
        return len(by_address)

    # The norm, perhaps its pieces, and g; expand and compose; its gradient and the magnitude's.
    norm = 2 + (adapter_dtype == torch.float32)
    assert launches() == norm + 3
    monkeypatch.setattr(runtime.launch_enter_hook, "calls", [lambda *_: None])
    assert launches() == 0
    monkeypatch.setattr(runtime.launch_enter_hook, "calls", [])
    made.magnitude.data = torch.cat([made.magnitude.data.new_zeros(1), made.magnitude.data])[1:]
    assert made.magnitude.data_ptr() % 16
    assert launches() == norm + 3 - 1
    assert all(calls)


def test_tensors_that_outlived_a_transform_go_the_long_way(device):
    made, x = layer(device), torch.randn(3, 24, device=device, dtype=torch.bfloat16)
    outlived = []
    grad(lambda lora_a: (outlived.append(lora_a), lora_a.sum())[1])(made.lora_a.detach())
    for _ in range(2):
        first, second = (
            dora_linear(
                *(x, made.weight, lora_a, made.lora_b, made.magnitude, 2.0),
                implementation="triton",
            )
            for lora_a in (made.lora_a, *outlived)
        )
        torch.testing.assert_close(first, second)
        made.requires_grad_(False)


@pytest.fixture
def norms(monkeypatch):
    """Counts the norms that are computed, by tensors and by addresses."""
    found = []

    def count(way):
        launched = getattr(SameLaunch, way)

        def counted(launch, *arguments):
            if launch.launch.kernel is one_pass_norm.kernel:
                found.append(way)
            launched(launch, *arguments)

        monkeypatch.setattr(SameLaunch, way, counted)

    count("at")
    count("_ask")
    return found


def test_norms_are_counted_in_both_ways(device, by_address, norms):
    made = layer(device, adapter_dtype=torch.bfloat16)
    norms.clear()
    for _ in range(3):
        made(torch.ones(2, 24, device=device, dtype=torch.bfloat16))
    assert norms == ["_ask", "at", "at"]
    assert by_address


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_uses_the_norm_again(device, calls, norms, adapter_dtype):
    made = layer(device, adapter_dtype=adapter_dtype)
    x = torch.randn(2, 5, 24, device=device, dtype=torch.bfloat16)
    dy = torch.randn(2, 5, 40, device=device, dtype=torch.bfloat16)
    want = results(made, x, dy)
    norms.clear()
    got = results(lambda x: checkpoint(made, x, use_reentrant=False), x, dy, made)
    assert len(norms) == 1
    assert calls == [True] * 3
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
    # A new call computes the norm again, and so does reentrant checkpointing in its second one.
    norms.clear()
    made(x)
    checkpoint(made, x.requires_grad_(), use_reentrant=True).backward(dy)
    assert len(norms) == 3


@pytest.mark.parametrize(
    ("name", "in_place"),
    [
        *itertools.product(["weight", "lora_a", "lora_b", "magnitude"], [True, False]),
        ("scale", False),
    ],
)
@pytest.mark.ci
def test_a_call_within_a_backward_pass_sees_changes(device, norms, name, in_place):
    made = layer(device)
    x = torch.randn(2, 5, 24, device=device, dtype=torch.bfloat16)
    seen = []

    def change(_):
        if name == "scale":
            made.alpha *= 2
        elif in_place:
            getattr(made, name).mul_(2)
        else:
            getattr(made, name).data = 2 * getattr(made, name).data
        with torch.enable_grad():
            seen.append(made(x))

    norms.clear()
    # Of a call without hooks no scales are kept that another call could find.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        y = made(x)
    probe = torch.ones((), requires_grad=True)
    probe.register_hook(change)
    probe.backward()
    assert len(norms) == 2
    assert torch.equal(seen[0], made(x))
    assert not torch.equal(seen[0], y)


@pytest.mark.ci
def test_a_checkpoint_repeats_its_own_first_pass(device, calls):
    """Not an older call, whose parameters were changed without PyTorch's knowledge."""
    made = layer(device)
    x = torch.randn(2, 5, 24, device=device, dtype=torch.bfloat16)
    dy = torch.randn(2, 5, 40, device=device, dtype=torch.bfloat16)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        kept = made(x)
    made.lora_b.data.mul_(3)
    inputs = x.clone().requires_grad_()
    checkpoint(made, inputs, use_reentrant=True).backward(dy)
    del kept
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    got = [inputs.grad, *[parameter.grad for parameter in trained]]
    for g, w in zip(got, results(made, x, dy)[1:], strict=True):
        assert torch.equal(g, w)


@pytest.fixture
def casts(monkeypatch):
    """The tensors that `to` is called for."""
    found, to = [], torch.Tensor.to

    def counted(tensor, *arguments, **named):
        found.append(tensor)
        return to(tensor, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    return found


def test_a_repeated_call_casts_for_its_gradient(device, calls, casts):
    made = layer(device, bias=False)
    x = torch.randn(3, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    made(x)
    y = checkpoint(made, x, use_reentrant=False)
    casts.clear()
    y.sum().backward()
    assert calls == [True] * 3
    found = [one for one in casts if one is made.lora_a or one is made.lora_b]
    assert [one is made.lora_a for one in found] == [True, False]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_call_keeps_its_casts_unless_hooks_would_drop_them(device, calls, casts, dropout):
    made = layer(device, bias=False, dropout=dropout, dropout_mode="input")
    x = torch.randn(3, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for hooks in (contextlib.nullcontext(), saved_tensors_hooks(torch.clone, torch.clone)):
        with hooks:
            y = made(x)
        for _ in range(2):
            casts.clear()
            y.sum().backward(retain_graph=True)
            found.append(sum(one is made.lora_a or one is made.lora_b for one in casts))
    assert calls == [True] * 2
    assert found == [0, 2, 2, 2]


def test_scales_are_forgotten_with_their_node():
    last, ones = scales._Last(), [torch.ones(1) for _ in range(4)]
    last.most = 3
    kept = scales.Scales((ones[0], ones[0]), (1,), None)
    last.set(ones[0], kept)
    for lora_b in ones[1:]:
        last.set(lora_b, scales.Scales((lora_b, lora_b), (1,), None))
    assert set(last.references) == {id(ones[0]), id(ones[3])}
    assert last.get(ones[0], (1,)) is kept
    assert last.get(ones[0], (2,)) is None
    assert last.get(ones[1], (1,)) is None
