"""The kernels for rows of one token in a bank: `bank_rows` and `bank_decode`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.bank_slots import Slots, compose_rows, rows_of
from jax_dora.ops.mosaic.bank import bank_decode, bank_rows, bank_rows_sizes
from jax_dora.ops.mosaic.bank.bank_rows import refuses
from jax_dora.ops.mosaic.bank.bank_rows_sizes import Member
from jax_dora.ops.mosaic.hopper.limits import RESERVED, SHARED_MEMORY
from parity import tolerances
from parity.oracle import fp64
from tests.jax_dora.bank.adapters import bank_linear
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import slow, thinned

SLOTS = 8


def operands(seed, rows, n_in, out, rank, dtype, layers=2, slots=SLOTS):
    """Returns adapters of ranks up to `rank`, one of them of rank 0, and one empty slot."""
    rng = np.random.default_rng(seed)

    def normal(*shape, deviation=1.0):
        return jnp.asarray(deviation * rng.standard_normal(shape, np.float32))

    held = layers * slots
    ranks = rng.integers(1, rank + 1, held).astype(np.int32)
    ranks[-3:] = [rank, 0, 0]
    there = jnp.asarray(np.arange(rank) >= rank - ranks[:, None])[..., None]
    bank = Slots(
        jnp.where(there, normal(held, rank, n_in, deviation=n_in**-0.5), 0).astype(dtype),
        jnp.where(there, normal(held, rank, out, deviation=rank**-0.5), 0).astype(dtype),
        (1 + normal(held, out, deviation=0.1)).at[-1].set(jnp.nan),
        jnp.asarray(rng.uniform(0.5, 2, held), jnp.float32),
        jnp.asarray(ranks),
    )
    ids = rng.integers(-1, slots + 1, rows).astype(np.int32)
    ids[:1] = slots - 3
    base, x = normal(rows, out).astype(dtype), normal(rows, n_in).astype(dtype)
    return base, x, bank, jnp.asarray(ids), normal(out)


def run(arrays, layer, *, slots=SLOTS, with_bias=True, kernel=bank_rows, config=None):
    base, x, bank, ids, bias = arrays
    call = (*x.shape, base.shape[1], slots, bank.lora_a.shape[1], x.dtype, bank.lora_a.dtype)
    assert kernel.refuses(*call) is None
    first = jnp.int32(layer * slots)
    member = Member(bank.lora_a, bank.lora_b, bank.rank, first)
    knobs = {"config": config or kernel.config(*call), "sm_count": 132}
    (lora,) = kernel.launch(x, (member,), ids, slots=slots, **knobs)
    without = (np.asarray(ids) < 0) | (np.asarray(ids) >= slots)
    assert not np.any(np.asarray(lora, np.float32)[without])
    rows = rows_of(bank, ids, first, slots, jnp.float32)
    y = compose_rows(base[:, None], lora[:, None], rows, bias if with_bias else None)
    return jax.block_until_ready(y[:, 0])


def check(arrays, y, layer, *, slots=SLOTS, with_bias=True):
    base, x, bank, ids, bias = arrays
    u = tolerances.unit_roundoff(base.dtype)
    assert y.dtype == base.dtype
    for row, one in enumerate(np.asarray(ids)):
        at = layer * slots + one
        exact, bound = fp64(base[row]), 0.0
        if one == slots or (one >= 0 and np.isnan(fp64(bank.g[at])).any()):
            assert np.isnan(fp64(y[row])).all(), row
            continue
        if one >= 0 and bank.rank[at]:
            left, a, b, g = map(fp64, (x[row], bank.lora_a[at], bank.lora_b[at], bank.g[at]))
            z, s = left @ a.T, float(bank.scale[at])
            slack = 2 * u * abs(z) + tolerances.accumulation(
                len(left), z, tolerances.two_norm_of_products(left[None], a.T)[0]
            )
            exact = g * (exact + s * z @ b)
            # The adapter's product is rounded before it is added.
            bound = abs(g) * s * (slack @ abs(b) + tolerances.rounding(z @ b, y.dtype))
        elif one >= 0:
            exact = fp64(bank.g[at]) * exact
        elif not with_bias:
            assert jnp.array_equal(y[row], base[row])
        if with_bias:
            exact = exact + fp64(bias)
        bound = bound + tolerances.rounding(exact, y.dtype) + 1e-6 * (1 + abs(exact))
        assert np.all(abs(fp64(y[row]) - exact) <= bound), row


@pytest.mark.ci
@pytest.mark.parametrize("rows", [70, 20])
def test_more_rows_agree_with_fp64(on_mosaic, rows):
    """Covers ragged rows, a layer of a stack, several tiles of `in` and of `out`, and a bias.

    70 rows have two tiles. With 20 rows there are fewer stages than slots, so that a stage has
    elements of an earlier slot beyond a slot's rank.
    """
    arrays = operands(0, rows, 192, 128, 24, jnp.bfloat16, slots=12)
    with on_mosaic():
        y = run(arrays, 1, slots=12)
    check(arrays, y, 1, slots=12)


@pytest.mark.ci
def test_a_thread_block_has_several_slices(on_mosaic):
    """The last thread block's second slice is past the end of x and A, and there are more slots in
    use than stages."""
    arrays = operands(7, 20, 320, 64, 24, jnp.bfloat16, slots=12)
    with on_mosaic():
        y = run(arrays, 1, slots=12, config=bank_rows_sizes.Config(2, 4, 4))
    check(arrays, y, 1, slots=12)


@pytest.mark.ci
def test_single_rows_and_ranks_above_a_tile_agree_with_fp64(on_mosaic):
    arrays = operands(1, 3, 64, 64, 72, jnp.float16, layers=1)
    with on_mosaic():
        y = run(arrays, 0, with_bias=False)
    check(arrays, y, 0, with_bias=False)


@pytest.mark.parametrize(
    ("rows", "n_in", "rank", "dtype", "with_bias"),
    [(5, 192, 24, jnp.bfloat16, True), slow(8, 640, 64, jnp.float16, False)],
)
@pytest.mark.ci
def test_few_rows_agree_with_fp64(on_mosaic, rows, n_in, rank, dtype, with_bias):
    """Covers ragged rows; 640 features have more tiles than there are stages."""
    arrays = operands(6, rows, n_in, 128, rank, dtype, slots=16)
    with on_mosaic():
        y = run(arrays, 1, with_bias=with_bias, kernel=bank_decode, slots=16)
    check(arrays, y, 1, with_bias=with_bias, slots=16)


@pytest.mark.ci
@pytest.mark.parametrize("kernel", [bank_rows, bank_decode])
def test_projections_of_the_same_x_equal_single_projections(on_mosaic, kernel):
    """The results are equal bit for bit, for different widths and layers of a stack."""
    one, other = (
        operands(seed, 5, 128, out, 24, jnp.bfloat16) for seed, out in ((4, 64), (5, 128))
    )
    (x, ids), slots = one[1::2], SLOTS
    members = [
        Member(bank.lora_a, bank.lora_b, bank.rank, jnp.int32(layer * slots))
        for layer, (_, _, bank, _, _) in enumerate((one, other))
    ]

    def run(members):
        out = sum(one.lora_b.shape[2] for one in members)
        call = (*x.shape, out, slots, 24, x.dtype, x.dtype)
        config = kernel.config(*call, members=len(members))
        return kernel.launch(x, members, ids, slots=slots, config=config, sm_count=132)

    with on_mosaic():
        together = jax.block_until_ready(run(members))
        alone = [jax.block_until_ready(run([one]))[0] for one in members]
    for y, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(y.astype(np.float32), expected.astype(np.float32))


def test_a_plan_names_each_slot_in_use_once():
    ids = jnp.asarray([5, -1, 2, 5] + [8] * 60 + [2, 7, 2], jnp.int32)
    first, second = np.asarray(bank_rows_sizes.plan(ids, SLOTS))
    assert first[: 1 + first[0]].tolist() == [2, 2, 5]
    assert second[: 1 + second[0]].tolist() == [2, 2, 7]
    assert first[64:].tolist() == [1, -1, 0, 1] + [-2] * 60
    assert second[64:].tolist() == [0, 1, 0] + [-1] * 61


@pytest.mark.parametrize(
    ("rows", "n_in", "out", "slots", "rank"),
    thinned(
        [
            (256, 14336, 4096, 64, 64),
            (64, 4096, 14336, 1024, 64),
            (8, 4096, 14336, 64, 64),
            (8, 4096, 14336, 64, 72),
            (1, 4096, 1024, 4, 8),
            (130, 4096, 4096, 64, 128),
            (256, 14336, 4096, 64, 128),
            (256, 28672, 8192, 64, 64),
            (512, 4096, 4096, 64, 64),
        ],
        [(64, 4096, 14336, 1024, 64), (256, 14336, 4096, 64, 128)],
    ),
)
@pytest.mark.ci
def test_lowers_for_hopper_at_full_size(rows, n_in, out, slots, rank):
    f32, held = jnp.float32, 2 * slots
    bank = Slots(
        aval(held, rank, n_in),
        aval(held, rank, out),
        aval(held, out, dtype=f32),
        aval(held, dtype=f32),
        aval(held, dtype=jnp.int32),
    )
    ids, first = aval(rows, dtype=jnp.int32), aval(dtype=jnp.int32)

    def call(base, x, bank, ids, first):
        part = {"first": first, "slot_count": slots}
        return bank_linear(base, x, bank, ids, **part, implementation="mosaic")

    text = for_cuda(call, aval(rows, 1, out), aval(rows, 1, n_in), bank, ids, first)
    name = "dora_bank_decode" if rows <= 8 and rank <= 64 else "dora_bank_rows"
    assert f"{name}_shrink" in text
    assert f"{name}_expand" in text


@pytest.mark.parametrize("n_in", [64, 4096, 14336, 28672, 53248])
def test_the_tiles_fit_into_shared_memory(n_in):
    """Counts the shared memory of both kernels: the stages, the rows and the results."""
    sizes = itertools.product((1, 64, 130, 256, 512), (64, 14336), (4, 64, 1024), (8, 64, 96, 128))
    for rows, out, slots, rank in sizes:
        call = (rows, n_in, out, slots, rank, jnp.bfloat16, jnp.bfloat16)
        assert refuses(*call) is None
        config, depth = bank_rows.config(*call), -(-rank // 64) * 64
        x, a, sums = 64 * 128 * config.slices, 128 * depth * config.slices, 4 * 64 * depth
        z, b = 2 * 64 * depth, 128 * depth
        shrink = x + max(config.shrink_stages * a, sums)
        expand = z + config.expand_stages * b
        assert max(shrink, expand) <= SHARED_MEMORY - RESERVED
        assert min(config.shrink_stages, config.expand_stages) >= 2
        if bank_decode.refuses(*call) is None:
            config, held = bank_decode.config(*call), -(-rows // 8) * 8
            shrink = config.shrink_stages * 128 * (64 + held) + 260 * held
            expand = 8 * 8192 + (144 + 128) * held  # a stage for each slot in use
            assert max(shrink, expand) <= SHARED_MEMORY - RESERVED


def test_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    assert refuses(512, 4096, 14336, 64, 64, bf16, bf16) is None
    assert "513 rows" in refuses(513, 4096, 64, 64, 64, bf16, bf16)
    assert "in = 4100" in refuses(8, 4100, 64, 64, 64, bf16, bf16)
    assert "out = 72" in refuses(8, 64, 72, 64, 64, bf16, bf16)
    assert "rank 12" in refuses(8, 64, 64, 64, 12, bf16, bf16)
    assert "rank 136" in refuses(8, 64, 64, 64, 136, bf16, bf16)
    assert "float32" in refuses(8, 64, 64, 64, 64, jnp.float32, jnp.float32)
    assert "the bank float32" in refuses(8, 64, 64, 64, 64, bf16, jnp.float32)
    assert bank_decode.refuses(8, 4096, 14336, 64, 64, bf16, bf16) is None
    assert "9 rows" in bank_decode.refuses(9, 4096, 64, 64, 64, bf16, bf16)
    assert "rank 72" in bank_decode.refuses(8, 4096, 64, 64, 72, bf16, bf16)
    assert "out = 72" in bank_decode.refuses(8, 64, 72, 64, 64, bf16, bf16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "rows"),
    [(bank_rows, rows) for rows in (1, 8, 33, 64, 129, 256)]
    + [(bank_decode, rows) for rows in (1, 5, 8)],
)
@pytest.mark.parametrize(("n_in", "out"), [(4096, 14336), (14336, 4096), (4096, 1024)])
def test_agrees_at_full_size(kernel, rows, n_in, out):
    arrays = operands(2, rows, n_in, out, 64, jnp.bfloat16, slots=64)
    first = run(arrays, 1, slots=64, kernel=kernel)
    check(arrays, first, 1, slots=64)
    for _ in range(10):
        again = run(arrays, 1, slots=64, kernel=kernel)
        np.testing.assert_array_equal(again.astype(np.float32), first.astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 200])
def test_ranks_above_a_tile_agree_at_full_size(rows):
    arrays = operands(8, rows, 14336, 4096, 128, jnp.float16, slots=64)
    check(arrays, run(arrays, 1, slots=64), 1, slots=64)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "rows"), [(bank_rows, 256), (bank_decode, 8)])
def test_a_row_does_not_depend_on_the_other_rows(kernel, rows):
    base, x, bank, ids, bias = operands(3, rows, 4096, 4096, 64, jnp.bfloat16, slots=64)
    alone = jnp.where(jnp.arange(rows) == 7, ids, -1)
    both = [
        run((base, x, bank, some.at[7].set(5), bias), 0, slots=64, kernel=kernel)
        for some in (ids, alone)
    ]
    assert jnp.array_equal(both[0][7], both[1][7])
