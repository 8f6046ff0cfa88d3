"""The collectives in the compiled program of a partitioned model, compared with LoRA's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import Collective, collectives
from jax_dora import ops
from tests.jax_dora.meshes import automatic
from tests.tables import thinned

TOKENS, HIDDEN, WIDE, RANK, SCALE = 64, 96, 160, 8, 0.7
BOTH = ("x", "y")
# The specs of the rows, the kernel of `up` and the kernel of `down`.
LAYOUTS = {
    "dp": (BOTH, (None, None), (None, None)),
    "fsdp": (BOTH, (BOTH, None), (BOTH, None)),
    "fsdp of outputs": (BOTH, (None, BOTH), (None, BOTH)),
    "tp": (None, (None, BOTH), (BOTH, None)),
    "dp×tp": ("x", (None, "y"), ("y", None)),
    "fsdp×tp": ("x", ("x", "y"), ("y", "x")),
}


def lora(x, w, a, b, m):
    return x @ w + (x @ a) @ b * jnp.float32(SCALE)


def dora(x, w, a, b, m):
    return ops.dora_linear(x, w, a, b, m, SCALE)


def model(layer, trained, frozen, x):
    """Two residual blocks of a column-parallel and a row-parallel layer."""
    for up, down in zip(*[iter(zip(trained, frozen, strict=True))] * 2, strict=True):
        hidden = jax.nn.silu(layer(x, **up[0], **up[1]))
        x = x + layer(hidden, **down[0], **down[1])
    return x


@pytest.fixture
def programs(optimized):
    """Returns the collectives of (forward, gradient) of a model in a layout, and the number of
    output features of its layers."""

    def compiled(layer, name):
        mesh = automatic(x=2, y=2)
        rows, *kernels = LAYOUTS[name]

        def placed(shape, *spec):
            sharding = NamedSharding(mesh, P(*spec))
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

        trained, frozen = [], []
        for _ in range(2):
            for (n_in, n_out), (into, out) in zip(
                ((HIDDEN, WIDE), (WIDE, HIDDEN)), kernels, strict=True
            ):
                lora_a, lora_b = placed((n_in, RANK), into, None), placed((RANK, n_out), None, out)
                trained.append({"a": lora_a, "b": lora_b, "m": placed((n_out,), out)})
                frozen.append({"w": placed((n_in, n_out), into, out)})
        arguments = (trained, frozen, placed((4, TOKENS, HIDDEN), rows))

        def loss(*arguments):
            return jnp.mean(model(layer, *arguments) ** 2)

        shardings = jax.tree.map(lambda one: one.sharding, trained)
        functions = (
            jax.jit(lambda *arguments: model(layer, *arguments)),
            jax.jit(jax.grad(loss), out_shardings=shardings),
        )
        texts = (one.lower(*arguments).compile().as_text() for one in functions)
        return [collectives(text) for text in texts]

    return compiled


@pytest.mark.ci
@pytest.mark.parametrize("name", thinned(LAYOUTS, ["fsdp", "tp", "fsdp×tp"]))
def test_only_vectors_are_sent_in_addition_to_lora(programs, name):
    features = 4 * 2 * (HIDDEN + WIDE)  # bytes of one number of every output feature
    pairs = zip(programs(dora, name), programs(lora, name), strict=True)
    # The norm is summed and its g gathered; then the magnitude's gradient is summed, too.
    for (ours, theirs), vectors in zip(pairs, (2 + 1, 2 + 1 + 2), strict=True):
        assert sent_by_a_ring(ours) <= sent_by_a_ring(theirs) + vectors * features
        assert max_matrix(ours) <= max_matrix(theirs)


@pytest.mark.parametrize(
    ("of_x", "of_kernel", "of_y"),
    [(P(), (None, BOTH), P(None, None, BOTH)), (P(None, None, BOTH), (BOTH, None), P())],
    ids=["column", "row"],
)
def test_a_layer_sends_only_vectors_in_addition_to_lora(optimized, of_x, of_kernel, of_y):
    """A single tensor-parallel layer, with the usual shardings of its activations."""
    mesh = automatic(x=2, y=2)
    into, out = of_kernel

    def placed(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    trained = {
        "a": placed((HIDDEN, RANK), into, None),
        "b": placed((RANK, WIDE), None, out),
        "m": placed((WIDE,), out),
    }
    kernel, x = placed((HIDDEN, WIDE), into, out), placed((4, TOKENS, HIDDEN), *of_x)

    def sent(layer):
        def loss(trained, x, kernel):
            y = layer(x, kernel, **trained)
            y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, of_y))
            return jnp.mean(y**2)

        places = jax.tree.map(lambda one: one.sharding, (trained, x))
        step = jax.jit(jax.grad(loss, (0, 1)), out_shardings=places)
        text = step.lower(trained, x, kernel).compile().as_text()
        return sum(one.bytes for one in collectives(text))

    # The norm, its g and the magnitude's gradient.
    assert sent(dora) <= sent(lora) + 4 * 3 * WIDE


def sizes_sent(function, shapes, specs):
    """Returns the bytes of each collective of a function on four devices, in ascending order."""
    mesh = automatic(x=4)
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    compiled = jax.jit(function, out_shardings=NamedSharding(mesh, P())).lower(*operands).compile()
    return sorted(one.bytes for one in collectives(compiled.as_text()))


OPERANDS = [(TOKENS, HIDDEN), (HIDDEN, WIDE), (HIDDEN, RANK), (RANK, WIDE), (WIDE,)]


def test_the_gradient_of_a_column_parallel_layer_sums_only_its_result(optimized):
    """Each device multiplies its partial dz by lora_aᵀ before the sum over devices."""

    def d_x(x, w, a, b, m, dy):
        return jax.vjp(lambda x: dora(x, w, a, b, m), x)[1](dy)[0]

    specs = [P(), P(None, "x"), P(), P(None, "x"), P("x"), P(None, "x")]
    assert sizes_sent(d_x, [*OPERANDS, (TOKENS, WIDE)], specs) == [4 * TOKENS * HIDDEN]


def test_a_row_parallel_layer_sums_only_its_result(optimized):
    """Each device multiplies its partial z by lora_b before the sum over devices; LoRA sums z."""
    specs = [P(None, "x"), P("x"), P("x"), P(), P()]
    # The norm's squares, summed in parts that are then gathered, and the result.
    assert sizes_sent(dora, OPERANDS, specs) == [4 * WIDE, 4 * WIDE, 4 * TOKENS * WIDE]


def test_each_layer_sums_its_own_dz():
    """XLA would otherwise join the sums of all layers, which only the optimizer waits for."""
    mesh = automatic(x=4)

    def d(x, w, a, b, m, dy):
        return jax.vjp(lambda *trained: dora(trained[0], w, *trained[1:], m), x, a, b)[1](dy)

    specs = [P(), P(None, "x"), P(), P(None, "x"), P("x"), P(None, "x")]
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([*OPERANDS, (TOKENS, WIDE)], specs, strict=True)
    ]
    text = jax.jit(d).lower(*operands).as_text()
    sums = [f"tensor<{TOKENS}x{size}xf32>" for size in (HIDDEN, RANK, RANK)]
    assert re.findall(rf"optimization_barrier .* : {', '.join(sums)}", text)


def sent_by_a_ring(found: list[Collective]) -> int:
    """Returns the bytes that a ring sends, of an all-reduce as of a reduce-scatter and an
    all-gather."""
    return sum(one.bytes * (1 + (one.kind == "all-reduce")) for one in found)


def max_matrix(found: list[Collective]) -> int:
    """Returns the bytes of the largest all-gather of more than a vector."""
    gathers = [one for one in found if one.kind == "all-gather"]
    return max((one.bytes for one in gathers if "," in "".join(one.types)), default=0)


def test_collectives_are_read_from_a_program():
    text = """
  %a = f32[8,16]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %b = (bf16[4]{0}, f32[]) all-reduce(%y, %z), channel_id=2
  %c = (bf16[4,2]{1,0}, bf16[8,2]{1,0}) all-gather-start(%x), channel_id=3
  %d = f32[4]{0} reduce-scatter(%y), channel_id=4, replica_groups={{0,1},{2,3}}, dimensions={0}
  %f = f32[4]{0} reduce-scatter(%y), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0)
  %g = f32[4]{0} reduce-scatter(%y), replica_groups=mesh['x'=2,'y'=4,'z'=3] {'x','z'}
  %e = f32[4]{0} add(%all-reduce.1, %b)
