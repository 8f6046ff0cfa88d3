"""`dora_linear_with_dropout` alone; the modules' tests hold it to its two conventions."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jax_dora import ops
from jax_dora.ops.dropout import dora_linear_with_dropout

ROWS, IN, OUT, RANK, SCALE = 7, 40, 24, 3, 1.7


def operands() -> tuple[jax.Array, ...]:
    """x, kernel, lora_a, lora_b, magnitude, norm, bias."""
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    x, kernel, lora_a, lora_b = (
        normal(ROWS, IN),
        normal(IN, OUT),
        normal(IN, RANK),
        normal(RANK, OUT),
    )
    norm = ops.factored_norm(kernel, lora_a, lora_b, SCALE)
    return x, kernel, lora_a, lora_b, norm * (1 + 0.02 * normal(OUT)), norm, normal(OUT)


@pytest.mark.parametrize("mode", ["adapter", "input"])
def test_equals_dora_linear_where_nothing_is_dropped(mode):
    x, *adapter, norm, bias = operands()
    y = dora_linear_with_dropout(x, x, *adapter, SCALE, mode=mode, norm=norm, bias=bias)
    expected = ops.dora_linear(x, *adapter, SCALE, norm=norm, bias=bias)
    chex.assert_trees_all_close(y, expected, rtol=1e-5, atol=1e-5)


def test_base_alone_is_left_where_everything_is_dropped():
    x, *adapter, norm, bias = operands()
    kernel, magnitude = adapter[0], adapter[-1]
    results = {
        mode: dora_linear_with_dropout(
            x, jnp.zeros_like(x), *adapter, SCALE, mode=mode, norm=norm, bias=bias
        )
        for mode in ("adapter", "input")
    }
    chex.assert_trees_all_close(results["input"], x @ kernel + bias[None], rtol=1e-5, atol=1e-5)
    scaled = (x @ kernel) * (magnitude / norm)[None] + bias[None]
    chex.assert_trees_all_close(results["adapter"], scaled, rtol=1e-5, atol=1e-5)


def test_refuses_what_does_not_fit():
    x, *adapter, norm, _ = operands()
    with pytest.raises(ValueError, match="mode is 'both'; expected 'adapter' or 'input'"):
        dora_linear_with_dropout(x, x, *adapter, SCALE, mode="both", norm=norm)
    with pytest.raises(ValueError, match="dropped has shape"):
        dora_linear_with_dropout(x, x[1:], *adapter, SCALE, mode="input", norm=norm)
    with pytest.raises(ValueError, match="x has shape"):
        dora_linear_with_dropout(x[:, 1:], x, *adapter, SCALE, mode="input", norm=norm)
