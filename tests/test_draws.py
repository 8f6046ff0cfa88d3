"""The random draws of tests obey the contracts of `jax.random`."""

import jax
import jax.numpy as jnp
from flax import nnx


def test_a_rounded_uniform_draw_excludes_its_upper_end() -> None:
    drawn = jax.random.uniform(jax.random.key(0), (10_000,), jnp.bfloat16, minval=-1.0)
    assert -1 <= drawn.min() < drawn.max() < 1
    assert jnp.isfinite(nnx.initializers.normal()(jax.random.key(0), (10_000,), jnp.bfloat16)).all()
