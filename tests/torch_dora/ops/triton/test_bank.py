"""Rows with adapters of their own by Triton's kernels: shrink, and expand with what follows it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dora_common.triton import bank_shrink as shared
from torch_dora.ops.bank import Slots, bank_linear
from torch_dora.ops.triton import bank_expand, bank_shrink

HALVES = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
IDS = [2, -1, 0, 4, -2, 1, 3]


def drawn(time, features, out, ranks, dtype, device):
    """Ranks from none to all; a slot that nothing is in; an id of no slot on either side."""
    ranked = torch.tensor([1, ranks, 0, 0])
    there = torch.arange(ranks)[None, :, None] < ranked[:, None, None]
    g = 1 + 0.1 * torch.randn(4, out)
    g[3] = torch.nan
    slots = Slots(
        (torch.randn(4, ranks, features) * features**-0.5 * there).to(device, dtype),
        (torch.randn(4, ranks, out) * ranks**-0.5 * there).to(device, dtype),
        g.to(device),
        torch.tensor([0.5, 1.5, 2.0, 0.0], device=device),
        ranked.to(device, torch.int32),
    )
    y = torch.randn(len(IDS), *time, out).to(device, dtype)
    x = torch.randn(len(IDS), *time, features).to(device, dtype)
    return y, x, slots, torch.tensor(IDS, device=device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("time", "features", "out", "ranks"),
    [((), 40, 24, 5), ((33,), 300, 140, 24), ((2, 3), 16, 8, 16)],
)
def test_equals_the_definition_in_fp64(
    assert_within, dtype, biased, time, features, out, ranks, device
):
    y, x, slots, ids = drawn(time, features, out, ranks, dtype, device)
    bias = torch.randn(out, device=device).to(dtype) if biased else None
    found = bank_linear(y, x, slots, ids, bias, "triton")
    assert (found.shape, found.dtype) == (y.shape, y.dtype)
    unit, shift = UNIT[dtype], 0 if bias is None else bias.double()
    for row, slot in enumerate(IDS):
        if slot == -1:
            assert torch.equal(found[row], y[row])
            continue
        if slot in (-2, 3, 4):
            assert found[row].isnan().all()
            continue
        a, b, g = (t[slot].double() for t in (slots.lora_a, slots.lora_b, slots.g))
        scale = float(slots.scale[slot])
        z = x[row].double() @ a.T
        inner = (y[row].double() - shift) + scale * (z @ b)
        want = g * inner + shift
        # z is rounded once, and sums are taken in fp32.
        slack = unit * z.abs() + 2.0**-20 * (x[row].double().abs() @ a.abs().T)
        bound = g.abs() * scale * (slack @ b.abs()) + unit * want.abs()
        assert_within(found[row], want, bound + 2.0**-20 * (1 + want.abs()), "triton")


def test_rows_of_one_slot_are_read_for_together(device):
    """As what is held to fp64 above computes them, one by one."""
    y, x, slots, ids = drawn((), 80, 40, 24, torch.bfloat16, device)
    ids = torch.cat([ids, ids.new_full((40,), 1)])[torch.randperm(len(ids) + 40)]
    y, x = (one.repeat(8, 1)[: len(ids)] for one in (y, x))
    row_groups = bank_shrink.group_rows(ids.cpu())
    assert row_groups.shape == (6 + 3, 16)  # 41 rows of one slot, six that are alone
    assert sorted(row_groups[row_groups >= 0].tolist()) == list(range(len(ids)))
    found = bank_linear(y, x, slots, ids, None, "triton", row_groups.to(device))
    each = bank_linear(y, x, slots, ids, None, "triton")
    assert torch.equal(found[ids == -1], y[ids == -1])
    # z is rounded after another split of its sum.
    torch.testing.assert_close(found, each, rtol=0.01, atol=0.01, equal_nan=True)


def test_ids_may_be_a_view(device):
    y, x, slots, ids = drawn((), 16, 8, 4, torch.bfloat16, device)
    strided = torch.stack([ids, torch.full_like(ids, 2)], 1).flatten()[::2]
    found = bank_linear(y, x, slots, strided, None, "triton")
    expected = bank_linear(y, x, slots, ids, None, "triton")
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_is_taken_where_no_gradient_is_asked_for(device):
    y, x, slots, ids = drawn((), 16, 8, 4, torch.bfloat16, device)
    y.requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient"):
        bank_linear(y, x, slots, ids, None, "triton")
    bank_linear(y, x, slots, ids, None).nan_to_num().sum().backward()
    assert y.grad is not None
    with torch.no_grad():
        assert bank_linear(y, x, slots, ids, None, "triton").shape == y.shape


def test_refuses_with_a_reason(device):
    y, x, slots, ids = drawn((), 16, 8, 4, torch.bfloat16, device)
    with pytest.raises(NotImplementedError, match="tensor cores"):
        bank_linear(y.float(), x.float(), slots, ids, None, "triton")
    with pytest.raises(NotImplementedError, match=r"the result torch\.float32; takes one dtype"):
        bank_linear(y.float(), x, slots, ids, None, "triton")
    wide = slots._replace(lora_a=slots.lora_a.new_zeros(4, 257, 16))
    with pytest.raises(NotImplementedError, match="room for rank 257"):
        bank_linear(y, x, wide, ids, None, "triton")


def test_the_product_is_split_where_rows_are_few(device, monkeypatch):
    """A part for each split, and the same sum."""
    _, x, slots, ids = drawn((1,), 700, 8, 16, torch.float16, device)
    whole = bank_shrink.launch(x, slots.lora_a, ids, None, slots.rank)
    monkeypatch.setattr(shared, "PROGRAMS", 1)
    one = bank_shrink.launch(x, slots.lora_a, ids, None, slots.rank)
    assert torch.allclose(one, whole, atol=1e-5)


def test_the_operator_keeps_its_contract_with_torch(device):
    y, x, slots, ids = drawn((3,), 16, 8, 4, torch.bfloat16, device)
    ids = ids.clamp(-1, 2)  # a NaN equals no other
    torch.library.opcheck(bank_expand.bank_linear.op, (y, x, *slots, ids, None, None))


def test_flops_are_those_of_the_definition(device):
    operands = *drawn((2,), 16, 8, 5, torch.bfloat16, device), None
    with FlopCounterMode(display=False) as found:
        bank_linear(*operands, "triton")
    with FlopCounterMode(display=False) as want:
        bank_linear(*operands, "eager")
    assert found.get_total_flops() == want.get_total_flops() > 0
