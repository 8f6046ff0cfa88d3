"""Few rows times a quantised kernel without an adapter: base layers in decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dora
from jax_dora import quantize
from jax_dora.layers.quantised_kernel import dot_general, einsum, row_scaled_dot_general
from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.decode import decode_project
from jax_dora.ops.weight_only import MOST_ROWS
from parity.oracle import fp64
from tests import quantised
from tests.jax_dora.meshes import automatic, explicit
from tests.jax_dora.programs import aval, equations, for_cuda
from tests.tables import slow

LAST = (((1,), (0,)), ((), ()))


def drawn(rows, n_in, out, qtype="nf4", dtype=jnp.float32):
    kernel = quantised.draw(qtype, (n_in, out), (n_in // 64, out))
    return jnp.asarray(np.random.default_rng(1).normal(size=(rows, n_in)), dtype), kernel


def near(found, x, kernel):
    """Checks that found is x W but for rounding: of W's elements and the result, and of sums."""
    meant, eps = quantised.meant(kernel), float(jnp.finfo(found.dtype).eps)
    exact, terms = fp64(x) @ meant, abs(fp64(x)) @ abs(meant)
    bound = eps / 2 * (terms + abs(exact)) + 2.0**-21 * terms
    assert np.all(abs(fp64(found) - exact) <= bound)


def primitives(function, *arguments):
    return {equation.primitive.name for equation in equations(function, *arguments)}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
def test_the_product_and_its_derivatives(rows, dtype):
    x, kernel = drawn(rows, 128, 24, dtype=dtype)

    def call(x):
        return dot_general(x, kernel, LAST)

    assert ("dora" in primitives(call, x)) == (rows <= MOST_ROWS)
    found, pull = jax.vjp(call, x)
    near(found, x, kernel)
    dy = jnp.asarray(np.random.default_rng(2).normal(size=found.shape), dtype)
    (dx,) = pull(dy)
    wanted = fp64(dy) @ quantised.meant(kernel).T
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    assert np.all(
        abs(fp64(dx) - wanted) <= tolerance * abs(fp64(dy)) @ abs(quantised.meant(kernel)).T
    )
    _, tangent = jax.jvp(call, (x,), (x,))
    near(tangent, x, kernel)


def test_several_axes_vmap_and_scan():
    _, kernel = drawn(1, 128, 24)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(3, 5, 128)), jnp.float32)

    def call(x, kernel):
        return dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))

    flat = x.reshape(-1, 128)
    for found in (
        call(x, kernel),
        jax.vmap(call, (0, None))(x, kernel),
        jax.lax.scan(lambda _, one: (None, call(one, kernel)), None, x)[1],
    ):
        near(found.reshape(-1, 24), flat, kernel)
    columns = jax.tree.map(lambda one: one.reshape(-1, 4, 6), kernel)
    assert "dora" in primitives(call, x, columns)
    near(call(x, columns).reshape(-1, 24), flat, kernel)
    heads = jax.tree.map(lambda one: one.reshape(2, -1, 24), kernel)
    contracted = (((1, 2), (0, 1)), ((), ()))
    near(dot_general(flat.reshape(15, 2, 64), heads, contracted), flat, kernel)


