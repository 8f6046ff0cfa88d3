"""Whole projections of prompts with an adapter each: the kernels and XLA, and gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.bank_projection import bank_projections
from jax_dora.ops.bank_slots import SlotProjection, Slots
from jax_dora.ops.dispatch import choose
from parity.oracle import fp64
from tests.jax_dora.bank.adapters import bank_linear
from tests.jax_dora.ops.interpreter import slack
from tests.jax_dora.ops.test_bank import exact, operands
from tests.jax_dora.programs import aval, equations, for_cuda
from tests.tables import thinned


def prompts(seed, time, dtype=jnp.bfloat16, features=64):
    """Returns x, a kernel, adapters and ids, of which one is -1 and one has no slot."""
    _, x, held, ids = operands(seed, time, dtype, features=features)
    kernel = jax.random.normal(jax.random.key(seed), (features, 64), dtype) * features**-0.5
    return x, kernel.astype(dtype), held, ids


def bank_projection(x, kernel, slots, ids, *, implementation=None, **others):
    one = SlotProjection(slots, kernel=kernel, **others)
    return bank_projections(x, [one], ids, implementation=implementation)[0]


def product(x, kernel):
    return jax.jit(lambda x, kernel: x @ kernel)(x, kernel)


@pytest.mark.parametrize(
    "implementation", thinned(["mosaic", "triton", "xla"], ["triton"], ["mosaic"])
)
@pytest.mark.parametrize("has_base_row", thinned([False, True], [False]))
def test_agrees_with_fp64(on_mosaic, implementation, has_base_row):
    x, kernel, held, ids = prompts(0, 128)
    ids = ids if has_base_row else ids.at[1].set(2)
    with on_mosaic():
        y = jax.jit(lambda *a: bank_projection(*a, implementation=implementation))(
            x, kernel, held, ids
        )
    rows = jnp.asarray([0, 2] if has_base_row else [0, 1, 2])
    base = jnp.asarray(fp64(x) @ fp64(kernel), jnp.float32)
    # A row of the base is rounded once.
    expected, bound = exact(base[rows], x[rows], held, ids[rows])
    rounded, wide = exact(base.astype(x.dtype)[rows], x[rows], held, ids[rows])
    bound = np.maximum(bound, wide) + abs(rounded - expected) + 2**-8 * abs(expected)
    bound = slack(implementation, y.dtype) * 1.01 * bound
    assert np.all(abs(fp64(y[rows]) - expected) <= bound)
    if has_base_row:
        assert jnp.array_equal(y[1], product(x, kernel)[1])
    assert np.isnan(fp64(y[3])).all()


def test_equals_the_base_and_bank_linear():
    """XLA's results are equal bit for bit, with a bias."""
    x, kernel, held, ids = prompts(1, 3)
    bias = jnp.arange(64.0).astype(x.dtype)
    y = jax.jit(bank_projection)(x, kernel, held, ids, bias=bias)
    other = jax.jit(bank_linear)(product(x, kernel), x, held, ids, bias=bias)
    np.testing.assert_array_equal(y.astype(np.float32), other.astype(np.float32))


@pytest.mark.ci
def test_a_row_does_not_depend_on_the_other_rows(on_mosaic):
    """A row's result is the same whether the batch has a row of the base or not."""
    x, kernel, held, ids = prompts(4, 128)
    bias = jnp.arange(64.0).astype(x.dtype)

    def run(ids):
        return bank_projection(x, kernel, held, ids, bias=bias, implementation="mosaic")

    with on_mosaic():
        alone, other = (jax.block_until_ready(jax.jit(run)(one)) for one in (ids.at[1].set(2), ids))
    assert ids[1] == -1
    for row in (0, 2):
        assert jnp.array_equal(alone[row], other[row])


def test_rows_of_the_base_add_a_bias_as_the_base_does():
    """On a GPU, XLA may add a bias before it rounds the product, if it is added like this."""
    bias = jnp.arange(64.0).astype(jnp.bfloat16)
    text = for_cuda(bank_projection, *prompts(0, 128), implementation="mosaic", bias=bias)
    assert re.search(r"stablehlo\.add .* : tensor<\d+x128x64xbf16>", text)


def test_a_program_for_cuda_has_both_ways():
    text = for_cuda(bank_projection, *prompts(0, 128), implementation="mosaic")
    for name in ("dora_bank_shrink", "dora_bank_project", "stablehlo.dot_general"):
        assert name in text
    assert "dora_bank_expand" not in text
    # The adapters are not copied.
    assert not [one for one in text.splitlines() if "stablehlo.gather" in one and "bf16" in one]


