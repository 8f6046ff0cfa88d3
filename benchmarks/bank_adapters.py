"""Random adapters for a bank, which adapter each row uses, and the bytes that decoding reads."""

from typing import Any

import numpy as np

from benchmarks.results import Row
from jax_dora.bank.host import HostAdapter, Scaling, block_shape
from jax_dora.ops.bank_slots import RANKS

EXPONENT = 1.5  # of Zipf's law


def shares(mix: str, count: int) -> np.ndarray:
    """Returns the probability of each of `count` adapters: by Zipf's law ("zipf"), or equal."""
    weights = np.arange(1, count + 1) ** -(EXPONENT if mix == "zipf" else 0.0)
    return weights / weights.sum()


def draw_ids(mix: str, rows: int, slots: int) -> np.ndarray:
    """Returns the slot of each row of a batch; with the mix "one", all rows use the last slot,
    which has the largest rank."""
    rng = np.random.default_rng(rows)
    if mix == "one":
        return np.full(rows, slots - 1, np.int32)
    # Permuted, so that the popularity of an adapter does not depend on its rank.
    drawn = rng.permutation(slots)[rng.choice(slots, rows, p=shares(mix, slots))]
    return drawn.astype(np.int32)


def random_adapter(bank: Any, rank: int, seed: int) -> HostAdapter:
    """Returns an adapter of random numbers in host memory, laid out as by `AdapterBank.read`."""
    rng = np.random.default_rng(seed)
    scalings, blocks = {}, []
    for start in range(0, rank, RANKS):
        count, block = min(RANKS, rank - start), {}
        for path, projection in bank.projections.items():
            block[path] = both = np.zeros(block_shape(projection), projection.result_dtype)
            for array in np.split(both, [projection.sizes[0]], axis=-1):
                drawn = rng.standard_normal((*array.shape[:-2], count, array.shape[-1]), np.float32)
                array[..., :count, :] = drawn * array.shape[-1] ** -0.5
        blocks.append(block)
    for path, projection in bank.projections.items():
        stack = projection.stack.shape
        magnitude = rng.uniform(0.5, 1.5, (*stack, projection.sizes[1])).astype(np.float32)
        ones = np.ones(stack, np.float32)
        scalings[path] = Scaling(magnitude, ones > 0, 0.5 * ones, (rank * ones).astype(np.int32))
    return HostAdapter(tuple(blocks), scalings, rank)


def bytes_read(bank: Any, ids: np.ndarray) -> Row:
    """Returns the number of distinct adapters of a batch, and the bytes that a layer reads with
    them, relative to those of the base."""
    used = np.unique(ids)
    base = adapters = 0
    for path, projection in bank.projections.items():
        n_in, n_out = projection.sizes
        base += 2 * n_in * n_out
        ranks = np.asarray(bank.arrays[path].rank)[0]
        adapters += sum(2 * int(ranks[slot]) * (n_in + n_out) + 4 * n_out for slot in used)
    return {"distinct": len(used), "bytes_over_base": (base + adapters) / base}
