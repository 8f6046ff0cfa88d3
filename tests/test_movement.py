"""What NumPy moves in place of XLA in these tests is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import movement

NUMBERS = np.array([[0.0, -1.5, 3e38], [np.nan, np.inf, 1.00390625]], np.float32)
MOVED = [
    lambda x: x[:, None],
    lambda x: x.T,
    lambda x: x.reshape(-1),
    lambda x: x[None].squeeze(0),
    lambda x: jnp.broadcast_to(x, (4, *x.shape)),
    jnp.zeros_like,
    lambda x: jnp.full((2, 2), x[1, 2]),
    *(
        lambda x, dtype=dtype: x.astype(dtype)
        for dtype in ("bfloat16", "float16", "float32", "int32", "bool")
    ),
    lambda x: jax.device_put(x, jax.devices()[1]).T,
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_it_is_what_xla_moves(dtype, monkeypatch):
    with np.errstate(all="ignore"):
        x = jnp.asarray(NUMBERS.astype(dtype))
    found = [move(x) for move in MOVED]
    for move in movement.MOVES:
        primitive = movement.primitive_of(move)
        monkeypatch.setattr(primitive, "impl", primitive.impl.__wrapped__)
    for one, other in zip(found, (move(x) for move in MOVED), strict=True):
        np.testing.assert_array_equal(*(np.asarray(array, np.float32) for array in (one, other)))
        for fact in ("dtype", "weak_type", "committed", "sharding"):
            assert getattr(one, fact) == getattr(other, fact)
