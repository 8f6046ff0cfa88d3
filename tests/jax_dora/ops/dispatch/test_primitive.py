"""The lowering of the operators' primitive, for programs for one device and for several."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dora import ops
from jax_dora.ops.compose import COMPOSE_BACKWARD, ComposeBackward, ComposeBackwardSettings
from jax_dora.ops.dispatch import choose, partitions, primitive
from jax_dora.ops.dispatch.choose import Target
from jax_dora.ops.dispatch.op import Names
from jax_dora.ops.mosaic.projection import project, project_back
from jax_dora.ops.norm import NORM
from jax_dora.ops.operands import AdaptedKernel, NormSettings, ProductSettings, Projection
from jax_dora.ops.projection_products import BACK, FORWARD, Back, ForwardSettings
from jax_dora.ops.reduction import REDUCE, Reduction, ReductionSettings
from tests.jax_dora.meshes import automatic
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import thinned

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, IN, RANK, OUT = 2048, 4096, 64, 4096


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(choose, "target", lambda: Target("gpu", "9.0"))


LAYER = (aval(ROWS, IN), aval(IN, OUT), aval(IN, RANK), aval(RANK, OUT), aval(OUT, dtype=F32))


def layer(*operands, **options):
    return ops.dora_linear(*operands, 0.7, **options)


def test_a_program_for_one_of_several_devices_has_kernels(on_hopper):
    assert jax.device_count() > 1
    text = for_cuda(layer, *LAYER)
    assert "dora_stationary_norm" in text
    assert "dora_project" in text


def test_a_program_for_several_devices_is_partitioned(on_hopper):
    mesh = automatic(data=4)
    rows, *others = LAYER
    rows = jax.ShapeDtypeStruct(rows.shape, BF16, sharding=NamedSharding(mesh, P("data")))
    text = for_cuda(layer, rows, *others)
    assert text.count(f"@{partitions.TARGET}(") == 3
    assert "mosaic_gpu" not in text


def test_the_scheduler_knows_how_long_a_projection_takes(on_hopper):
    """Each of four devices computes a quarter of the FLOPs at `FLOP_RATE`; the norm, z and what is
    summed in the backward pass have the time of all other operators."""
    rows, *others = LAYER
    rows = jax.ShapeDtypeStruct((4 * ROWS, IN), BF16, sharding=P("data"))

    def loss(*operands):
        return layer(*operands).astype(F32).sum()

    with jax.set_mesh(automatic(data=4)):
        text = for_cuda(jax.grad(loss, (0, 2, 3, 4)), rows, *others)
    found = re.findall(rf'{partitions.TARGET}.*latency_metadata = "(\d+)"', text)
    product, other = 2 * ROWS * IN * OUT / primitive.FLOP_RATE, primitive.SECONDS
    assert found == [str(round(1e9 * one)) for one in (other, other, product, other, product)]


INT8 = qwix.QArray(aval(IN, OUT, dtype=jnp.int8), aval(1, OUT, dtype=F32), None, jnp.int8)


@pytest.mark.parametrize(("kernel", "size"), [(aval(IN, OUT), 2), (INT8, 1)])
def test_few_rows_take_as_long_as_reading_the_kernel(kernel, size):
    leaves, tree = jax.tree.flatten((aval(8, IN), kernel))
    seconds = primitive._projection_seconds(tree, leaves, automatic(data=2))
    assert 1 <= 2 * seconds * primitive.BYTE_RATE / (IN * OUT * size) < 1.01


def of_device(op, settings, operands, mesh, specs, results):
    """Returns (the program of one device, lowered for CUDA; the specs of its operands)."""
    leaves, tree = jax.tree.flatten(operands)
    avals = [
        jax.typeof(jnp.zeros((), leaf.dtype)).update(
            shape=leaf.shape, sharding=NamedSharding(mesh.abstract_mesh, P())
        )
        for leaf in leaves
    ]
    whole = primitive._partitioned(op, settings, tree, avals)

    def placed(arrays, specs):
        return [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P(*spec)))
            for a, spec in zip(arrays, specs, strict=True)
        ]

    made = jax.tree.leaves(primitive._shapes(*primitive._call_key(avals, op, settings, tree)))
    _, run, _, shardings = whole.partition(mesh, placed(leaves, specs), placed(made, results))
    parts = [
        jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    alone = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return for_cuda(alone, *parts), [tuple(one.spec) for one in shardings]


FORWARD_OPERANDS = Projection(
    aval(ROWS, IN),
    aval(IN, OUT),
    aval(IN, RANK),
    aval(RANK, OUT),
    aval(OUT, dtype=F32),
    aval(dtype=F32),
    z=aval(ROWS, RANK),
)
N = None


WHOLE, ROWS_CUT, COLUMNS_CUT = (N, N), ("data", N), (N, "data")
# The specs of x, the kernel, lora_a, lora_b, g, s and z that XLA proposes, and those that are used;
# the spec of the result.
LAYOUTS = {
    "data": (
        [ROWS_CUT, WHOLE, WHOLE, WHOLE, (N,), (), WHOLE],
        [ROWS_CUT, WHOLE, WHOLE, WHOLE, (N,), (), ROWS_CUT],
        ROWS_CUT,
    ),
    "fsdp": (
        [ROWS_CUT, ROWS_CUT, ROWS_CUT, COLUMNS_CUT, (N,), (), WHOLE],
        [ROWS_CUT, WHOLE, WHOLE, WHOLE, (N,), (), ROWS_CUT],
        ROWS_CUT,
    ),
    "column": (
        [WHOLE, COLUMNS_CUT, WHOLE, WHOLE, (N,), (), WHOLE],
        [WHOLE, COLUMNS_CUT, WHOLE, COLUMNS_CUT, ("data",), (), WHOLE],
        COLUMNS_CUT,
    ),
    "row": (
        [COLUMNS_CUT, ROWS_CUT, ROWS_CUT, WHOLE, (N,), (), WHOLE],
        [COLUMNS_CUT, ROWS_CUT, ROWS_CUT, WHOLE, (N,), (), WHOLE],
        WHOLE,
    ),
}


@pytest.mark.parametrize("want_inner", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_device_runs_the_kernel_on_its_part(on_hopper, name, want_inner):
    proposed, taken, result = LAYOUTS[name]
    settings = ForwardSettings("dora_linear", "mosaic", want_inner=want_inner)
    results = [result] * (1 + want_inner)
    mesh = automatic(data=2)
    text, specs = of_device(FORWARD, settings, FORWARD_OPERANDS, mesh, proposed, results)
    assert specs == taken
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1
    # Copies keep XLA from joining the kernel with reading lora_b from a stack of layers.
    copies = re.findall(r"optimization_barrier %.*tensor<64x4096xbf16>, tensor<4096xf32>", text)
    assert len(copies) == (name == "fsdp")
    assert text.count("all_reduce") == (name == "row")
    assert "all_gather" not in text


@pytest.mark.parametrize("name", LAYOUTS)
def test_during_collectives_a_kernel_has_a_block_per_tile(on_hopper, monkeypatch, name):
    """FSDP gathers kernels while products run, and with sharded rows, gradients are summed."""
    used, launch_shared = {}, choose.launch_shared

    def recorded(launch, *arguments, sm_count, **options):
        used[launch] = sm_count
        return launch_shared(launch, *arguments, sm_count=sm_count, **options)

    monkeypatch.setattr(choose, "launch_shared", recorded)
    proposed, _, result = LAYOUTS[name]
    settings = ForwardSettings("dora_linear", "mosaic")
    of_device(FORWARD, settings, FORWARD_OPERANDS, automatic(data=2), proposed, [result])
    x, kernel, a, b, _, _, z = proposed
    forward = FORWARD_OPERANDS
    back = ProductSettings("mosaic")
    operands = Back(aval(ROWS, OUT), forward.kernel, forward.z, forward.lora_a, forward.lora_b)
    text, _ = of_device(BACK, back, operands, automatic(data=2), [result, kernel, z, a, b], [x])
    copies = re.findall(r"optimization_barrier %.*tensor<4096x64xbf16>", text)
    assert len(copies) == (name == "fsdp")
    wanted = {
        module.launch: choose.UNLIMITED_BLOCKS if name in names else choose.HOPPER_SM_COUNT
        for module, names in ((project, ["fsdp"]), (project_back, ["data", "fsdp"]))
    }
    assert used == wanted


@pytest.mark.parametrize(
    ("rows", "rank", "kernel_spec", "kernels"),
    [
        (4096, 384, ROWS_CUT, 1),
        (4096, 384, WHOLE, 0),
        (4096, 64, ROWS_CUT, 0),
        (8192, 384, ROWS_CUT, 0),
    ],
)
def test_z_is_a_kernel_that_waits_where_kernels_are_gathered(
    on_hopper, rows, rank, kernel_spec, kernels
):
    settings = ReductionSettings(None, None, 0.0, (2 * rows, IN))
    operands = Reduction(aval(2 * rows, IN), aval(IN, rank), None, aval(IN, OUT))
    specs = [ROWS_CUT, kernel_spec, kernel_spec]
    text, taken = of_device(REDUCE, settings, operands, automatic(data=2), specs, [ROWS_CUT])
    assert taken == [ROWS_CUT, WHOLE, WHOLE]
    assert text.count("custom_call @mosaic_gpu") == kernels
    waits = re.findall(rf"optimization_barrier %.*tensor<{IN}x{OUT}xbf16>", text)
    assert len(waits) == kernels


def test_z_waits_for_quantised_kernels(on_hopper):
    settings = ReductionSettings(None, None, 0.0, (8192, IN))
    operands = Reduction(aval(8192, IN), aval(IN, 384), None, INT8)
    specs = [ROWS_CUT, ROWS_CUT, ROWS_CUT, WHOLE]
    text, _ = of_device(REDUCE, settings, operands, automatic(data=2), specs, [ROWS_CUT])
    assert re.findall(rf"optimization_barrier %.*tensor<{IN}x{OUT}xi8>", text)


def test_the_norm_sums_only_vectors(on_hopper):
    operands = AdaptedKernel(aval(IN, OUT), aval(IN, RANK), aval(RANK, OUT), aval(dtype=F32))
    mesh = automatic(data=2, model=2)
    specs = [("data", "model"), ("data",), (N, "model"), ()]
    text, _ = of_device(NORM, NormSettings(None), operands, mesh, specs, [("model",)])
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1
    # Each of the two devices sums half of the features.
    (summed,) = re.findall(r"reduce_scatter.*?-> (tensor<[^>]*>)", text, re.DOTALL)
    assert summed == f"tensor<{OUT // 4}xf32>"
    (gathered,) = re.findall(r"all_gather.*?-> (tensor<[^>]*>)", text, re.DOTALL)
    assert gathered == f"tensor<{OUT // 2}xf32>"
    assert "all_reduce" not in text


@pytest.mark.parametrize(("features", "in_parts"), [(OUT, True), (OUT + 1, False)])
def test_the_magnitudes_gradient_is_summed_in_parts(on_hopper, features, in_parts):
    """XLA joins all-reduces of vectors, and compiles a kernel to cut each out of the result."""
    rows = aval(ROWS, features)
    operands = ComposeBackward(rows, rows, aval(features, dtype=F32), aval(dtype=F32))
    settings = ComposeBackwardSettings("dora_linear", None)
    specs = [ROWS_CUT, ROWS_CUT, (N,), ()]
    results = [ROWS_CUT, (N,)]
    text, _ = of_device(COMPOSE_BACKWARD, settings, operands, automatic(data=2), specs, results)
    assert text.count('"stablehlo.reduce_scatter"') == in_parts
    assert text.count('"stablehlo.all_gather"') == in_parts
    assert text.count('"stablehlo.all_reduce"') == (not in_parts)


def test_a_shard_at_which_the_kernel_loses_uses_xla(on_hopper):
    settings = ForwardSettings("dora_linear", None)
    operands = FORWARD_OPERANDS._replace(x=aval(1024, IN), z=aval(1024, RANK))
    specs = [("data",), (), (), (), (), (), ("data",)]
    text, _ = of_device(FORWARD, settings, operands, automatic(data=2), specs, [("data",)])
    assert "mosaic_gpu" not in text
    text, _ = of_device(FORWARD, settings, operands, automatic(data=1), specs, [("data",)])
    assert "mosaic_gpu" in text


def test_a_named_kernel_says_where_it_does_not_run(on_hopper):
    mesh = automatic(data=2, model=2)
    inside = functools.partial(layer, implementation="mosaic")
    partly = jax.shard_map(
        inside, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    with pytest.raises(NotImplementedError, match="one with manual axes and others"):
        for_cuda(partly, *LAYER)
    unnamed = jax.shard_map(
        layer, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    assert "mosaic_gpu" not in for_cuda(unnamed, *LAYER)


SMALL = [(8, 24), (24, 16), (24, 4), (4, 16), (16,)]


def drawn():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(size), F32) for size in SMALL]


def scanned(x, *layer_operands):
    """Two rematerialised layers of stacked parameters."""

    def body(x, operands):
        return x + jnp.tanh(layer(x, *operands)) @ jnp.ones((16, 24)), None

    stacked = [jnp.stack([one, 0.5 * one]) for one in layer_operands]
    return jax.lax.scan(jax.checkpoint(body), x, stacked)[0]


def rows_batched(x, *operands):
    return jax.vmap(layer, (0, *(None,) * 4))(jnp.stack([x, 2 * x]), *operands)


def all_batched(x, *operands):
    return jax.vmap(layer)(*(jnp.stack([one, 1.5 * one]) for one in (x, *operands)))


@pytest.mark.parametrize(
    "function", thinned([layer, scanned, rows_batched, all_batched], [scanned, all_batched])
)
@pytest.mark.ci
def test_transformations_on_a_mesh(function):
    """The results are those of one device; rows are sharded over one mesh axis, columns over the
    other."""
    mesh = automatic(data=2, model=2)
    operands = drawn()
    specs = [P("data"), P(None, "model"), P(), P(None, "model"), P("model")]
    placed = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, specs, strict=True)
    ]

    def loss(*operands):
        return jnp.sum(jnp.sin(function(*operands)))

    gradient = jax.value_and_grad(loss, (0, 2, 3, 4))
    wanted = jax.jit(gradient)(*operands)
    found = jax.jit(gradient)(*placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def test_exports_for_several_devices_are_left_to_xla():
    mesh = automatic(data=4)
    operands = drawn()
    operands[0] = jax.device_put(operands[0], NamedSharding(mesh, P("data")))
    exported = jax.export.export(jax.jit(layer))(*operands)
    assert partitions.TARGET not in exported.mlir_module()
    found = jax.jit(exported.call)(*operands)
    np.testing.assert_allclose(found, layer(*drawn()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("capability", ["8.6", "9.0"])
def test_exports_with_any_number_of_rows_on_a_machine_with_a_gpu(capability, monkeypatch):
    monkeypatch.setattr(choose, "target", lambda: Target("gpu", capability))
    x, *others = drawn()
    (rows,) = jax.export.symbolic_shape("rows")

    def gradient(x, *others):
        return jax.grad(lambda x: layer(x, *others).sum())(x)

    of_any = jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    exported = jax.export.export(jax.jit(gradient), platforms=["cpu", "cuda"])(of_any, *others)
    found = exported.call(x[:5], *others)
    np.testing.assert_allclose(found, gradient(x[:5], *others), rtol=1e-4, atol=1e-4)


def test_a_named_kernel_refuses_symbolic_sizes(on_hopper):
    (rows,) = jax.export.symbolic_shape("rows")
    export = jax.export.export(jax.jit(functools.partial(layer, implementation="mosaic")))
    with pytest.raises(NotImplementedError, match=r"'mosaic' does not .* a size is symbolic"):
        export(aval(rows, IN), *LAYER[1:])


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit])
@pytest.mark.parametrize(("value", "checks"), [("nan", jax.debug_nans), ("inf", jax.debug_infs)])
def test_jaxs_checks_of_numbers_name_the_operator(value, checks, wrap):
    kernel = jnp.full((8, 6), float(value))
    norm = wrap(ops.factored_norm)
    with checks(True):
        ones = jnp.ones((8, 2)), jnp.ones((2, 6))
        assert jnp.isfinite(norm(jnp.ones((8, 6)), *ones, 2.0)).all()
        with pytest.raises(FloatingPointError, match=rf"\({value}\) encountered in norm"):
            norm(kernel, *ones, 2.0)


def test_donated_operands():
    mesh = automatic(data=4)
    x, *others = drawn()
    wanted = layer(x, *others)
    placed = jax.device_put(x, NamedSharding(mesh, P("data")))
    step = jax.jit(lambda x, *others: x + layer(x, *others)[:, :1], donate_argnums=0)
    np.testing.assert_allclose(step(placed, *others), x + wanted[:, :1], rtol=1e-5, atol=1e-5)
    assert placed.is_deleted()


def gradient_in_fp8(mesh, shape, of_kernel, rows=None):
    """Returns `of_device` of the gradient with respect to x of a kernel [in, out] in FP8. `rows`
    are the specs of the result's gradient and of x's."""
    n_in, out = shape
    codes = aval(*shape, dtype="float8_e4m3fn")
    kernel = qwix.QArray(codes, aval(1, out, dtype=F32), None, jnp.dtype(codes.dtype))
    g, rank, rows = aval(out, dtype=F32), 16, rows or [(mesh.axis_names, N)] * 2
    operands = Back(aval(ROWS, out), kernel, aval(ROWS, rank), aval(n_in, rank), aval(rank, out), g)
    specs = [rows[0], of_kernel, WHOLE, WHOLE, WHOLE, WHOLE, (N,)]
    settings = ProductSettings("mosaic", None, "float8_e5m2")
    return of_device(BACK, settings, operands, mesh, specs, rows[1:])


@pytest.mark.parametrize(
    ("of_kernel", "kept", "gathered"),
    [
        (ROWS_CUT, ROWS_CUT, "4096x4096"),
        (COLUMNS_CUT, COLUMNS_CUT, "2x4096x2048"),  # in parts of the features that are summed
        (("data", "other"), WHOLE, None),  # XLA gathers along both axes
    ],
)
def test_a_product_in_fp8_gathers_the_codes_of_its_kernel(on_hopper, of_kernel, kept, gathered):
    """The kernel takes them as they arrive: no other operation has their bytes."""
    text, used = gradient_in_fp8(automatic(data=2, other=2), (IN, OUT), of_kernel)
    assert used[1] == kept
    assert "dora_coded_matmul" in text
    found = re.findall(r"all_gather.*-> tensor<([\dx]+)xf8E4M3FN>", text)
    assert found == ([gathered] if gathered else [])


def test_a_product_in_fp8_joins_parts_that_the_kernel_cannot_read(on_hopper):
    text, _ = gradient_in_fp8(automatic(data=4), (4096, 6912), COLUMNS_CUT)
    assert "dora_coded_matmul" in text
    assert re.findall(r"concatenate .*-> tensor<([\dx]+)xf8E4M3FN>", text) == ["4096x6912"]


def test_a_product_in_fp8_gathers_no_codes_over_axes_that_it_keeps(on_hopper):
    """The gradient's rows and features are sharded over the mesh axes of the kernel's outputs."""
    mesh, of_kernel = automatic(data=2, other=2), (N, ("data", "other"))
    text, used = gradient_in_fp8(mesh, (IN, OUT), of_kernel, [WHOLE, ("other", "data")])
    assert used[1] == ROWS_CUT
    assert "dora_coded_matmul" in text
    assert "all_gather" not in text


@pytest.mark.parametrize("bwd_qtype", [None, "float8_e5m2"])
def test_only_products_with_gradients_in_fp8_gather_themselves(bwd_qtype):
    norm = AdaptedKernel(aval(IN, OUT), aval(IN, RANK), aval(RANK, OUT), aval(dtype=F32))
    assert Names.of(NORM, NormSettings(None), norm, [None, None]).apart is None
    back = Back(aval(ROWS, OUT), aval(IN, OUT), aval(ROWS, RANK), aval(IN, RANK), None)
    names = Names.of(BACK, ProductSettings(None, None, bwd_qtype), back, [None])
    assert names.apart == (bwd_qtype and (1, (IN, OUT)))
