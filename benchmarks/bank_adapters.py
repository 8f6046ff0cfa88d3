"""Random adapters in a bank, which of them a batch's rows have, and what reading these takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.results import Row
from jax_dora.bank.host import RANKS, Facts, HostAdapter, piece_shape

EXPONENT = 1.5


def shares(mix: str, count: int) -> np.ndarray:
    """Returns how often each of so many adapters is asked for: by Zipf's law, or evenly."""
    weights = np.arange(1, count + 1) ** -(EXPONENT if mix == "zipf" else 0.0)
    return weights / weights.sum()


def draw_ids(mix: str, rows: int, slots: int) -> np.ndarray:
    """Returns the slots of a batch's rows."""
    rng = np.random.default_rng(rows)
    if mix == "one":
        return np.zeros(rows, np.int32)
    # Which adapters are popular has nothing to do with their ranks.
    drawn = rng.permutation(slots)[rng.choice(slots, rows, p=shares(mix, slots))]
    return drawn.astype(np.int32)


def random_adapter(bank: Any, rank: int, seed: int) -> HostAdapter:
    """Returns random numbers in host memory, laid out as `AdapterBank.read` does."""
    rng = np.random.default_rng(seed)
    facts, pieces = {}, []
    for start in range(0, rank, RANKS):
        count, piece = min(RANKS, rank - start), {}
        for path, projection in bank.projections.items():
            piece[path] = both = np.zeros(piece_shape(projection), projection.dtype)
            for array in np.split(both, [projection.sizes[0]], axis=-1):
                drawn = rng.standard_normal((*array.shape[:-2], count, array.shape[-1]), np.float32)
                array[..., :count, :] = drawn * array.shape[-1] ** -0.5
        pieces.append(piece)
    for path, projection in bank.projections.items():
        magnitude = rng.uniform(0.5, 1.5, (*projection.stack.shape, projection.sizes[1])).astype(
            np.float32
        )
        whole = np.ones(projection.stack.shape, np.float32)
        facts[path] = Facts(magnitude, whole > 0, 0.5 * whole, (rank * whole).astype(np.int32))
    return HostAdapter(tuple(pieces), facts, rank)


def byte_bound(bank: Any, ids: np.ndarray) -> Row:
    """Returns how many adapters a batch's rows have, and the least time of decoding with them over
    that of the base, by the bytes of a layer."""
    used = np.unique(ids)
    base = adapters = 0
    for path, projection in bank.projections.items():
        in_features, out = projection.sizes
        base += 2 * in_features * out
        ranks = np.asarray(bank.arrays[path].rank)[0]
        adapters += sum(2 * int(ranks[one]) * (in_features + out) + 4 * out for one in used)
    return {"distinct": len(used), "bound": (base + adapters) / base}
