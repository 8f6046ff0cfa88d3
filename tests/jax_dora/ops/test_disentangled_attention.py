"""Disentangled attention against its equation in fp64, which looks every distance up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora import ops
from jax_dora.ops.disentangled_attention import _is_fused, _Operands
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dropout import keep_mask, kept_share
from parity import tolerances
from tests.tables import ci

BATCH, TIME, HEADS, SIZE, BUCKETS = 2, 19, 3, 16, 14
NAMES = ("q", "k", "v", "pos_key", "pos_query")


def drawn(
    time: int = TIME, size: int = SIZE
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Arrays by name, the cotangent, the buckets, and a mask with a row of few tokens."""
    rng = np.random.default_rng(time)
    shapes = [(BATCH, time, HEADS, size)] * 3 + [(BUCKETS, HEADS, size)] * 2
    arrays = {n: rng.standard_normal(s) for n, s in zip(NAMES, shapes, strict=True)}
    cotangent = rng.standard_normal(shapes[0])
    buckets = np.sort(rng.integers(0, BUCKETS, 2 * time - 1)).astype(np.int32)
    return arrays, cotangent, buckets, np.arange(time)[None] < np.array([[time], [7]])


def oracle(arrays, cotangent, buckets, mask, kept=1.0):
    """The result and the gradient of every array, in fp64, one head at a time.

    Args:
      kept: what the softmax is multiplied by [batch, heads, time, time].
    """
    q, k, v, pos_key, pos_query = (np.asarray(arrays[name], np.float64) for name in NAMES)
    batch, time, heads, size = arrays["q"].shape
    kept = np.broadcast_to(kept, (batch, heads, time, time))
    index = np.arange(time)
    bucket = buckets[index[:, None] - index[None, :] + time - 1]
    scale = (3 * size) ** -0.5
    out, gradients = np.zeros_like(q), {n: np.zeros(arrays[n].shape) for n in NAMES}
    for b in range(batch):
        for h in range(heads):
            qs, ks, vs, do = q[b, :, h], k[b, :, h], v[b, :, h], np.float64(cotangent)[b, :, h]
            key, query = pos_key[bucket, h], pos_query[bucket, h]  # [i, j, size]
            scores = qs @ ks.T + np.einsum("id,ijd->ij", qs, key)
            scores = scale * (scores + np.einsum("jd,ijd->ij", ks, query))
            scores = np.where(mask[b][None, :], scores, -np.inf)
            p = np.exp(scores - scores.max(1, keepdims=True))
            p = p / p.sum(1, keepdims=True)
            out[b, :, h] = (p * kept[b, h]) @ vs
            gradients["v"][b, :, h] = (p * kept[b, h]).T @ do
            dp = (do @ vs.T) * kept[b, h]
            ds = scale * p * (dp - (dp * p).sum(1, keepdims=True))
            gradients["q"][b, :, h] = ds @ ks + np.einsum("ij,ijd->id", ds, key)
            gradients["k"][b, :, h] = ds.T @ qs + np.einsum("ij,ijd->jd", ds, query)
            np.add.at(gradients["pos_key"][:, h], bucket, ds[..., None] * qs[:, None])
            np.add.at(gradients["pos_query"][:, h], bucket, ds[..., None] * ks[None, :])
    return out, gradients


def ours(arrays, cotangent, buckets, mask, dtype="float32", **options):
    operands = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}

    @jax.jit
    def run(operands, cotangent):
        y, pullback = jax.vjp(
            lambda a: ops.disentangled_attention(
                **a, buckets=buckets, mask=jnp.asarray(mask), **options
            ),
            operands,
        )
        return y, pullback(cotangent)[0]

    with jax.default_matmul_precision("highest"):
        return run(operands, jnp.asarray(cotangent, dtype))


def assert_near(found, expected, bound):
    y, gradients = found
    named = {"y": (y, expected[0])} | {n: (gradients[n], expected[1][n]) for n in gradients}
    for name, (value, exact) in named.items():
        peak = max(1, np.abs(exact).max())
        assert np.abs(np.float64(value) - exact).max() <= bound * peak, name


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(
    ("rate", "implementation"), [(0.0, "xla"), (0.3, "xla"), ci(0.0, "triton"), ci(0.3, "triton")]
)
def test_fp32(rate, implementation):
    # The kernels' tiles are whole with the one rate, and in several with the other.
    inputs = drawn(TIME if implementation == "xla" else 71 if rate else 64)
    seed, kept, dropout = jnp.array([5, 6], jnp.uint32), 1.0, None
    if rate:
        time = len(inputs[3][0])
        shape = BATCH, HEADS, time, time
        kept = np.asarray(keep_mask(seed, shape, rate)) / kept_share(rate)
        dropout = ops.Dropout(seed, rate)
    bound = tolerances.caps.OPERATOR_FP32_MAX_ABS
    found = ours(*inputs, dropout=dropout, implementation=implementation)
    assert_near(found, oracle(*inputs, kept), bound)


