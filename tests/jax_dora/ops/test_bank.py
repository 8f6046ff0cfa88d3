"""The operator for rows with an adapter each: the kernel and XLA, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.bank_slots import Slots
from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.bank import bank_decode, bank_rows
from parity import tolerances
from parity.oracle import fp64
from tests.jax_dora.bank.adapters import bank_linear
from tests.jax_dora.ops.interpreter import slack
from tests.jax_dora.programs import equations, for_cuda
from tests.tables import ci, thinned

IDS = [1, -1, 0, 3]


def operands(seed, time, dtype=jnp.bfloat16, features=40, rank=8, out=64, slots=3):
    rng = np.random.default_rng(seed)

    def normal(*shape, deviation=1.0):
        return jnp.asarray(deviation * rng.standard_normal(shape, np.float32))

    held = Slots(
        normal(slots, rank, features, deviation=features**-0.5).astype(dtype),
        normal(slots, rank, out, deviation=rank**-0.5).astype(dtype),
        1 + normal(slots, out, deviation=0.1),
        jnp.asarray([0.5, 1.5, 2.0]),
        jnp.full(slots, rank, jnp.int32),
    )
    batch = len(IDS)
    base, x = normal(batch, time, out).astype(dtype), normal(batch, time, features).astype(dtype)
    return base, x, held, jnp.asarray(IDS, jnp.int32)


def exact(base, x, held, ids):
    """Returns the result in fp64, and the error bound of the roundings of z, lora and y."""
    rows, bounds = [], []
    for row, slot in enumerate(np.asarray(ids)):
        y, left = fp64(base[row]), fp64(x[row])
        a, b, g = fp64(held.lora_a[slot]), fp64(held.lora_b[slot]), fp64(held.g[slot])
        s, u = float(held.scale[slot]), tolerances.unit_roundoff(base.dtype)
        z, summing = tolerances.product(left, a.T)
        lora = z @ b
        error = s * (tolerances.independent(u * abs(z) + summing, b) + 2 * u * abs(lora))
        bounds.append(abs(g) * error + tolerances.rounding(g * (y + s * lora), base.dtype))
        rows.append(g * (y + s * lora))
    return np.stack(rows), np.stack(bounds)


@pytest.mark.parametrize("implementation", [ci("mosaic"), "triton", "xla"])
def test_agrees_with_fp64(on_mosaic, implementation):
    arrays = operands(0, 64)
    with on_mosaic():
        y = jax.jit(lambda *a: bank_linear(*a, implementation=implementation))(*arrays)
    held = [0, 2]
    expected, bound = exact(
        *(arrays[0][jnp.asarray(held)], arrays[1][jnp.asarray(held)]),
        arrays[2],
        arrays[3][jnp.asarray(held)],
    )
    bound = slack(implementation, y.dtype) * 1.01 * bound
    assert np.all(abs(fp64(y[jnp.asarray(held)]) - expected) <= bound)
    assert jnp.array_equal(y[1], arrays[0][1])
    assert np.isnan(fp64(y[3])).all()


@pytest.mark.ci
def test_small_prompts_are_rows_of_the_kernels_for_decoding(on_mosaic, monkeypatch, watched):
    """80 tokens of four requests, in two tiles of rows."""
    launched = watched(bank_rows)
    monkeypatch.setattr(bank_rows, "wins", lambda *call, **settings: True)
    monkeypatch.setattr(bank_decode, "wins", lambda *call, **settings: False)
    monkeypatch.setattr(choose.Target, "prefers", lambda self, name: name == "mosaic")
    base, x, held, ids = operands(7, 20, features=64)
    bias = jnp.arange(64.0).astype(base.dtype)
    with on_mosaic():
        y, with_bias = (
            jax.block_until_ready(jax.jit(bank_linear)(base, x, held, ids, bias=one))
            for one in (None, bias)
        )
    assert launched[0] == (80, 64)
    own = jnp.asarray([0, 2])
    expected, bound = exact(base[own], x[own], held, ids[own])
    assert np.all(abs(fp64(y[own]) - expected) <= 1.01 * bound)
    assert jnp.array_equal(y[1], base[1])
    assert np.isnan(fp64(y[3])).all()
    assert jnp.array_equal(with_bias[1], base[1] + bias[None])


@pytest.mark.parametrize(("rows", "slots"), [(4, 3), (5, 3), (16, 3)])
def test_single_tokens_agree_with_fp64(rows, slots):
    """The numbers of rows select each of XLA's three ways."""
    _, _, held, _ = operands(2, 1, slots=slots)
    rng = np.random.default_rng(3)
    base, x = (jnp.asarray(rng.standard_normal((rows, 1, size)), jnp.bfloat16) for size in (64, 40))
    ids = jnp.asarray(rng.integers(0, slots, rows), jnp.int32)
    y = jax.jit(bank_linear)(base, x, held, ids)
    expected, bound = exact(base, x, held, ids)
    assert np.all(abs(fp64(y) - expected) <= 1.01 * bound)


