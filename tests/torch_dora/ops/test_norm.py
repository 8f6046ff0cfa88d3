import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from parity import oracle, tolerances
from torch_dora.ops import compose, dora_linear, factored_norm, magnitude_scale
from torch_dora.ops import norm as norm_module
from torch_dora.ops.triton import norm_assembly

HALVES = [torch.bfloat16, torch.float16]
MIXED = [
    (torch.float32, torch.float32),
    *((half, half) for half in HALVES),
    *((half, torch.float32) for half in HALVES),
    (torch.float32, torch.bfloat16),
]


def triple(layer):
    return layer.weight, layer.lora_a, layer.lora_b


@pytest.mark.parametrize(("dtype", "adapter_dtype"), MIXED)
@pytest.mark.parametrize("sizes", [(40, 56, 8), (129, 37, 3), (1, 5, 1), (64, 1, 70)])
@pytest.mark.parametrize("implementation", ["eager", "triton"])
def test_agrees_with_the_oracle(
    adapted, assert_within, dtype, adapter_dtype, sizes, implementation
):
    layer = adapted(sizes=sizes, dtype=dtype, adapter_dtype=adapter_dtype)
    norm = factored_norm(*triple(layer), 0.7, implementation=implementation)
    assert norm.dtype == torch.float32
    assert_within(norm, oracle.norm(*triple(layer), 0.7), tolerances.norm(*triple(layer), 0.7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fp64_is_computed_in_fp64(adapted, dtype):
    adapter_dtype = torch.float32 if dtype == torch.float64 else torch.float64
    layer = adapted(dtype=dtype, adapter_dtype=adapter_dtype)
    norm = factored_norm(*triple(layer), 0.7)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, oracle.norm(*triple(layer), 0.7), rtol=1e-14, atol=0)


@pytest.mark.usefixtures("tf32_allowed")
def test_tf32_is_never_used(adapted, assert_within):
    layer = adapted(sizes=(512, 64, 16))
    norm = factored_norm(*triple(layer), 1.3)
    assert_within(norm, oracle.norm(*triple(layer), 1.3), tolerances.norm(*triple(layer), 1.3))


def test_cancelled_rows_are_small_and_finite(adapted, assert_within):
    layer = adapted(sizes=(64, 32, 16))
    weight = (-0.5 * layer.lora_b.double() @ layer.lora_a.double()).float()
    norm = factored_norm(weight, layer.lora_a, layer.lora_b, 0.5)
    assert bool(norm.isfinite().all())
    exact = oracle.norm(weight, layer.lora_a, layer.lora_b, 0.5)
    assert_within(norm, exact, tolerances.norm(weight, layer.lora_a, layer.lora_b, 0.5))


@pytest.mark.parametrize("scale", [0.0, 1.5])
def test_a_zero_row_has_norm_zero_and_a_finite_g(adapted, scale):
    layer = adapted()
    layer.weight[3] = 0
    layer.lora_b[3] = 0
    norm = factored_norm(*triple(layer), scale)
    assert norm[3] == 0
    assert bool(magnitude_scale(layer.magnitude, norm, torch.bfloat16).isfinite().all())


@pytest.mark.parametrize("where", ["weight", "lora_a", "lora_b"])
@pytest.mark.parametrize("implementation", ["eager", "triton"])
def test_nan_stays_nan(adapted, where, implementation):
    layer = adapted()
    getattr(layer, where)[2, 1] = torch.nan
    norm = factored_norm(*triple(layer), 0.7, implementation=implementation)
    rows = norm.isnan().nonzero().flatten().tolist()
    assert rows == (list(range(56)) if where == "lora_a" else [2])


def test_scale_zero_is_the_weights_norm_whatever_the_adapter(adapted):
    layer = adapted()
    layer.lora_a[0, 0] = torch.inf
    norm = factored_norm(*triple(layer), 0.0)
    torch.testing.assert_close(norm, layer.weight.norm(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_named_implementation_runs_at_scale_zero_too(adapted, dtype, monkeypatch):
    layer = adapted(dtype=dtype)
    assemble, calls = norm_assembly.launch, []
    monkeypatch.setattr(norm_assembly, "launch", lambda *a: (calls.append(a), assemble(*a))[1])
    norm = factored_norm(*triple(layer), 0.0, implementation="triton")
    assert len(calls) == 1
    assert torch.equal(norm, factored_norm(*triple(layer), 0.0, implementation="eager"))


@pytest.mark.parametrize(
    "scale", [np.float32(0.7), np.float64(0.7), np.int64(2), Fraction(7, 10)], ids=repr
)
def test_every_real_number_is_a_scale(adapted, scale):
    layer = adapted()
    expected = factored_norm(*triple(layer), float(scale))
    assert torch.equal(factored_norm(*triple(layer), scale), expected)
    y = dora_linear(layer.x, *triple(layer), layer.magnitude, scale)
    assert torch.equal(y, dora_linear(layer.x, *triple(layer), layer.magnitude, float(scale)))
    assert torch.equal(
        compose(y, y, layer.magnitude, scale), compose(y, y, layer.magnitude, float(scale))
    )


def test_no_gradient_flows(adapted):
    layer = adapted()
    leaves = [t.requires_grad_() for t in triple(layer)]
    assert not factored_norm(*leaves, 0.7).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_contiguous_operands(adapted, assert_within, dtype):
    layer = adapted(dtype=dtype)
    strided = [t.T.contiguous().T for t in triple(layer)]
    assert not any(t.is_contiguous() for t in strided)
    exact, bound = oracle.norm(*triple(layer), 0.7), tolerances.norm(*triple(layer), 0.7)
    assert_within(factored_norm(*strided, 0.7), exact, bound)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 90), st.integers(1, 20)),
    scale=st.floats(-8, 8, width=32),
    chunk_bytes=st.sampled_from([100, 200_000, 500_000, 2**28]),
    dtypes=st.sampled_from(MIXED),
)
def test_any_size_scale_and_budget(adapted, assert_within, sizes, scale, chunk_bytes, dtypes):
    layer = adapted(sizes=sizes, dtype=dtypes[0], adapter_dtype=dtypes[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_module, "CHUNK_BYTES", chunk_bytes)
        norm = factored_norm(*triple(layer), scale)
    exact, bound = oracle.norm(*triple(layer), scale), tolerances.norm(*triple(layer), scale)
    assert_within(norm, exact, bound)


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of live results of operators, at most at once."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in inputs and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, key, size):
        self.seen.discard(key)
        self.live -= size


@pytest.mark.parametrize("dtypes", MIXED)
@pytest.mark.parametrize("budget", [150_000, pytest.param(400_000, marks=pytest.mark.slow)])
def test_the_budget_bounds_the_temporaries(adapted, monkeypatch, dtypes, budget):
    layer = adapted(sizes=(768, 640, 16), dtype=dtypes[0], adapter_dtype=dtypes[1])
    whole = norm_module._adapter_terms(*triple(layer), torch.float32)
    monkeypatch.setattr(norm_module, "CHUNK_BYTES", budget)
    with PeakBytes() as memory:
        tiled = norm_module._adapter_terms(*triple(layer), torch.float32)
    assert 0 < memory.peak <= budget
    torch.testing.assert_close(tiled, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-6)])