def test_other_products_use_a_dense_kernel():
    """A contracted last axis, a batch axis, and a result of another dtype."""
    x, kernel = drawn(4, 128, 128)
    stack = jax.tree.map(lambda one: jnp.stack([one] * 2), kernel)
    for call in (
        lambda x: dot_general(x, kernel, (((1,), (1,)), ((), ()))),
        lambda x: dot_general(x, kernel, LAST, preferred_element_type=jnp.float32),
        lambda x: dot_general(jnp.stack([x] * 2), stack, (((2,), (1,)), ((0,), (0,)))),
    ):
        assert "dora" not in primitives(call, x)
    np.testing.assert_allclose(
        dot_general(x, kernel, (((1,), (1,)), ((), ()))),
        fp64(x) @ quantised.meant(kernel).T,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("rows", [8, MOST_ROWS + 4])
@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("y", "x")])
def test_on_meshes(spec, rows):
    x, kernel = drawn(rows, 256, 32)
    wanted = fp64(x) @ quantised.meant(kernel)

    def call(x, kernel):
        return dot_general(x, kernel, LAST)

    mesh = automatic(x=2, y=2)
    placed = jax.device_put(kernel, NamedSharding(mesh, P(*spec)))
    whole = jax.device_put(x, NamedSharding(mesh, P()))
    np.testing.assert_allclose(jax.jit(call)(whole, placed), wanted, rtol=1e-4, atol=1e-4)
    if spec[0] is None:
        mesh = explicit(x=2, y=2)
        with jax.set_mesh(mesh):
            placed = jax.device_put(kernel, NamedSharding(mesh, P(*spec)))
            rows = jax.device_put(x, NamedSharding(mesh, P("y")))
            found = jax.jit(call)(rows, placed)
            assert jax.typeof(found).sharding.spec == P("y", "x")
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
            found = einsum("ti,io->to", rows, placed)
            assert jax.typeof(found).sharding.spec == P("y", "x")
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("qtype", ["nf4", "int8"])
@pytest.mark.ci
def test_a_decoded_base_layer_has_no_dense_kernel_on_a_hopper(monkeypatch, qtype):
    """Neither alone nor with a bank of adapters."""
    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0"))
    layers = nnx.Dict(one=nnx.Linear(1024, 2048, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    layers = quantize(layers, qtype)
    bank = jax_dora.AdapterBank(layers, 4, 8)

    def text(rows, bank):
        def call(bank, x, ids):
            model = layers if bank is None else jax_dora.with_bank(layers, bank, ids)
            return model.one(x)

        return for_cuda(call, bank, aval(rows, 1, 1024), aval(rows, dtype=jnp.int32))

    for found in (text(8, None), text(8, bank)):
        assert "dora_decode_project" in found
        assert "1024x2048xbf16" not in found
    assert "1024x2048xbf16" in text(MOST_ROWS + 1, None)


EINSUMS = [
    # Of Tunix's and gemma's query, key and value, and of their output.
    ("BTD,DNH->BTNH", (1024, 8, 128), (16, 8, 128), (3, 2, 1024)),
    ("BTD,NDH->BTNH", (3, 1024, 1024), (1, 16, 1024), (3, 2, 1024)),
    ("BSD,CKDH->CBSKH", (2, 3, 1024, 1024), (2, 1, 16, 1024), (2, 2, 1024)),
    ("BTNH,NHD->BTD", (8, 128, 1024), (8, 2, 1024), (3, 2, 8, 128)),
    (" ...D, DNH -> N...H", (1024, 8, 128), (16, 8, 128), (3, 2, 1024)),
]


@pytest.mark.parametrize(("equation", "shape", "tiles", "x_shape"), EINSUMS)
@pytest.mark.ci
def test_einsums_of_few_rows_are_products_with_matrices(
    equation, shape, tiles, x_shape, monkeypatch
):
    kernel = quantised.draw("nf4", shape, tiles)
    x = jnp.asarray(np.random.default_rng(1).normal(size=x_shape), jnp.float32)

    def call(x, kernel):
        return einsum(equation, x, kernel)

    exact = np.einsum(equation.replace(" ", ""), fp64(x), quantised.meant(kernel))
    np.testing.assert_allclose(call(x, kernel), exact, rtol=1e-4, atol=1e-4 * abs(exact).max())
    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0"))
    text = for_cuda(call, x.astype(jnp.bfloat16), kernel)
    assert "dora_decode_project" in text
    sizes = "x".join(map(str, shape))
    assert f"{sizes}xbf16" not in text
    many = aval(MOST_ROWS + 1, *x_shape[1:])
    assert f"{sizes}xbf16" in for_cuda(call, many, kernel)


@pytest.mark.parametrize(
    ("equation", "x_shape"),
    [
        ("nd,ndf->nf", (3, 128)),  # A product for each n.
        ("td,ndf->tf", (2, 128)),  # A sum over n.
        ("tdf,ndf->tn", (2, 128, 64)),
        ("tf,ndf->tnd", (2, 64)),
        ("tdn,ndf->tf", (2, 128, 3)),
        ("tdd,ndf->tnf", (2, 128, 128)),
    ],
)
@pytest.mark.ci
def test_any_other_einsum_agrees(equation, x_shape):
    kernel = quantised.draw("int8", (3, 128, 64), (1, 2, 64))
    x = jnp.asarray(np.random.default_rng(1).normal(size=x_shape), jnp.float32)
    exact = np.einsum(equation, fp64(x), quantised.meant(kernel))
    found = einsum(equation, x, kernel)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4 * abs(exact).max())


def test_a_malformed_einsum_raises_what_jnp_does():
    kernel = quantised.draw("int8", (4, 128, 64), (1, 2, 64))
    dense = jnp.asarray(quantised.meant(kernel), jnp.float32)
    for equation, shape in (
        ("abi,nio->abno", (3, 128)),
        ("...abi,nio->...abno", (3, 128)),
        ("ti,nio->tno", (3, 127)),
        ("ti,io->to", (3, 128)),
    ):
        x = jnp.ones(shape)
        with pytest.raises((ValueError, TypeError)) as wanted:
            jnp.einsum(equation, x, dense)
        with pytest.raises(wanted.type) as found:
            einsum(equation, x, kernel)
        assert str(found.value) == str(wanted.value)
    # `jnp.einsum` broadcasts an axis of size 1.
    found = einsum("ti,nio->tno", jnp.ones((3, 1)), kernel)
    np.testing.assert_allclose(
        found, jnp.einsum("ti,nio->tno", jnp.ones((3, 1)), dense), rtol=1e-4, atol=1e-4
    )


def test_an_einsum_s_gradient_is_that_of_the_dense_kernel():
    kernel = quantised.draw("nf4", (3, 128, 24), (1, 2, 24))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 128)), jnp.float32)
    dense = jnp.asarray(quantised.meant(kernel), jnp.float32)
    found, wanted = (
        jax.grad(lambda x, w=w: jnp.sin(einsum("btd,ndh->btnh", x, w)).sum())(x)
        for w in (kernel, dense)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("qtype", ["nf4", "int8"])
def test_a_row_of_the_base_has_the_same_bits_in_a_bank(qtype, rows):
    """Whatever XLA fuses the sum of partial products with, here an fp32 sine."""
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    base = nnx.Dict(one=nnx.Linear(4096, 1024, use_bias=False, **options))
    base = quantize(base, qtype)
    adapted = jax_dora.apply_dora(base, jax_dora.DoRARule(".*", 8, 8), rngs=nnx.Rngs(1))
    bank = jax_dora.AdapterBank(base, 4, 8).load(0, jax_dora.get_adapter(adapted))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 1, 4096)), jnp.bfloat16)

    def call(model, x):
        return jnp.sin(3 * model.one(x).astype(jnp.float32))

    found = jax.jit(lambda bank, x, ids: call(jax_dora.with_bank(base, bank, ids), x))(
        bank, x, jnp.where(jnp.arange(rows) == 1, 0, -1)
    )
    alone = jax.jit(lambda x: call(base, x))(x)
    others = np.arange(rows) != 1
    np.testing.assert_array_equal(found[others], alone[others])


