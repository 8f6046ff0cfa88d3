"""A kernel is lowered once in a process, whatever programs, layers and shards call it."""

import functools
import gc
import io
import re
import types
from concurrent.futures import thread as futures

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.mosaic.gpu import core, fragmented_array, layout_inference
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir

import jax_dora
from jax_dora.layers import magnitude
from jax_dora.ops import projection_products
from jax_dora.ops.dispatch import choose, partitions, primitive
from jax_dora.ops.mosaic.hopper import kernel_module, launch
from tests.jax_dora.meshes import automatic
from tests.jax_dora.programs import aval, for_cuda

WIDTH, ROWS, RANK = 1024, 2048, 16


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Chooses kernels as on a Hopper GPU, and begins without lowered kernels."""
    target = choose.Target("gpu", "9.0")
    monkeypatch.setattr(choose, "target", lambda: target)
    for cached in (launch._program, launch._code, partitions._lowered):
        cached.cache_clear()
    # Operators are traced anew, and their traces for a target that is not there are not kept.
    monkeypatch.setattr(primitive, "_traced", functools.cache(retraced))
    yield
    partitions._lowered.cache_clear()


def retraced(op):
    return jax.jit(lambda *call: op.run(*call), static_argnums=(0, 1))


def step(depth, width=WIDTH):
    """Returns the gradient of a plain list of layers, and its abstract arguments."""

    def make():
        layers = [
            nnx.Linear(width, width, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            for _ in range(depth)
        ]
        rule = jax_dora.DoRARule("all-linear", RANK, RANK, adapter_dtype=jnp.bfloat16)
        return jax_dora.apply_dora(nnx.List(layers), rule, rngs=nnx.Rngs(1))

    graphdef, trained, frozen = nnx.split(nnx.eval_shape(make), nnx.LoRAParam, ...)

    def loss(trained, frozen, x):
        for layer in nnx.merge(graphdef, trained, frozen):
            x = jax.nn.relu(layer(x))
        return x.astype(jnp.float32).sum()

    return jax.grad(loss), trained, frozen, aval(ROWS, width)


def lowered():
    """Returns the number of kernels that were lowered."""
    return launch._code.cache_info().misses


def kernels(program):
    """Returns the bytes of every call of a kernel in a program."""
    return re.findall(r"(?s)custom_call @mosaic_gpu_v2\(.*?kernel_hash = (\".*?\"),", program)


def test_kernels_do_not_grow_with_the_number_of_layers():
    programs = [for_cuda(*step(depth)) for depth in (2, 8)]
    counts = [len(kernels(program)) for program in programs]
    assert counts[0] == counts[1] == lowered() >= 3
    assert kernels(programs[0]) == kernels(programs[1])


@pytest.mark.parametrize(
    ("module", "name", "width"),
    [(projection_products, "scaled_lora_a", 512), (magnitude, "layer_norm", 768)],
)
def test_equal_layers_share_the_trace_of_a_projection_and_its_norm(
    module, name, width, monkeypatch
):
    traced, counts = [], []
    run = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *call: traced.append(call) or run(*call))
    for depth in (2, 8):
        gradient, *arguments = step(depth, width)
        jax.make_jaxpr(gradient)(*arguments)
        counts.append(len(traced))
    assert 0 < counts[0] == counts[1]


def test_an_operator_is_traced_once_for_its_types_and_its_program(monkeypatch):
    """Tracing the XLA definition for the types as well would double the time of it."""
    implementations = []
    run = choose.choose

    def chosen(op, implementation, *candidates, **options):
        implementations.append(implementation)
        return run(op, implementation, *candidates, **options)

    monkeypatch.setattr(choose, "choose", chosen)
    assert kernels(for_cuda(*step(1)))
    assert None in implementations
    assert "xla" not in implementations


def test_kernels_are_lowered_in_threads_that_outlive_the_main_thread(monkeypatch):
    # As Python sets it once the main thread has ended, while others, of a server, still run.
    monkeypatch.setattr(futures, "_shutdown", True)
    for_cuda(*step(1))
    assert lowered() >= 3
    with pytest.raises(ZeroDivisionError):
        launch._in_thread(lambda: 1 // 0)


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_kernels_are_lowered(collects):
    """Collecting costs a sixth of the time. Afterwards Python collects as before."""

    def paused():
        with launch._no_collection():
            return gc.isenabled()

    enabled, during = gc.isenabled(), []

    def collection(phase, info):
        during.append(launch._pauses[:])

    gc.callbacks.append(collection)
    try:
        (gc.enable if collects else gc.disable)()
        with launch._no_collection():
            assert launch._in_thread(paused) is gc.isenabled() is False
        assert gc.isenabled() is collects
        for_cuda(*step(1))
        assert not any(during)
        assert gc.isenabled() is collects
    finally:
        (gc.enable if enabled else gc.disable)()
        gc.callbacks.remove(collection)


def test_kernels_are_compiled_while_jax_lowers(monkeypatch):
    """Threads that begin earlier would take Python's time from tracing."""
    started = set()
    monkeypatch.setattr(launch, "_compile_ahead", lambda kernel, types: started.add(kernel.launch))
    function, *arguments = step(1)
    jax.clear_caches()  # what an earlier test has traced would not be traced again
    traced = jax.jit(function).trace(*arguments)
    assert not started
    traced.lower(lowering_platforms=("cuda",))
    assert len(started) >= 3


