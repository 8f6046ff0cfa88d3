"""Attention of new tokens to a cache in FP8, against fp64 on the codes' own values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops import CodedEntries, decode_attention
from parity import oracle, tolerances
from tests.jax_dora.ops.interpreter import slack
from tests.tables import thinned

F32, BF16 = jnp.float32, jnp.bfloat16
LAYERS, LAYER = 2, 1
# batch, heads, kv_heads, head_dim, capacity, window, dtype
CASES = [
    (3, 8, 2, 128, 256, None, F32),
    (3, 4, 2, 64, 640, 30, BF16),
    (4, 2, 2, 96, 1280, None, F32),
    (2, 6, 1, 256, 128, 1, BF16),
    (2, 40, 2, 64, 128, 40, F32),
]


def entries(rng, shape):
    """Returns codes whose scales have very different sizes."""
    size = rng.normal(size=(*shape[:-1], 1))
    x = rng.normal(size=shape) * np.exp(size)
    scales = np.abs(x).max(-1) / 448
    codes = jnp.asarray(x / scales[..., None], jnp.float8_e4m3fn)
    return CodedEntries(codes, jnp.asarray(scales, F32))


def drawn(batch, heads, kv_heads, size, capacity, dtype, lengths):
    rng = np.random.default_rng(0)
    q, key, value = (rng.normal(size=(batch, n, size)) for n in (heads, kv_heads, kv_heads))
    shape = (LAYERS, batch, kv_heads, capacity, size)
    keys, values = entries(rng, shape), entries(rng, shape)
    new = jnp.asarray(q, F32), jnp.asarray(key, F32), jnp.asarray(value, dtype)
    return *new, keys, values, jnp.asarray(lengths, jnp.int32)


def check(operands, implementation, window, dtype):
    q, key, value, keys, values, lengths = operands
    found = jax.jit(decode_attention, static_argnames=("window", "implementation"))(
        *operands, LAYER, window=window, implementation=implementation
    )
    assert found.dtype == dtype
    k, v = (np.asarray(one.decoded(F32), np.float64)[LAYER] for one in (keys, values))
    group = q.shape[1] // key.shape[1]
    for row, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(length - window + 1, 0)
        for head in range(key.shape[1]):
            seen = [
                np.concatenate(
                    (stack[row, head, first:length], np.asarray(new, F32)[row, head, None])
                )
                for stack, new in ((k, key), (v, value))
            ]
            mine = slice(head * group, (head + 1) * group)
            products = "float16" if implementation == "triton" else "float32"
            bound = tolerances.attention(q[row, mine], *seen, products, dtype)
            error = np.abs(
                np.asarray(found[row, mine], np.float64) - oracle.attention(q[row, mine], *seen)
            )
            assert (error <= slack(implementation, dtype) * bound).all()


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "size", "capacity", "window", "dtype"),
    thinned(CASES, CASES[:2]),
)
def test_agrees_with_fp64(batch, heads, kv_heads, size, capacity, window, dtype, implementation):
    lengths = [0, 1, capacity, capacity - 70][-batch:]
    operands = drawn(batch, heads, kv_heads, size, capacity, dtype, lengths)
    check(operands, implementation, window, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_agrees_at_full_size(size, window, implementation):
    operands = drawn(4, 32, 8, size, 4096, BF16, [0, 77, 4000, 4096])
    check(operands, implementation, window, BF16)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.ci
def test_a_row_depends_on_itself_alone(implementation):
    """Its bits are the same beside other rows and other lengths, over stale and wiped slots."""
    q, key, value, keys, values, _ = drawn(3, 4, 2, 64, 256, F32, [0, 0, 0])

    def run(lengths, scale):
        others = jnp.asarray([scale, 1, scale], F32)
        new = (x * others[:, None, None] for x in (q, key, value))
        cached = [
            one._replace(scales=one.scales * others[None, :, None, None]) for one in (keys, values)
        ]
        lengths = jnp.asarray(lengths, jnp.int32)
        options = {"window": 100, "implementation": implementation}
        return np.asarray(decode_attention(*new, *cached, lengths, LAYER, **options))[1]

    assert np.array_equal(run([200, 130, 3], 1), run([0, 130, 256], 5))


def test_refuses_what_the_kernel_cannot_do():
    operands = drawn(1, 2, 2, 64, 100, F32, [3])
    with pytest.raises(NotImplementedError, match="capacity is 100, not a multiple of 128"):
        decode_attention(*operands, LAYER, implementation="triton")
    operands = drawn(1, 2, 2, 48, 128, F32, [3])
    with pytest.raises(NotImplementedError, match="head_dim is 48, none of 64, 96"):
        decode_attention(*operands, LAYER, implementation="triton")
    with pytest.raises(NotImplementedError, match="it has no mosaic kernel"):
        decode_attention(*operands, LAYER, implementation="mosaic")
    assert decode_attention(*operands, LAYER).shape == (1, 2, 48)