@pytest.mark.parametrize(
    ("qtype", "shape", "tiles"),
    [
        ("nf4", (9, 128), (2, 256)),
        slow("nf4", (40, 128), (1, 4)),
        slow("int8", (128,), (2, 256)),
        slow("float8_e4m3fn", (3, 2, 128), (1, 256)),
    ],
)
def test_the_operator_runs_the_kernels(monkeypatch, qtype, shape, tiles):
    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0", sm_count=2))
    monkeypatch.setattr(decode_project, "wins", lambda *_: True)
    launch, seen = decode_project.launch, []
    monkeypatch.setattr(decode_project, "launch", lambda *a, **k: seen.append(1) or launch(*a, **k))
    kernel = quantised.draw(qtype, (128, 256), tiles)
    x = jnp.asarray(np.random.default_rng(4).normal(size=shape), jnp.bfloat16)
    axes = (((x.ndim - 1,), (0,)), ((), ()))
    with plgpu.force_gpu_interpret_mode():
        found = dot_general(x, kernel, axes)
        heads = jax.tree.map(lambda one: one.reshape(-1, 4, one.shape[1] // 4), kernel)
        split = dot_general(x, heads, axes)
    assert len(seen) == 2
    near(found.reshape(-1, 256), x.reshape(-1, 128), kernel)
    np.testing.assert_array_equal(split.reshape(found.shape), found)


def test_contracted_axes_must_have_the_same_sizes():
    _, kernel = drawn(1, 128, 24)
    heads = jax.tree.map(lambda one: one.reshape(2, -1, 24), kernel)
    for rows in (3, MOST_ROWS + 1):
        with pytest.raises(TypeError, match="contract"):
            dot_general(jnp.ones((rows, 64, 2)), heads, (((1, 2), (0, 1)), ((), ())))
    float8 = quantised.draw("float8_e4m3fn", (128, 24), (1, 24))
    with pytest.raises(TypeError, match=r"\[64\].*\[128\]"):
        row_scaled_dot_general(jnp.ones((3, 64)), float8, LAST)


def test_precisions_of_every_form():
    x, kernel = drawn(4, 128, 24)

    def text(x, **options):
        return jax.jit(lambda x: dot_general(x, kernel, LAST, **options)).lower(x).as_text()

    assert "HIGHEST, HIGHEST" in text(x, precision="highest")
    assert "HIGH, HIGHEST" in text(x, precision=["high", "highest"])
    assert "bf16" in text(x, precision="BF16_BF16_F32")

    @jax.jit
    def in_context(x):
        with jax.default_matmul_precision("highest"):
            return dot_general(x, kernel, LAST)

    assert "HIGHEST, HIGHEST" in in_context.lower(x).as_text()
    assert dot_general(x.astype(jnp.bfloat16), kernel, LAST, None, jnp.float32).dtype == jnp.float32


def test_exports_with_any_number_of_rows():
    _, kernel = drawn(1, 128, 24)
    (rows,) = jax.export.symbolic_shape("rows")
    exported = jax.export.export(jax.jit(lambda x: dot_general(x, kernel, LAST)))(
        jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    )
    x, _ = drawn(5, 128, 24)
    near(exported.call(x), x, kernel)