def test_ptxas_is_started_once_for_all_kernels(monkeypatch):
    """Pallas would ask for its version in every conversion of a bool, 16 ms each."""
    asked = []

    def version():
        asked.append(90)
        return 90

    library = types.SimpleNamespace(_get_ptxas_isa_version=version)
    found = types.SimpleNamespace(_mosaic_gpu_ext=library)
    monkeypatch.setattr(fragmented_array, "mgpu_lib", found)
    for_cuda(*step(1))
    assert lowered() >= 3
    assert len(asked) == 1


def test_pallas_infers_no_layouts_in_a_step(monkeypatch):
    """Inferring them takes a third of the time to lower a kernel."""
    infer, inferred = layout_inference.infer_layout, []

    def recorded(module, **options):
        inferred.append(module.operation.attributes["sym_name"].value)
        return infer(module, **options)

    monkeypatch.setattr(layout_inference, "infer_layout", recorded)
    for_cuda(*step(1, width=4096))
    assert lowered() >= 3
    assert not inferred


@pytest.fixture
def written(monkeypatch):
    """Returns a list of (bytes, bytes) for the module of each kernel of ours that is lowered: as
    Pallas would write it, and as it is stored."""
    serialise, pairs = kernel_module._serialised, []
    as_pallas = kernel_module._pallas_serialises
    assert as_pallas is not None

    def recorded(module, **options):
        original = code_of(as_pallas(module, **options))  # of a copy
        pairs.append((original, code_of(serialise(module, **options))))
        return module

    monkeypatch.setattr(kernel_module, "_serialised", recorded)
    return pairs


def code_of(module):
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer, desired_version=0)
    return buffer.getvalue()


def test_modules_of_kernels_are_small(written):
    """XLA stores a module with each of its calls."""
    for_cuda(*step(1))
    assert len(written) >= 3
    for original, code in written:
        assert len(code) < 0.75 * len(original)
        assert b".py" in original
        assert b".py" not in code


def test_a_module_is_not_read_while_its_kernel_is_lowered(monkeypatch):
    """Pallas would copy it by writing and reading its bytes. Only the program that a kernel is
    stored as is read, by the program that calls it."""
    parse, read = ir.Module.parse, []

    def recorded(code, *arguments, **options):
        read.append(code)
        return parse(code, *arguments, **options)

    monkeypatch.setattr(ir.Module, "parse", staticmethod(recorded))
    for_cuda(*step(1))
    assert len(read) == lowered() >= 3


def test_a_kernel_of_the_user_is_as_pallas_writes_it():
    def copy(x_gmem, out_gmem, x_smem, ready):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, ready)
        plgpu.barrier_wait(ready)
        plgpu.copy_smem_to_gmem(x_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    x = aval(64, 64)
    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    of_user = plgpu.kernel(copy, out_type=x, scratch_types=scratch)
    assert ".py" not in for_cuda(*step(1))
    assert ".py" in for_cuda(of_user, x)


def test_kernels_are_as_pallas_writes_them_in_a_jax_that_writes_in_another_way(monkeypatch):
    monkeypatch.setattr(core, "_run_serde_pass", kernel_module._pallas_serialises)
    monkeypatch.setattr(kernel_module, "_pallas_serialises", None)
    assert ".py" in for_cuda(*step(1))


def test_descriptors_are_passed_as_words(written):
    """LLVM would compile a load and a store of each of their bytes."""
    for_cuda(*step(1))
    assert len(written) >= 3
    for before, after in (map(sizes_of_descriptors, pair) for pair in written):
        [(count, bits)] = set(before)
        assert bits == 8
        assert after == [(count // 8, 64)] * len(before)


def sizes_of_descriptors(code):
    """Returns the number of elements and their bits where a module declares, and where it reads,
    the descriptors of its TMA copies."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    core.dialect.register_dialect(context)  # pyright: ignore[reportPrivateImportUsage]
    with context, ir.Location.unknown():
        text = str(ir.Module.parse(code))
    found = re.findall(r"(?:elem_type = |-> )!llvm.array<(\d+) x i(\d+)>", text)
    assert len(found) == 2
    return [(int(count), int(bits)) for count, bits in found]


def test_shards_of_all_layers_share_the_kernels():
    """XLA asks for the shards of every operator of every layer. It does so on CPUs too, where the
    kernels of this test return zeros."""
    requested = []

    def zeros(ctx, *operands, kernel):
        requested.append(launch._code(kernel, launch._types(ctx.avals_in)))
        shapes = [(one.shape, one.dtype) for one in ctx.avals_out]
        make = mlir.lower_fun(lambda *_: [jnp.zeros(*one) for one in shapes], multiple_results=True)
        return make(ctx, *operands)

    register = mlir.register_lowering
    register(launch._kernel_p, zeros, platform="cpu")
    on_cuda = primitive._lower
    register(primitive._op_p, functools.partial(on_cuda, cuda=True), platform="cpu")
    mesh, counts = automatic(data=2), []
    # A program that an earlier run has stored (--keep-programs) would not be partitioned again.
    jax.config.update("jax_enable_compilation_cache", False)

    def placed(tree, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.tree.map(lambda a: a.update(sharding=sharding), tree)

    try:
        for depth in (2, 6):
            function, *weights, x = step(depth)
            before = partitions._lowered.cache_info()
            with jax.set_mesh(mesh):
                program = jax.jit(function).lower(*placed(weights, P()), placed(x, P("data")))
                program.compile()
            after = partitions._lowered.cache_info()
            counts.append((after.hits - before.hits, after.misses, lowered()))
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        register(primitive._op_p, on_cuda, platform="cpu")
    (few, *first), (many, *second) = counts
    assert many > 2 * few  # XLA did ask for every layer
    assert first == second
    assert lowered() == len(set(requested))
