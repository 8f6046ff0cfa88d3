"""Products of FP8 activations and kernels, against fp64 products of the rounded and of the
original operands."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import collectives
from jax_dora.ops import Dropout, dora_linear, draw_seed, lora_linear, row_scaled
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.linear import scaled_linear
from jax_dora.ops.mosaic.projection import coded_matmul
from jax_dora.ops.operands import ProductSettings, Projection
from jax_dora.ops.projection_products import BACK, FORWARD, Back, ForwardSettings
from parity import oracle, tolerances
from tests import quantised as kernels
from tests.jax_dora.drawn import normals
from tests.jax_dora.meshes import automatic, explicit
from tests.quantised import NAMES, SCALE, both, near, operands
from tests.tables import slow, thinned

QTYPE, E5M2 = "float8_e4m3fn", "float8_e5m2"
SHAPE = (96, 24)
GROWN = 1 + 2.0**-4  # How much larger than x its rounded rows may be, and with them the bounds.


def kernel_of(shape=SHAPE, seed=0):
    return kernels.draw(QTYPE, shape, (1, shape[1]), seed=seed)


def rounded(x, qtype=QTYPE):
    """Returns x̂ in fp64: x with rows that are rounded in NumPy."""
    wide = np.asarray(x).astype(np.float32)
    scale = np.abs(wide).max(-1, keepdims=True) / np.float32(ml_dtypes.finfo(qtype).max)
    codes = (wide / scale).astype(qtype)
    return codes.astype(np.float64) * scale


@pytest.mark.parametrize(
    ("dtype", "with_bias"),
    thinned(
        itertools.product([jnp.float32, jnp.bfloat16, jnp.float16], [False, True]),
        [(jnp.float32, False), (jnp.bfloat16, True), (jnp.float16, True)],
    ),
)
@pytest.mark.ci
def test_projection_and_gradients(dtype, with_bias):
    check_projection(dtype, with_bias, None)


@pytest.mark.parametrize(
    ("dtype", "with_bias", "bwd_qtype"),
    [
        (jnp.float32, False, QTYPE),
        (jnp.float32, True, E5M2),
        (jnp.bfloat16, False, E5M2),
        slow(jnp.float16, True, QTYPE),
    ],
)
def test_gradients_by_rows(dtype, with_bias, bwd_qtype):
    check_projection(dtype, with_bias, None, bwd_qtype=bwd_qtype)


def test_jax_differentiates_the_definition():
    check_projection(jnp.float32, True, "eager")


@pytest.mark.ci
def test_the_kernels_that_round_rows_and_scale_sums(on_mosaic):
    with on_mosaic():
        check_projection(jnp.bfloat16, True, "mosaic", (128, 24), bwd_qtype=E5M2)


@pytest.mark.parametrize(
    ("out", "shapes"),
    [
        (128, [(16, 128), (16, 128)]),  # forward and backward
        slow(192, [(16, 128)]),  # with a copy of y; the gradient sums 192 features
    ],
)
def test_one_kernel_multiplies_codes_and_adds_the_adapter(on_mosaic, watched, out, shapes):
    found = watched(coded_matmul)
    with on_mosaic():
        check_projection(jnp.bfloat16, False, "mosaic", (128, out), E5M2, rows=16)
    assert found == shapes


def check_projection(dtype, with_bias, implementation, shape=SHAPE, bwd_qtype=None, rows=14):
    kernel = kernel_of(shape)
    (x, a, b, magnitude, bias), dy = operands(kernel, dtype=dtype, rows=(rows,))
    x = x * jnp.exp(jnp.linspace(-4, 4, rows)).astype(dtype)[:, None]  # Rows of their own sizes.
    bias = bias if with_bias else None
    options = {"act_qtype": QTYPE, "bwd_qtype": bwd_qtype, "implementation": implementation}
    y, gradients = both(kernel, (x, a, b, magnitude, bias), dy, **options)
    assert y.dtype == dtype
    meant = kernels.meant(kernel)
    weights = oracle.from_flax(meant, a, b)
    arguments = (x, *weights, magnitude, SCALE)
    norm = oracle.norm(*weights, SCALE)
    g = oracle.magnitude_scale(oracle.fp64(magnitude), norm, dtype)
    apart = (rounded(x) - oracle.fp64(x)) @ meant
    options = {} if bias is None else {"bias": bias}
    exact = oracle.dora_linear(*arguments, dtype=dtype, **options)
    bound = tolerances.dora_linear(dy, *arguments, dtype, **options)
    assert np.all(np.abs(oracle.fp64(y) - exact - g * apart) <= GROWN * bound.y)
    allowed = tolerances.quantised_rows(x, weights[0])
    assert np.all(np.abs(apart) <= allowed)
    assert np.all(np.abs(oracle.fp64(y) - exact) <= g * allowed + GROWN * bound.y)
    wanted = oracle.dora_linear_grads(dy, *arguments, dtype=dtype)
    for name, found in zip(NAMES, gradients, strict=True):
        if found is None:
            continue
        turned = (lambda one: one.T) if name.startswith("lora") else (lambda one: one)
        want = turned(getattr(wanted, f"d_{name}"))
        if name == "magnitude":  # That of the very result.
            want = want + (oracle.fp64(dy) * apart).sum(0) / norm
        limit = GROWN * turned(getattr(bound, f"d_{name}"))
        if name == "x" and bwd_qtype:
            scales = oracle.fp64(kernel.scale)[0]
            d, codes = g * oracle.fp64(dy) * scales, meant / scales
            allowed = tolerances.quantised_rows(d, codes, bwd_qtype)
            moved = (rounded(d, bwd_qtype) - d) @ codes.T
            assert np.all(np.abs(moved) <= allowed)
            # In 16 bits g∘dy is rounded first, so that other codes may be the nearest.
            want, limit = (want + moved, limit) if dtype == jnp.float32 else (want, limit + allowed)
        assert np.all(np.abs(oracle.fp64(found) - want) <= limit), name


@pytest.mark.parametrize(
    ("of_x", "spec", "with_bias"),
    [slow("x", (None, "y"), False), slow(None, ("x", "y"), True), ("y", ("x", None), False)],
)
@pytest.mark.ci
def test_on_automatic_axes(of_x, spec, with_bias):
    """A row on two devices has one scale, and no array as large as the kernel is communicated."""
    mesh, kernel = automatic(x=2, y=2), kernel_of((128, 24))
    (x, a, b, magnitude, bias), dy = operands(kernel, rows=(4,))
    bias = bias if with_bias else None
    options = {"act_qtype": QTYPE, "bwd_qtype": E5M2}

    def call(kernel, x, a, b, magnitude, bias, dy):
        def of(x, a, magnitude):
            return dora_linear(x, kernel, a, b, magnitude, SCALE, bias=bias, **options)

        y, pull = jax.vjp(of, x, a, magnitude)
        return y, pull(dy)

    arguments = (kernel, x, a, b, magnitude, bias, dy)
    wanted = jax.jit(call)(*arguments)

    def placed(one):
        axes = [None if size == 1 else axis for axis, size in zip(spec, one.shape, strict=True)]
        return jax.device_put(one, NamedSharding(mesh, P(*axes)))

    x = jax.device_put(x, NamedSharding(mesh, P(of_x, spec[0] if of_x != spec[0] else None)))
    rest = jax.device_put((a, b, magnitude, bias, dy), NamedSharding(mesh, P()))
    arguments = (jax.tree.map(placed, kernel), x, *rest)
    compiled = jax.jit(call).lower(*arguments).compile()
    near(compiled(*arguments), wanted)
    assert max([one.bytes for one in collectives(compiled.as_text())]) < kernel.qvalue.size


def test_one_input_is_on_every_device():
    """XLA pads a sharded axis of one element, which has as many scales as codes."""
    mesh, kernel = automatic(y=2), kernel_of((1, 24))
    arrays = operands(kernel, rows=(4,))[0]

    def call(spec, arrays):
        x, *adapter, bias = jax.lax.with_sharding_constraint(arrays, NamedSharding(mesh, P()))
        of_inputs = NamedSharding(mesh, spec)
        x, w = jax.lax.with_sharding_constraint((x.T, kernel), of_inputs)
        y = dora_linear(x.T, w, *adapter, SCALE, bias=bias, act_qtype=QTYPE)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P()))

    wanted, found = (jax.jit(functools.partial(call, spec))(arrays) for spec in (P(), P("y")))
    for device in found.addressable_shards:
        near(device.data, wanted)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        # (the transposed codes, the codes) as they are gathered, in parts of their last axis.
        (("x", None), {(2, 32, 64), (128, 32)}),
        (("x", "y"), {(2, 16, 64), (128, 16)}),
        slow((None, "x"), {(32, 128), (2, 128, 16)}),
    ],
)
@pytest.mark.ci
def test_rows_and_kernels_on_one_axis(spec, shapes):
    """As under FSDP: codes travel as they are stored, and no device moves them again."""
    mesh, kernel = automatic(x=2, y=2), kernel_of((128, 32))
    (x, a, b, magnitude, _), dy = operands(kernel, rows=(2, 8))
    names = (("x",), (spec[0], None), (None, spec[1]), (spec[1],))
    codes = kernel.qvalue.T

    def call(x, a, b, g, kernel, codes, dy):
        def of(x, a, b, g):
            options = {"act_qtype": QTYPE, "bwd_qtype": E5M2, "codes": codes}
            return scaled_linear(x, kernel, a, b, g, SCALE, **options)

        y, pull = jax.vjp(of, x, a, b, g)
        return y, pull(dy)

    def put(one, names):
        return jax.device_put(one, NamedSharding(mesh, P(*names)))

    arrays = (x, a, b, magnitude)
    wanted = jax.jit(call)(*arrays, kernel, codes, dy)
    placed = kernel.replace(
        qvalue=put(kernel.qvalue, spec), scale=put(kernel.scale, (None, spec[1]))
    )
    of_dy = ("x", None, spec[1] if spec[1] == "y" else None)
    arrays = (*map(put, arrays, names), placed, put(codes, spec[::-1]), put(dy, of_dy))
    compiled = jax.jit(call).lower(*arrays).compile()
    near(compiled(*arrays), wanted)
    of_codes = r"= (?:f8e4m3fn|f16|s8|u8)\[([\d,]+)\]\S* all-gather"
    found = re.findall(of_codes, compiled.as_text())
    assert sorted(tuple(map(int, one.split(","))) for one in found) == sorted(shapes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradients_of_adapters_are_summed_over_devices_in_their_dtype(dtype):
    """So that as many bytes are sent as for LoRA."""
    kernel = kernel_of((128, 32))
    arrays, dy = operands(kernel, dtype=jnp.bfloat16, rows=(4, 8))
    x, a, b, magnitude, _ = (one.astype(dtype) if one.ndim == 2 else one for one in arrays)

    def call(x, a, b, dy):
        options = {"act_qtype": QTYPE, "bwd_qtype": E5M2}
        pull = jax.vjp(lambda a, b: dora_linear(x, kernel, a, b, magnitude, SCALE, **options), a, b)
        return pull[1](dy)

    x, dy = jax.device_put((x, dy), NamedSharding(automatic(x=4), P("x")))
    text = jax.jit(call).lower(x, a, b, dy).as_text()
    a_or_b = f"{a.shape[0]}x{a.shape[1]}|{b.shape[0]}x{b.shape[1]}"
    found = re.findall(
        rf"dot_general.*contracting_dims = \[0, 1\].*-> tensor<(?:{a_or_b})x(\w+)>", text
    )
    assert found == 2 * [{"bfloat16": "bf16", "float32": "f32"}[jnp.dtype(dtype).name]]


@dataclasses.dataclass(frozen=True)
class Part(Shard):
    """One of two devices that have half of the features each; the test adds their sums."""

    summed: tuple[str, ...] = ("y",)
    is_first: bool = False

    def on_first_device(self, array):
        return array if self.is_first else jnp.zeros_like(array)

    def sum(self, array):
        return array


def product(backward, summed, cols, dtype=jnp.bfloat16):
    """Returns a product in FP8 with an adapter, forward or backward: (its operator, the settings,
    a function of a slice of the summed features to their operands, and one to their product of
    rounded operands in fp64 and its tolerance)."""
    rank, formats = 4, ("mosaic", None, E5M2)
    kernel, normal = kernel_of((cols, summed) if backward else (summed, cols)), normals(3)
    x, z, b = (normal(*shape).astype(dtype) for shape in ((16, summed), (16, rank), (cols, rank)))
    rows, turned = row_scaled.coded(x, "xla"), kernel.qvalue.T

    def operands(part=slice(None)):
        if backward:
            own = kernel.replace(qvalue=kernel.qvalue[:, part], scale=kernel.scale[:, part])
            return Back(x[:, part], own, z, b, None)
        own = kernel.replace(qvalue=kernel.qvalue[part])
        own_rows = row_scaled.RowScaled(x[:, part], rows.codes[:, part], rows.scales)
        return Projection(own_rows, own, None, b.T, None, None, None, None, z, turned[:, part])

    def exact(part=slice(None), with_adapter=True):
        if backward:
            scales = oracle.fp64(kernel.scale)[:, part]
            left = rounded(oracle.fp64(x)[:, part] * scales, E5M2)
            right = oracle.fp64(kernel.qvalue)[:, part].T
        else:
            left = oracle.fp64(rows.codes)[:, part] * oracle.fp64(rows.scales)[:, None]
            right = kernels.meant(kernel)[part]
        base, sums = tolerances.product(left, right)
        adapted, own_sums = tolerances.product(oracle.fp64(z), oracle.fp64(b).T)
        total = base + with_adapter * adapted
        if jax.default_backend() == "gpu":
            sums = sums + tolerances.fp8_product(left, right)
        # Both scales, their product, and the addition of the adapter's product.
        unit = tolerances.UNIT_ROUNDOFF["float32"]
        sums = sums + own_sums + unit * (3 * abs(base) + abs(total))
        return total, tolerances.rounding(total, dtype) + sums

    if backward:
        return BACK, ProductSettings(*formats), operands, exact
    return FORWARD, ForwardSettings("dora_linear", *formats), operands, exact


@pytest.mark.parametrize("backward", [False, True])
def test_devices_add_partial_sums_of_the_kernel(on_mosaic, watched, backward):
    """As under tensor parallelism: each of two has half of the features that are summed."""
    op, settings, operands, exact = product(backward, 256, 128)
    slices = slice(128), slice(128, 256)
    halves = [operands(part) for part in slices]
    found = watched(coded_matmul)
    with on_mosaic():
        partial = [op.run(settings, Part(is_first=n == 0), halves[n])[0] for n in range(2)]
        partial = jax.block_until_ready(partial)
    assert found
    for n, part in enumerate(slices):
        want, bound = exact(part, with_adapter=n == 0)
        assert np.all(abs(oracle.fp64(partial[n]) - want) <= bound)


@pytest.mark.parametrize("backward", [False, True])
def test_devices_add_partial_sums_of_fp16_in_fp32(backward):
    """In fp16 they could overflow, and each would be rounded."""
    op, settings, operands, _ = product(backward, 256, 128, jnp.float16)
    run = functools.partial(op.run, settings._replace(implementation=None), Shard(summed=("y",)))
    on_two = jax.shard_map(run, mesh=automatic(y=2), in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0"))
        patch.setattr(coded_matmul, "wins", lambda *_: True)
        text = str(jax.make_jaxpr(on_two)(operands(slice(128))))
    assert re.findall(r":(\w+)\[16,128\]\S* = psum", text) == ["f32"]


@dataclasses.dataclass(frozen=True)
class Gathered(Shard):
    """A device that gathers codes in a number of equal parts of the summed features."""

    parts: int = 2

    def gather(self, matrix):
        return jnp.stack(jnp.split(matrix, self.parts, axis=1))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("summed", "parts"), [(256, 4), (384, 2), (256, 2)])
def test_a_kernel_that_is_gathered_in_parts_of_any_size(on_mosaic, summed, parts, backward):
    op, settings, operands, exact = product(backward, summed, 128)
    with on_mosaic():
        found, *_ = op.run(settings, Gathered(parts=parts), operands())
        found = oracle.fp64(jax.block_until_ready(found))
    want, bound = exact()
    assert np.all(abs(found - want) <= bound)


@pytest.mark.ci
def test_on_explicit_axes_and_in_shard_map():
    kernel = kernel_of((128, 24))
    (x, a, b, magnitude, _), _ = operands(kernel, rows=(4,))
    call = jax.jit(functools.partial(dora_linear, scale=SCALE, act_qtype=QTYPE))
    wanted = call(x, kernel, a, b, magnitude)
    mesh = explicit(x=2, y=2)
    with jax.set_mesh(mesh):
        on_mesh = jax.device_put(kernel, NamedSharding(mesh, P(None, "x")))
        whole = jax.device_put((x, a, b, magnitude), NamedSharding(mesh, P()))
        near(call(whole[0], on_mesh, *whole[1:]), wanted)
    rows = jax.shard_map(
        call, mesh=automatic(x=2, y=2), in_specs=(P("x"), P(), P(), P(), P()), out_specs=P("x")
    )
    near(rows(x, kernel, a, b, magnitude), wanted)


@pytest.mark.ci
def test_vmap_scan_and_lora_linear():
    one, two = (kernel_of(seed=seed) for seed in (0, 1))
    (x, a, b, magnitude, _), _ = operands(one, rows=(2, 7))
    stacked = jax.tree.map(lambda *pair: jnp.stack(pair), one, two)

    def call(kernel, x):
        return dora_linear(x, kernel, a, b, magnitude, SCALE, act_qtype=QTYPE)

    each = jnp.stack([call(kernel, x) for kernel in (one, two)])
    near(jax.vmap(call, (0, None))(stacked, x), each)
    near(jax.lax.scan(lambda c, kernel: (c, call(kernel, x)), None, stacked)[1], each)
    near(jax.vmap(lambda x: call(one, x))(x), each[0])
    inner = lora_linear(x, one, a, b, SCALE, act_qtype=QTYPE)
    norm = oracle.norm(*oracle.from_flax(kernels.meant(one), a, b), SCALE)
    near(each[0], inner * (magnitude / jnp.asarray(norm, jnp.float32))[None, None])


def test_zeros_nan_and_small_rows():
    kernel = kernel_of()
    x = jnp.ones((4, 96)).at[0].set(0).at[1, 3].set(jnp.nan).at[2].multiply(1e-30)
    y = row_scaled.linear(ProductSettings(None), row_scaled.Factors(x, kernel))
    assert not y[0].any()
    assert jnp.isnan(y[1]).all()
    near(y[2] * 1e30, y[3])


def test_gradients_of_zeros_nan_and_small_rows():
    kernel = kernel_of()
    dy = jnp.ones((4, 24)).at[0].set(0).at[1, 3].set(jnp.nan).at[2].multiply(1e-30)
    dx = row_scaled.times_transposed(ProductSettings(None, None, E5M2), dy, kernel)
    assert not dx[0].any()
    assert jnp.isnan(dx[1]).all()
    near(dx[2] * 1e30, dx[3])


@pytest.mark.parametrize("adapted", [False, True])
def test_no_program_holds_the_kernel_in_floats(adapted):
    """Neither forward nor backward: all values of its shape are codes."""
    kernel = kernel_of()
    (x, a, b, magnitude, _), dy = operands(kernel, dtype=jnp.bfloat16)

    def step(kernel, x, a, b, magnitude, dy):
        norm = jnp.ones(24)
        options = {"norm": norm, "act_qtype": QTYPE, "bwd_qtype": E5M2}

        def call(x, a, b, magnitude):
            if adapted:
                return dora_linear(x, kernel, a, b, magnitude, SCALE, **options)
            settings = ProductSettings(None, None, E5M2)
            return row_scaled.linear(settings, row_scaled.Factors(x, kernel))

        y, pull = jax.vjp(call, x, a, b, magnitude)
        return y, pull(dy)

    text = jax.jit(step).lower(kernel, x, a, b, magnitude, dy).as_text()
    of_shape = re.findall(r"tensor<(?:96x24|24x96)x(\w+)>", text)
    assert set(of_shape) <= {"f8E4M3FN", "i8"}
    assert "f8E5M2" in text


@pytest.mark.parametrize(
    ("tiles", "qtype", "act_qtype", "message"),
    [
        ((3, 24), QTYPE, QTYPE, "kernel is quantised as float8_e4m3fn, scales 3×24"),
        (
            (1, 24),
            "int8",
            QTYPE,
            "kernel is quantised as int8, scales 1×24",
        ),
        (None, None, QTYPE, "kernel is not quantised; expected float8_e4m3fn"),
        ((1, 24), QTYPE, "int8", "act_qtype is 'int8'; expected None"),
    ],
)
def test_bad_kernels(tiles, qtype, act_qtype, message):
    kernel = jnp.ones(SHAPE) if tiles is None else kernels.draw(qtype, SHAPE, tiles)
    (x, a, b, magnitude, _), _ = operands(kernel_of())
    for call in (
        lambda: dora_linear(x, kernel, a, b, magnitude, SCALE, act_qtype=act_qtype),
        lambda: lora_linear(x, kernel, a, b, SCALE, act_qtype=act_qtype),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_unsupported_calls_raise():
    kernel = kernel_of()
    (x, a, b, magnitude, _), _ = operands(kernel)
    options = {"act_qtype": QTYPE}
    dropout = Dropout(draw_seed(jax.random.key(0)), 0.5, "input")
    with pytest.raises(NotImplementedError, match="expected mode 'adapter'"):
        dora_linear(x, kernel, a, b, magnitude, SCALE, dropout=dropout, **options)
    with pytest.raises(NotImplementedError, match="base has dtype float32, neither bfloat16"):
        dora_linear(x, kernel, a, b, magnitude, SCALE, implementation="mosaic", **options)
    with pytest.raises(NotImplementedError, match="bwd_qtype is 'float8_e5m2' and implementation"):
        dora_linear(
            x, kernel, a, b, magnitude, SCALE, bwd_qtype=E5M2, implementation="eager", **options
        )
    for bwd_qtype, act_qtype, message in (
        ("int8", QTYPE, "bwd_qtype is 'int8'; expected None, for gradients as they are, or one of"),
        (E5M2, None, "and act_qtype None; expected act_qtype='float8_e4m3fn' as well"),
    ):
        with pytest.raises(ValueError, match=message):
            lora_linear(x, kernel, a, b, SCALE, act_qtype=act_qtype, bwd_qtype=bwd_qtype)
    with pytest.raises(TypeError, match="is being differentiated"):
        jax.grad(
            lambda k: row_scaled.linear(ProductSettings(None), row_scaled.Factors(x, k)).sum()
        )(kernel)
