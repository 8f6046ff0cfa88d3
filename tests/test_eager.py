"""What NumPy moves in tests is what XLA moves: bits, dtype, weak type and place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.eager import MOVES

# Kinds of result that NumPy must leave to XLA, too: weak types, and float to integer.
OPERANDS: dict[str, Callable[[], Any]] = {
    "float32": lambda: jnp.asarray(np.linspace(-3, 7e4, 12, dtype=np.float32).reshape(3, 4)),
    "bfloat16": lambda: jnp.asarray(np.arange(6), jnp.bfloat16),
    "integer": lambda: jnp.asarray(np.arange(-3, 3, dtype=np.int32)),
    "weak": lambda: jnp.asarray(2.0),
    "NumPy": lambda: np.arange(3, dtype=np.float32),
    "committed": lambda: jax.device_put(np.ones((2, 3), np.float32), jax.devices()[1]),
}


def moved(x: Any) -> list[Any]:
    axes = tuple(range(1, np.ndim(x) + 1))
    results = [lax.broadcast_in_dim(x, (2, *np.shape(x)), axes), jnp.full((2, 1), x.ravel()[0])]
    results += [lax.reshape(x, (x.size,)), lax.transpose(x, tuple(range(np.ndim(x)))[::-1])]
    results += [lax.squeeze(lax.expand_dims(x, (0,)), (0,))]
    kinds = jnp.float16, jnp.bfloat16, jnp.int8, jnp.float32, jnp.bool_
    return results + [lax.convert_element_type(x, kind) for kind in kinds]


@pytest.mark.parametrize("make", OPERANDS.values(), ids=OPERANDS.keys())
def test_an_array_is_moved_as_by_xla(make, monkeypatch: pytest.MonkeyPatch) -> None:
    found = moved(make())
    for primitive in MOVES:
        monkeypatch.setattr(primitive, "impl", primitive.impl.args[1])
    for one, wanted in zip(found, moved(make()), strict=True):
        assert (one.aval, one.committed, one.sharding) == (
            wanted.aval,
            wanted.committed,
            wanted.sharding,
        )
        assert np.asarray(one).tobytes() == np.asarray(wanted).tobytes()


def test_a_moved_array_survives_its_operand() -> None:
    x = jnp.asarray(np.arange(1024, dtype=np.float32))
    row = x.reshape(1, -1)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x).block_until_ready()
    assert (np.asarray(row)[0] == np.arange(1024)).all()