"""
    assert [(one.kind, one.bytes) for one in collectives(text)] == [
        ("all-gather", 512),
        ("all-reduce", 12),
        ("all-gather", 32),
        ("reduce-scatter", 32),
        ("reduce-scatter", 64),
        ("reduce-scatter", 96),
    ]
    with pytest.raises(ValueError, match="needs replica_groups of one or more devices; got '%d"):
        collectives("%d = f32[4]{0} reduce-scatter(%y), replica_groups={}")


def rows_of(size):
    """Returns operands of a layer with contracted axes that 4 devices do not divide."""
    rng = np.random.default_rng(size)
    shapes = (
        (size, 2 * size + 1),
        (2 * size + 1, size + 2),
        (2 * size + 1, 3),
        (3, size + 2),
        (size + 2,),
    )
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("spec", [("x", None, None), (None, "x", None), (None, None, "x")])
@pytest.mark.ci
def test_contractions_that_do_not_divide(spec):
    """Rows, inputs or outputs need padding, which XLA fills with arbitrary values: no sum may
    include it."""
    mesh = automatic(x=4)
    rows, into, out = spec
    operands = rows_of(7)

    place = jax.lax.with_sharding_constraint

    def gradient(x, w, a, b, m, sharded):
        if sharded:
            x = place(x, NamedSharding(mesh, P(rows, into)))
            w = place(w, NamedSharding(mesh, P(into, out)))
            m = place(m, NamedSharding(mesh, P(out)))
        # cos makes the zeros of the padding nonzero, of the magnitude too: g = 0 would hide them.
        x, w, m = jnp.cos(x), jnp.cos(w), jnp.cos(m)
        call = lambda x, a, b, m: ops.dora_linear(x, w, a, b, m, SCALE)  # noqa: E731
        y, pull = jax.vjp(call, x, a, b, m)
        dy = jnp.cos(y)
        if sharded:
            # Otherwise x's gradient would gather the outputs before it contracts them.
            dy = place(dy, NamedSharding(mesh, P(rows, out)))
        return y, pull(dy)

    found = jax.jit(gradient, static_argnums=5)(
        *jax.device_put(operands, NamedSharding(mesh, P())), True
    )
    wanted = jax.jit(gradient, static_argnums=5)(*operands, False)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())
