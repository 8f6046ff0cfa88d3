"""Triton's kernels for rows of one token in a bank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.dispatch import choose
from jax_dora.ops.triton import triton_bank_rows
from jax_dora.ops.triton.triton_bank_rows import GROUP, plan
from tests.jax_dora.ops.mosaic.bank.test_bank_rows import check, operands
from tests.jax_dora.ops.mosaic.bank.test_bank_rows import run as run_mosaic
from tests.tables import slow


class OnTriton:
    """The module as one of Mosaic's."""

    def __init__(self) -> None:
        self.refuses = triton_bank_rows.refuses
        self.capability = choose.target().capability

    def config(self, *call):
        return triton_bank_rows.config(self.capability, *call)

    def launch(self, *arrays, sm_count, **options):
        return triton_bank_rows.launch(*arrays, capability=self.capability, **options)


def run(arrays, layer, **options):
    return run_mosaic(arrays, layer, kernel=OnTriton(), **options)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(
    ("rows", "n_in", "rank", "dtype", "with_bias"),
    [
        (5, 200, 24, jnp.float16, True),
        slow(70, 192, 24, jnp.float16, True),
        slow(3, 64, 72, jnp.float16, False),
    ],
)
def test_rows_agree_with_fp64(rows, n_in, rank, dtype, with_bias):
    arrays = operands(6, rows, n_in, 136, rank, dtype, slots=12)
    check(arrays, run(arrays, 1, with_bias=with_bias, slots=12), 1, slots=12, with_bias=with_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 70, 256])
def test_triton_agrees_at_full_size(rows):
    arrays = operands(6, rows, 4096, 1024, 64, jnp.bfloat16, slots=12)
    check(arrays, run(arrays, 1, slots=12), 1, slots=12)


@pytest.mark.parametrize("rows", [1, 16, 40, 200])
@pytest.mark.parametrize("slots", [1, 5, 300])
def test_a_plan_has_each_row_once_and_one_slot_a_program(rows, slots):
    rng = np.random.default_rng(rows)
    ids = rng.integers(-2, slots + 2, rows)
    groups = np.asarray(jax.jit(plan, static_argnums=1)(jnp.asarray(ids, jnp.int32), slots))
    assert groups.shape[1] == GROUP
    assert sorted(groups[groups >= 0].tolist()) == list(range(rows))
    known = np.where((ids >= 0) & (ids < slots), ids, -1)
    for program in groups:
        held = program[program >= 0]
        assert len(set(known[held])) <= 1
        assert np.all(program[: len(held)] >= 0)