def test_magnitude_scale_divides_by_the_norm_or_the_dtypes_eps(device, dtype, eps):
    magnitude = torch.tensor([2.0, 3.0, 1.0, 5.0], device=device)
    norm = torch.tensor([4.0, 0.0, torch.nan, eps / 2], device=device)
    g = magnitude_scale(magnitude, norm, dtype)
    assert g.dtype == torch.float32
    want = torch.tensor([0.5, 3.0 / eps, torch.nan, 5.0 / eps], device=device)
    torch.testing.assert_close(g, want, equal_nan=True)


def test_magnitude_scale_gradient_reaches_the_magnitude_alone(device):
    magnitude = torch.tensor([2.0, 3.0], device=device, requires_grad=True)
    norm = torch.tensor([4.0, 8.0], device=device, requires_grad=True)
    magnitude_scale(magnitude, norm, torch.float32).sum().backward()
    assert magnitude.grad is not None
    assert magnitude.grad.tolist() == [0.25, 0.125]
    assert norm.grad is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.ones(6)}, ValueError, r"weight has shape \(6,\).*\[out, in\]"),
        ({"weight": torch.ones(6, 8, dtype=torch.int8)}, TypeError, "weight has dtype torch.int8"),
        ({"weight": [[1.0]]}, TypeError, "weight must be a torch.Tensor, got list"),
        (
            {"lora_a": torch.ones(2, 7)},
            ValueError,
            r"lora_a has shape \(2, 7\); expected \(any, 8\)",
        ),
        ({"lora_a": torch.ones(0, 8)}, ValueError, "rank is 0"),
        ({"lora_b": torch.ones(2, 6)}, ValueError, r"lora_b has shape \(2, 6\); expected \(6, 2\)"),
        ({"scale": float("nan")}, ValueError, "scale is nan"),
        ({"scale": "1"}, TypeError, "scale must be a Python number, got str"),
        ({"scale": True}, TypeError, "got bool"),
        ({"scale": np.bool_(True)}, TypeError, "got bool"),
        ({"scale": torch.tensor(1.0)}, TypeError, "got Tensor"),
        ({"scale": np.float32("inf")}, ValueError, "scale is inf"),
        ({"implementation": "mosaic"}, ValueError, "'mosaic' is not a torch implementation"),
    ],
)
def test_bad_input_is_named(change, error, message):
    arguments = {
        "weight": torch.ones(6, 8),
        "lora_a": torch.ones(2, 8),
        "lora_b": torch.ones(6, 2),
        "scale": 1.0,
    }
    with pytest.raises(error, match=message):
        factored_norm(**arguments | change)


def test_magnitude_scale_names_bad_input():
    with pytest.raises(ValueError, match=r"norm has shape \(3,\); expected \(2\)"):
        magnitude_scale(torch.ones(2), torch.ones(3), torch.float32)
    with pytest.raises(TypeError, match=r"dtype is torch\.int32"):
        magnitude_scale(torch.ones(2), torch.ones(2), torch.int32)