def assert_as_near_as_plain(implementation, dtype, time=TIME, size=SIZE):
    """As near to fp64 as the same computation in plain operations, by flash-attention's rule."""
    arrays, cotangent, buckets, mask = drawn(time, size)
    *rounded, cotangent = (
        np.asarray(jnp.asarray(one, dtype), np.float32) for one in (*arrays.values(), cotangent)
    )
    inputs = dict(zip(arrays, rounded, strict=True)), cotangent, buckets, mask
    exact = oracle(*inputs)
    y, gradients = ours(*inputs, dtype, implementation=implementation)
    plain, plain_gradients = ours(*inputs, dtype, implementation="xla")
    assert y.dtype == dtype
    named = {"y": (y, plain, exact[0])}
    named |= {n: (gradients[n], plain_gradients[n], exact[1][n]) for n in NAMES}
    for name, (value, plainly, wanted) in named.items():
        error, theirs = (np.abs(np.float64(x) - wanted).max() for x in (value, plainly))
        assert error <= tolerances.flash_rule(theirs, np.abs(wanted).max(), dtype), name


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.ci
def test_fp16(implementation):
    assert_as_near_as_plain(implementation, "float16")


@pytest.mark.gpu
@pytest.mark.parametrize("time", [200, 512])
def test_bf16_at_full_size(time):
    """In the tiles that are launched on a GPU, of which the last one is not whole or all are."""
    assert_as_near_as_plain("triton", "bfloat16", time, 64)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("left_out", ["pos_key", "pos_query"])
@pytest.mark.ci
def test_a_term_may_be_left_out(left_out, implementation):
    """Its table of zeros computes the same, with the scale of two terms."""
    arrays, cotangent, buckets, mask = drawn()
    zeros = arrays | {left_out: 0 * arrays[left_out]}
    factor = 1.5**0.5
    scaled = zeros | {"q": factor * arrays["q"]}
    if left_out == "pos_key":
        scaled["pos_query"] = factor * arrays["pos_query"]
    else:
        scaled = zeros | {"k": factor * arrays["k"], "pos_key": factor * arrays["pos_key"]}
    expected = oracle(scaled, cotangent, buckets, mask)[0]
    operands = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
    operands[left_out] = None
    options = {"mask": jnp.asarray(mask), "implementation": implementation}
    with jax.default_matmul_precision("highest"):
        y = ops.disentangled_attention(**operands, buckets=buckets, **options)
    assert np.abs(y - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.ci
def test_a_row_without_tokens_attends_to_all(implementation):
    arrays, cotangent, buckets, mask = drawn()
    mask = mask & np.array([[True], [False]])
    y, gradients = ours(arrays, cotangent, buckets, mask, implementation=implementation)
    assert all(np.isfinite(one).all() for one in jax.tree.leaves((y, gradients)))
    np.testing.assert_allclose(y[1], np.broadcast_to(arrays["v"][1].mean(0), y[1].shape), atol=1e-5)
    mean = np.broadcast_to(cotangent[1].mean(0), y[1].shape)
    np.testing.assert_allclose(gradients["v"][1], mean, atol=1e-5)
    assert not np.any(gradients["q"][1])


def test_bad_shapes():
    arrays, _, buckets, mask = drawn()
    operands = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
    for change, message in (
        ({"k": operands["k"][:, 1:]}, "expected one shape"),
        ({"pos_key": operands["pos_key"][:, :1]}, r"expected \[buckets, 3, 16\]"),
        ({"buckets": buckets[1:]}, r"expected \(37,\), one for each distance"),
        ({"mask": jnp.asarray(mask[:, 1:])}, r"expected \(2, 19\), one for each key"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.disentangled_attention(**{**operands, "buckets": buckets, **change})


def test_the_kernels_are_chosen_where_they_were_measured(monkeypatch):
    """On Hopper, though Mosaic is preferred there if it has a kernel; not over several devices."""
    shape = 2, 512, 4, 64
    for change, expected in (
        ({}, True),
        ({"shape": (2, 128, 4, 64)}, False),
        ({"shape": (2, 512, 4, 32)}, False),
        ({"dtype": jnp.float32}, False),
        ({"term": None}, False),
        ({"partitioned": True}, False),
        ({"compute_capability": "10.0"}, False),
        ({"platform": "cpu", "compute_capability": ""}, False),
    ):
        of_q = {"shape": shape, "dtype": jnp.bfloat16} | change
        q = jax.ShapeDtypeStruct(of_q["shape"], of_q["dtype"])
        term = change.get("term", q)
        of_card = {"platform": "gpu", "compute_capability": "9.0", "partitioned": False} | change
        fields = ("platform", "compute_capability", "partitioned")
        card = choose.Target(**{name: of_card[name] for name in fields})
        monkeypatch.setattr(choose, "target", lambda card=card: card)
        operands = _Operands(q, q, q, q, term, q, None, None)
        assert _is_fused(operands, None) is expected, change
        assert not _is_fused(operands, "xla")
    with pytest.raises(NotImplementedError, match="a head has 24 features"):
        _is_fused(operands._replace(q=q.update(shape=(2, 64, 4, 24))), "triton")