@pytest.mark.parametrize("implementation", thinned(["mosaic", "xla"], ["xla"]))
def test_projections_of_the_same_x_equal_single_projections(on_mosaic, implementation):
    """Also for layers of a stack of kernels and adapters."""
    x, kernel, held, ids = prompts(2, 128)
    _, other, others, _ = prompts(3, 128)
    stack = jnp.stack([other, kernel])
    slots = jax.tree.map(lambda *one: jnp.concatenate(one), others, held)
    ids = jnp.minimum(ids, 2).at[1].set(1)

    def run(*arrays):
        return bank_projection(*arrays, implementation=implementation)

    def together(numbers):
        layers = [
            SlotProjection(slots, kernel=stack, layer=number, first=3 * number, slot_count=3)
            for number in numbers
        ]
        return bank_projections(x, layers, ids, implementation=implementation)

    with on_mosaic():
        alone = [
            jax.block_until_ready(jax.jit(run)(x, *one, ids))
            for one in ((other, others), (kernel, held))
        ]
        found = jax.block_until_ready(jax.jit(together)(jnp.arange(2)))
    for y, expected in zip(found, alone, strict=True):
        assert jnp.array_equal(y, expected)


@pytest.mark.ci
def test_projections_share_a_branch_and_unsupported_ones_use_xla(monkeypatch):
    def projection(out):
        of_slots = aval(4, out, dtype=jnp.float32), aval(4, dtype=jnp.float32)
        ranks = aval(4, dtype=jnp.int32)
        bank = Slots(aval(4, 8, 4096), aval(4, 8, out), *of_slots, ranks)
        return SlotProjection(bank, kernel=aval(4096, out))

    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0"))
    projections = [projection(out) for out in (4096, 14_336, 512)]
    ids = aval(8, dtype=jnp.int32)
    text = for_cuda(bank_projections, aval(8, 128, 4096), projections, ids)
    assert text.count("stablehlo.case") == 1
    # Each branch computes both projections.
    (case,) = re.findall(r"stablehlo\.case.*?}\) :", text, re.DOTALL)
    assert case.count("call @bank_project") == text.count("call @bank_project") == 4
    assert "tensor<4096x512xbf16>" in text


def test_small_prompts_share_a_launch_of_the_kernels_for_decoding(monkeypatch):
    def projection(out):
        of_slots = aval(4, out, dtype=jnp.float32), aval(4, dtype=jnp.float32)
        bank = Slots(aval(4, 8, 4096), aval(4, 8, out), *of_slots, aval(4, dtype=jnp.int32))
        return SlotProjection(bank, kernel=aval(4096, out))

    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0"))
    projections, ids = [projection(out) for out in (4096, 14_336)], aval(4, dtype=jnp.int32)
    small, larger = (
        for_cuda(bank_projections, aval(4, time, 4096), projections, ids) for time in (64, 65)
    )
    calls = [one for one in small.splitlines() if "@mosaic_gpu" in one]
    assert ["dora_bank_rows_shrink" in one for one in calls] == [True, False]
    assert "dora_bank_rows" not in larger


def test_rows_that_are_no_whole_tiles_keep_the_second_product():
    text = for_cuda(bank_projection, *prompts(0, 64), implementation="mosaic")
    assert "dora_bank_expand" in text
    assert "dora_bank_project" not in text


def test_mosaic_raises_with_a_reason():
    with pytest.raises(NotImplementedError, match="has 3 tokens, which is not a multiple of 64"):
        bank_projection(*prompts(0, 3), implementation="mosaic")


def test_gradients_reach_the_activations():
    x, kernel, held, ids = prompts(1, 2, jnp.float32)
    ids = jnp.minimum(ids, 2)
    cotangent = jax.random.normal(jax.random.key(0), (*x.shape[:2], 64))
    d_x = jax.grad(lambda x: jnp.vdot(cotangent, bank_projection(x, kernel, held, ids)))(x)
    for row, slot in enumerate(np.asarray(ids)):
        d = fp64(cotangent[row]) * (1 if slot < 0 else fp64(held.g[slot]))
        expected = d @ fp64(kernel).T
        if slot >= 0:
            s = float(held.scale[slot])
            expected = expected + s * d @ fp64(held.lora_b[slot]).T @ fp64(held.lora_a[slot])
        assert np.allclose(d_x[row], expected, rtol=1e-4, atol=1e-5)


def test_the_choice_is_made_as_a_program_is_lowered():
    names = [one.primitive.name for one in equations(bank_projection, *prompts(0, 256))]
    assert "dora" in names
    assert "dot_general" not in names