def test_no_tokens_give_no_results():
    base, x, held, ids = operands(0, 0)
    assert bank_linear(base, x, held, ids).shape == base.shape == (len(IDS), 0, 64)


def test_nonfinite_numbers_stay_in_their_row():
    base, x, held, _ = operands(4, 1)
    ids = jnp.asarray([0, 1, 1, 0, 2, -1], jnp.int32)
    base, x = (jnp.concatenate([one, one[:2]]) for one in (base, x))
    sound = bank_linear(base, x, held, ids)
    broken = bank_linear(base, x.at[1].set(jnp.inf), held, ids)
    assert not np.isfinite(fp64(broken[1])).any()
    others = jnp.asarray([0, 2, 3, 4, 5])
    assert jnp.array_equal(broken[others], sound[others])
    assert jnp.array_equal(sound[5], base[5])


def test_an_overflow_in_another_slot_has_no_effect():
    """In the "dense" way: products with the last slot exceed fp16's range."""
    base, x, held, _ = operands(5, 1, jnp.float16)
    base, x = (jnp.concatenate([one, one[:2]]) for one in (base, x))
    ids = jnp.asarray([0, 1, 1, 0, 0, -1], jnp.int32)
    large = held._replace(lora_a=held.lora_a.at[2].set(6e4))
    overflowing = jnp.einsum("nti,ri->ntr", x, large.lora_a[2])
    assert np.isinf(fp64(overflowing)).any(axis=(1, 2)).sum() > 3
    assert jnp.array_equal(bank_linear(base, x, large, ids), bank_linear(base, x, held, ids))


def test_mosaic_raises_with_a_reason():
    with pytest.raises(NotImplementedError, match="has 3 tokens, which is not a multiple of 64"):
        bank_linear(*operands(0, 3), implementation="mosaic")


def test_a_program_for_cuda_has_the_kernel():
    """With several devices too: the primitive chooses the implementation at lowering."""
    arrays = operands(0, 64)
    text = for_cuda(bank_linear, *arrays, implementation="mosaic")
    assert "dora_bank_expand" in text
    names = [one.primitive.name for one in equations(bank_linear, *arrays)]
    assert "dora" in names


@pytest.mark.ci
def test_gradients_reach_the_activations():
    base, x, held, ids = operands(1, 2, jnp.float32)
    ids = jnp.minimum(ids, 2)
    cotangent = jax.random.normal(jax.random.key(0), base.shape)

    def of(base, x):
        return jnp.vdot(cotangent, bank_linear(base, x, held, ids))

    d_base, d_x = jax.grad(of, argnums=(0, 1))(base, x)
    for row, slot in enumerate(np.asarray(ids)):
        dy = fp64(cotangent[row])
        d = dy if slot < 0 else fp64(held.g[slot]) * dy
        assert np.allclose(d_base[row], d, rtol=1e-5, atol=1e-6)
        if slot < 0:
            assert not np.any(d_x[row])
            continue
        through = float(held.scale[slot]) * d @ fp64(held.lora_b[slot]).T @ fp64(held.lora_a[slot])
        assert np.allclose(d_x[row], through, rtol=1e-4, atol=1e-5)


def test_rows_of_one_token_copy_no_adapter():
    """The products are sums, into which XLA fuses the lookup of the slots."""
    names = [one.primitive.name for one in equations(bank_linear, *operands(0, 1))]
    assert "dot_general" not in names


@pytest.mark.parametrize(("rows", "time"), thinned([(4, 1), (20, 1), (4, 2)], [(4, 1), (4, 2)]))
@pytest.mark.ci
def test_a_layer_uses_its_slots_of_a_stack(rows, time):
    """For each of XLA's ways; 20 rows are sorted."""
    _, _, held, _ = operands(2, 1, jnp.float32)
    _, _, other, _ = operands(3, 1, jnp.float32)
    stack = jax.tree.map(lambda *one: jnp.concatenate(one), other, held)
    key = jax.random.key(0)
    base, x = (jax.random.normal(key, (rows, time, size)) for size in (64, 40))
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 4, rows), jnp.int32)
    alone = bank_linear(base, x, held, ids)
    y = jax.jit(lambda first: bank_linear(base, x, stack, ids, first=first, slot_count=3))(
        jnp.int32(3)
    )
    assert np.array_equal(np.isnan(y), np.isnan(alone))
    assert np.isnan(np.asarray(y)).all(axis=(1, 2)).tolist() == (ids == 3).tolist()
    assert jnp.allclose(y, alone, rtol=1e-5, atol=1e-5, equal_nan=True)
