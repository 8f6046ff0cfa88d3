"""Quantised kernels in the operators, against an fp64 oracle of the dequantised kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import collectives
from jax_dora.ops import Dropout, dora_linear, draw_seed, factored_norm, lora_linear, quantised
from parity import oracle, tolerances
from tests import quantised as kernels
from tests.jax_dora.meshes import automatic, explicit
from tests.jax_dora.programs import equations, largest_floats
from tests.quantised import NAMES, SCALE, both, near, operands, plain
from tests.tables import slow, thinned

# Scales [1, out], tiles of 32 rows, tiles of 32 × 8, a single scale.
TILES = {"column": (1, 24), "tile": (3, 24), "block": (3, 3), "tensor": (1, 1)}
SHAPE = (96, 24)


def norm_of(kernel, a, b):
    return oracle.norm(*oracle.from_flax(kernels.meant(kernel), a, b), SCALE)


def test_the_codebook_is_nf4s():
    np.testing.assert_allclose(quantised.NF4, kernels.nf4_codebook(), atol=2e-7)


@pytest.mark.parametrize(
    ("qtype", "tiles"),
    [*((qtype, "tile") for qtype in quantised.FORMATS), *(("int8", tiles) for tiles in TILES)],
)
def test_norm_and_dense_copy(qtype, tiles):
    kernel = kernels.draw(qtype, SHAPE, TILES[tiles])
    exact = kernels.meant(kernel)
    np.testing.assert_allclose(quantised.dequantise(kernel, jnp.float32), exact, rtol=1e-6)
    np.testing.assert_array_equal(
        quantised.dequantise(kernel, jnp.float32), qwix.dequantize(kernel)
    )
    (_, a, b, *_), _ = operands(kernel)
    norm = factored_norm(kernel, a, b, SCALE)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, norm_of(kernel, a, b), rtol=1e-5)
    np.testing.assert_allclose(
        factored_norm(kernel, a, b, 0), np.linalg.norm(exact, axis=0), rtol=1e-5
    )


@pytest.mark.parametrize(("shape", "tiles"), [slow((96, 24), (3, 24)), ((97, 3), (1, 3))])
@pytest.mark.parametrize("elements", [24 * 7, slow(24 * 64)])
def test_norm_by_blocks_smaller_and_larger_than_a_tile(shape, tiles, elements, monkeypatch):
    monkeypatch.setattr("jax_dora.ops.norm.BLOCK_ELEMENTS", elements)
    kernel = kernels.draw("int8", shape, tiles, zero_point=True)
    (_, a, b, *_), _ = operands(kernel)
    # Traced here, because the compiled norm's cache key does not include the block's size.
    norm = jax.jit(lambda *arrays: factored_norm(*arrays, SCALE, implementation="xla"))
    jax.clear_caches()
    np.testing.assert_allclose(norm(kernel, a, b), norm_of(kernel, a, b), rtol=1e-5)


def test_bf16_scales_and_adapters():
    kernel = kernels.draw("nf4", SHAPE, (3, 24), scale_dtype=jnp.bfloat16)
    (_, a, b, *_), _ = operands(kernel)
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    np.testing.assert_allclose(factored_norm(kernel, a, b, SCALE), norm_of(kernel, a, b), rtol=1e-5)


@pytest.mark.parametrize(
    ("qtype", "dtype", "exact"),
    [
        *thinned(
            [(qtype, jnp.float32, False) for qtype in quantised.FORMATS],
            [("nf4", jnp.float32, False), ("float8_e4m3fn", jnp.float32, False)],
            [("int4", jnp.float32, False), ("int8", jnp.float32, False)],
        ),
        # Kernels that are exact in bf16, so that the bounds of a bf16 kernel apply.
        ("int8", jnp.bfloat16, True),
    ],
)
def test_projection_and_gradients(qtype, dtype, exact):
    kernel = kernels.draw(qtype, SHAPE, (3, 24), exact=exact)
    (x, a, b, magnitude, bias), dy = operands(kernel, dtype=dtype, rows=(14,))
    y, gradients = both(kernel, (x, a, b, magnitude, bias), dy)
    assert y.dtype == dtype
    weights = oracle.from_flax(kernels.meant(kernel), a, b)
    arguments = (x, *weights, magnitude, SCALE)
    wanted = oracle.dora_linear(*arguments, bias=bias, dtype=dtype)
    bound = tolerances.dora_linear(dy, *arguments, dtype, bias=bias)
    assert np.all(np.abs(oracle.fp64(y) - wanted) <= bound.y)
    exactly = oracle.dora_linear_grads(dy, *arguments, dtype=dtype)
    for name, found in zip(NAMES, gradients, strict=True):
        turned = (lambda one: one.T) if name.startswith("lora") else (lambda one: one)
        error = np.abs(oracle.fp64(found) - turned(getattr(exactly, f"d_{name}")))
        assert np.all(error <= turned(getattr(bound, f"d_{name}"))), name


@pytest.mark.parametrize("mode", [slow("adapter"), "input"])
def test_dropout(mode):
    kernel = kernels.draw("nf4", SHAPE, (3, 24))
    arrays, dy = operands(kernel)
    dropout = Dropout(draw_seed(jax.random.key(1)), 0.4, mode)
    near(*(both(one, arrays, dy, dropout=dropout) for one in (kernel, plain(kernel))))


def test_lora_linear():
    kernel = kernels.draw("float8_e4m3fn", SHAPE, (3, 3))
    (x, a, b, *_), _ = operands(kernel)
    near(*(lora_linear(x, one, a, b, SCALE) for one in (kernel, plain(kernel))))


@pytest.mark.ci
def test_vmap_scan_and_checkpoint():
    one, two = (kernels.draw("nf4", SHAPE, (3, 24), seed=seed) for seed in (0, 1))
    (x, a, b, magnitude, _), _ = operands(one)
    stacked = jax.tree.map(lambda *pair: jnp.stack(pair), one, two)

    def call(kernel, a):
        return jnp.sin(dora_linear(x, kernel, a, b, magnitude, SCALE)).sum()

    gradient = jax.grad(call, 1)
    each = jnp.stack([gradient(plain(kernel), a) for kernel in (one, two)])
    near(jax.jit(jax.vmap(gradient, (0, None)))(stacked, a), each)
    _, scanned = jax.lax.scan(lambda c, kernel: (c, gradient(kernel, a)), None, stacked)
    near(scanned, each)
    near(jax.jit(jax.grad(jax.checkpoint(call), 1))(one, a), each[0])
    near(
        jax.vmap(lambda x: dora_linear(x, one, a, b, magnitude, SCALE))(x),
        dora_linear(x, plain(one), a, b, magnitude, SCALE),
    )


LARGE = (2048, 2048)


def abstract(kernel):
    return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), kernel)


def large(qtype):
    """Returns an abstract kernel and adapter that are read in several blocks."""
    rows, columns = LARGE
    kernel = abstract(kernels.draw(qtype, (64, 8), (1, 8)))
    tiles = (rows // 64, columns) if qtype == "nf4" else (1, columns)
    sized = zip(jax.tree.leaves(kernel), (LARGE, tiles), strict=True)
    leaves = [jax.ShapeDtypeStruct(shape, one.dtype) for one, shape in sized]
    kernel = jax.tree.structure(kernel).unflatten(leaves)
    a, b = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 16), (16, columns)))
    return kernel, a, b


@pytest.mark.parametrize("qtype", quantised.FORMATS)
def test_the_norm_has_no_floats_of_the_kernels_size(qtype, optimized):
    arguments = large(qtype)
    norm = lambda *arrays: factored_norm(*arrays, SCALE)  # noqa: E731
    for equation in equations(norm, *arguments):
        for one in equation.outvars:
            floats = jnp.issubdtype(one.aval.dtype, jnp.floating) and one.aval.dtype.itemsize > 1
            assert not floats or one.aval.size <= np.prod(LARGE) / 4, equation
    text = jax.jit(norm).lower(*arguments).compile().as_text()
    assert "while" in text
    assert largest_floats(text) <= np.prod(LARGE) / 4


def test_what_is_kept_for_the_gradient_is_quantised(optimized):
    kernel, a, b = large("nf4")
    x, m = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, LARGE[0]), (LARGE[1],)))

    def call(kernel, x, a, b, m):
        return jax.vjp(
            lambda *arrays: dora_linear(arrays[0], kernel, *arrays[1:], SCALE), x, a, b, m
        )

    kept = jax.tree.leaves(jax.eval_shape(call, kernel, x, a, b, m)[1])
    floats = [one.size for one in kept if jnp.issubdtype(one.dtype, jnp.floating)]
    assert any(one.dtype == jnp.uint4 and one.shape == LARGE for one in kept)
    assert max(floats) <= np.prod(LARGE) / 64


@pytest.mark.parametrize(
    ("qtype", "tiles", "spec"),
    [
        ("nf4", (4, 24), ("x", None)),
        slow("nf4", (4, 24), (None, "x")),
        slow("int8", (4, 4), ("x", "y")),
        ("int8", (1, 24), ("x", "y")),
        slow("nf4", (1, 24), ("x", "y")),
        ("int8", (4, 3), (None, "x")),
    ],
)
@pytest.mark.ci
def test_kernels_on_automatic_axes(qtype, tiles, spec):
    """Each device reads its own shard, if that has whole tiles: no array larger than an activation
    is communicated."""
    mesh = automatic(x=2, y=2)
    kernel = kernels.draw(qtype, (128, 24), tiles)
    (x, a, b, magnitude, _), dy = operands(kernel, rows=(4,))

    def call(kernel, x, a, b, magnitude):
        y, pull = jax.vjp(lambda x, a: dora_linear(x, kernel, a, b, magnitude, SCALE), x, a)
        return factored_norm(kernel, a, b, SCALE), y, pull(dy)

    wanted = call(plain(kernel), x, a, b, magnitude)

    def placed(one):
        axes = [None if size % 2 else axis for axis, size in zip(spec, one.shape, strict=True)]
        return jax.device_put(one, NamedSharding(mesh, P(*axes)))

    compiled = jax.jit(call)
    on_mesh = jax.tree.map(placed, kernel)
    rest = jax.device_put((x, a, b, magnitude), NamedSharding(mesh, P()))
    near(compiled(on_mesh, *rest), wanted)
    text = compiled.lower(on_mesh, *rest).compile().as_text()
    most = 4 * 4 * 128 if tiles[1] % 2 == 0 else 128 * 24
    assert max([one.bytes for one in collectives(text)], default=0) <= most


@pytest.mark.ci
def test_kernels_on_explicit_axes():
    mesh = explicit(x=4)
    kernel = kernels.draw("nf4", (128, 24), (4, 24))
    (x, a, b, magnitude, _), _ = operands(kernel, rows=(4,))
    wanted = dora_linear(x, plain(kernel), a, b, magnitude, SCALE)
    norm = factored_norm(plain(kernel), a, b, SCALE)
    with jax.set_mesh(mesh):
        on_mesh = jax.device_put(kernel, NamedSharding(mesh, P(None, "x")))
        x, a, b, magnitude = jax.device_put((x, a, b, magnitude), NamedSharding(mesh, P()))
        near(factored_norm(on_mesh, a, b, SCALE), norm)
        near(jax.jit(dora_linear)(x, on_mesh, a, b, magnitude, SCALE), wanted)


GOOD = kernels.draw("nf4", SHAPE, (3, 24))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qtype": "int3"}, TypeError, "quantised as int3; expected one of nf4, int4, int8"),
        ({"qtype": jnp.int8}, TypeError, "quantised as int8 and stored as uint4; expected int8"),
        (
            {"scale": jnp.ones((5, 24))},
            ValueError,
            r"scales of shape \(5, 24\), whose tiles do not",
        ),
        ({"scale": jnp.ones(24)}, ValueError, r"scales of shape \(24,\), whose tiles do not"),
        ({"scale": jnp.ones((96, 3))}, ValueError, "nf4 along its output axis"),
        ({"scale": jnp.zeros((3, 24))}, ValueError, r"scales from 0\.0 to 0\.0, of which 72 are 0"),
        ({"scale": jnp.full((3, 24), jnp.nan)}, ValueError, "scales from nan to nan"),
        ({"scale": jnp.ones((3, 24), jnp.int8)}, TypeError, "scales of int8"),
        (
            {"zero_point": jnp.ones((1, 24), jnp.uint4)},
            ValueError,
            r"zero points of shape \(1, 24\)",
        ),
    ],
)
def test_bad_kernels(changes, error, message):
    (x, a, b, magnitude, _), _ = operands(GOOD)
    parts = {name: getattr(GOOD, name) for name in ("qvalue", "scale", "zero_point", "qtype")}
    bad = qwix.QArray(**parts | changes)
    for call in (
        lambda: factored_norm(bad, a, b, SCALE),
        lambda: dora_linear(x, bad, a, b, magnitude, SCALE),
    ):
        with pytest.raises(error, match=message) as raised:
            call()
        assert "quantise" in str(raised.value)


def test_scales_may_be_negative():
    """bitsandbytes' double quantisation makes such scales for blocks of small numbers."""
    kernel = qwix.QArray(GOOD.qvalue, GOOD.scale.at[1, 2].multiply(-1), None, GOOD.qtype)
    (_, a, b, *_), _ = operands(kernel)
    norm = factored_norm(kernel, a, b, SCALE)
    np.testing.assert_allclose(norm, norm_of(kernel, a, b), rtol=1e-5)


def test_only_a_kernel_can_be_quantised():
    (x, a, b, magnitude, _), _ = operands(GOOD)
    given = (x, plain(GOOD), a, b, magnitude, SCALE)
    for index, name in enumerate(("x", "kernel", "lora_a", "lora_b", "magnitude")):
        if name != "kernel":
            bad = (*given[:index], GOOD, *given[index + 1 :])
            with pytest.raises(TypeError, match=f"^{name} is quantised as nf4, but only a kernel"):
                dora_linear(*bad)


def test_a_quantised_kernel_has_no_gradient():
    kernel = kernels.draw("float8_e4m3fn", SHAPE, (1, 24))
    (x, a, b, magnitude, _), _ = operands(kernel)
    with pytest.raises(TypeError, match="quantised as float8_e4m3fn is being differentiated"):
        jax.grad(lambda k: dora_linear(x, k, a, b, magnitude, SCALE).sum())(kernel)
