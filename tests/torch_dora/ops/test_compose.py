import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity import oracle, tolerances
from torch_dora.ops import compose, compose_delta

OPS = {"compose": compose, "compose_delta": compose_delta}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = ["eager", "triton"]


def result_and_gradients(tensors, dy, implementation, op=compose, scale=0.7):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = op(*leaves, scale, implementation=implementation)
    return y, *torch.autograd.grad(y, leaves, dy)


@pytest.fixture
def check(assert_within):
    """Result and gradients of an operator against the oracle, within the derived bounds."""

    def run(op, operands, scale, implementation):
        *tensors, dy = operands
        base, lora, g = tensors
        y, *grads = result_and_gradients(tensors, dy, implementation, OPS[op], scale)
        dtype, delta = base.dtype, op == "compose_delta"
        assert y.dtype == dtype
        exact = getattr(oracle, op)(base, lora, g, scale)
        bound = getattr(tolerances, op)(base, lora, g, scale, dtype)
        assert_within(y, exact, bound, implementation)
        exact = getattr(oracle, f"{op}_grads")(dy, base, lora, g, scale)
        bound = tolerances.compose_grads(dy, base, lora, g, scale, dtype, delta=delta)
        for grad, tensor, name in zip(grads, tensors, ["d_base", "d_lora", "d_g"], strict=True):
            assert grad.dtype == tensor.dtype
            assert_within(grad, getattr(exact, name), getattr(bound, name), implementation)

    return run


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *itertools.product([(7, 40), (70, 300)], DTYPES),
        ((2, 3, 17), torch.float32),
        ((5,), torch.bfloat16),
        ((1, 1), torch.float16),
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", OPS)
def test_agrees_with_the_oracle(operands, check, op, implementation, shape, dtype):
    check(op, operands(shape, dtype), 0.7, implementation)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    out=st.integers(1, 40),
    scale=st.floats(-4, 4, width=32),
    spread=st.sampled_from([0.0, 0.0015, 1.0]),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(OPS)),
    implementation=st.sampled_from(IMPLEMENTATIONS),
)
@pytest.mark.ci
def test_any_shape_scale_and_spread(
    operands, check, rows, out, scale, spread, dtype, op, implementation
):
    check(op, operands((rows, out), dtype, spread), scale, implementation)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows_at_all(operands, op, implementation):
    base, lora, g, dy = operands((0, 8))
    leaves = [t.requires_grad_() for t in (base, lora, g)]
    y = OPS[op](*leaves, 0.7, implementation=implementation)
    assert y.shape == (0, 8)
    assert torch.autograd.grad(y, leaves, dy)[2].tolist() == [0.0] * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_near_one_it_beats_the_naive_form(operands, dtype, implementation):
    base, lora, g, _ = operands((64, 256), dtype, spread=0.0015)
    lora = 0.01 * lora
    exact = oracle.compose_delta(base, lora, g, 0.5)
    ours = compose_delta(base, lora, g, 0.5, implementation=implementation)
    narrow = g.to(dtype)
    naive = narrow * (0.5 * lora + base) - base
    peak = float((ours.double() - exact).abs().max())
    naive_peak = float((naive.double() - exact).abs().max())
    assert naive_peak >= tolerances.caps.STABLE_OVER_NAIVE * peak


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_the_function_in_fp64(operands, op):
    base, lora, g, _ = (t.requires_grad_() for t in operands((3, 5), torch.float64))
    torch.autograd.gradcheck(lambda *t: OPS[op](*t, 0.7), (base, lora, g))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_contiguous_operands(operands, implementation):
    base, lora, g, dy = operands((6, 40))
    strided = (base.T.contiguous().T, lora.repeat(1, 2)[:, :40], g.repeat_interleave(2)[::2])
    assert not any(t.is_contiguous() for t in strided)
    got, want = (
        result_and_gradients(one, dy, implementation) for one in (strided, (base, lora, g))
    )
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_expanded_cotangent(operands, implementation):
    base, lora, g, _ = (t.requires_grad_() for t in operands((6, 40)))
    compose(base, lora, g, 0.7, implementation=implementation).sum().backward()
    assert base.grad is not None
    torch.testing.assert_close(base.grad, g.detach().expand(6, 40))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 1], [1, 2]])
def test_only_the_wanted_gradients(operands, implementation, wanted):
    tensors = operands((6, 40))[:3]
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    compose(*leaves, 0.7, implementation=implementation).square().sum().backward()
    assert [i for i, leaf in enumerate(leaves) if leaf.grad is not None] == wanted


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inner_is_kept_only_where_g_is_differentiated(operands, implementation):
    base, lora, g, _ = operands((6, 40))

    def kept(trained: bool) -> list[tuple[int, ...]]:
        shapes = []
        base.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: shapes.append(tuple(t.shape)), lambda t: t
        ):
            compose(base, lora, g.requires_grad_(trained), 0.7, implementation=implementation)
        return shapes

    assert (6, 40) in kept(True)
    assert (6, 40) not in kept(False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.ci
def test_the_same_bits_every_time(operands, implementation):
    *tensors, dy = operands((70, 130), torch.bfloat16)
    got, want = (result_and_gradients(tensors, dy, implementation) for _ in range(2))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_stays_nan(operands, implementation):
    base, lora, g, _ = operands((4, 8))
    g[3] = torch.nan
    y = compose(base, lora, g, 0.7, implementation=implementation)
    assert y.isnan().nonzero()[:, 1].tolist() == [3] * 4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"base": torch.tensor(1.0)}, ValueError, r"base has shape \(\); expected \[..., out\]"),
        ({"base": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "base has dtype torch.int64"),
        ({"lora": torch.ones(4, 4)}, ValueError, r"lora has shape \(4, 4\); expected \(3, 4\)"),
        ({"lora": None}, TypeError, "lora must be a torch.Tensor, got NoneType"),
        ({"g": torch.ones(3)}, ValueError, r"g has shape \(3,\); expected \(4\)"),
        ({"scale": float("inf")}, ValueError, "scale is inf"),
        ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a Python number, got Tensor"),
        ({"implementation": "xla"}, ValueError, "'xla' is not a torch implementation"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_named(op, change, error, message):
    arguments = {
        "base": torch.ones(3, 4),
        "lora": torch.ones(3, 4),
        "g": torch.ones(4),
        "scale": 1.0,
    }
    with pytest.raises(error, match=message):
        OPS[op](**arguments | change)
