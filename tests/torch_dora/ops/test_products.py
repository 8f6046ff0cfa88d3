import pytest
import torch

from torch_dora.ops.products import pieces, product, split, split_product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_pieces_add_up_exactly(dtype):
    x = (torch.randn(200) * 10.0 ** torch.linspace(-4, 4, 200)).to(dtype)
    parts = split(x)
    assert len(parts) == pieces(x)
    assert {part.dtype for part in parts} == {torch.bfloat16}
    assert torch.equal(sum(part.double() for part in parts), x.double())


@pytest.mark.parametrize("a_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("b_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_by_pieces_is_as_good_as_float32(a_dtype, b_dtype):
    a, b = torch.randn(9, 31).to(a_dtype), torch.randn(31, 5).to(b_dtype)
    exact = a.double() @ b.double()

    # What tensor cores do, without their fp32 accumulation's rounding: what is left is the split's.
    def mm(x, y):
        assert x.dtype == y.dtype == torch.bfloat16
        return x.double() @ y.double()

    error = (split_product(a, b, mm) - exact).abs()
    assert bool((error <= 3 * 2.0**-24 * (a.double().abs() @ b.double().abs())).all())
    if torch.float32 not in (a_dtype, b_dtype) or torch.bfloat16 in (a_dtype, b_dtype):
        assert float(error.max()) < 1e-13


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)]
)
@pytest.mark.usefixtures("tf32_allowed")
def test_product_is_float32_even_where_tf32_is_allowed(device, dtypes):
    a = torch.randn(33, 500, device=device).to(dtypes[0])
    b = torch.randn(500, 20, device=device).to(dtypes[1])
    got = product(a, b, torch.float32)
    assert got.dtype == torch.float32
    exact, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert bool(((got - exact).abs() <= 8 * 2.0**-24 * terms).all())


def test_float64_is_computed_in_float64(device):
    a, b = torch.randn(4, 9, device=device, dtype=torch.float64), torch.randn(9, 3, device=device)
    assert torch.equal(product(a, b, torch.float64), a @ b.double())
