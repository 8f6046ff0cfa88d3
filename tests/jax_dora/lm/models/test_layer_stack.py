"""Layers of a stack, one after the other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dora import quantize
from jax_dora.lm.models import layer_stack, make_cache, make_model
from tests import quantised
from tests.jax_dora.lm.models.conftest import SMALL
from tests.jax_dora.meshes import automatic, explicit
from tests.jax_dora.programs import equations

FP8 = "float8_e4m3fn"


def layers_of(columns=6):
    """Returns a stack of three layers: quantised, random keys, and floats."""
    kernel = jax.tree.map(
        lambda *arrays: jnp.stack(arrays),
        *(quantised.draw("nf4", (8, columns), (2, columns), seed=seed) for seed in range(3)),
    )
    return {"kernel": kernel, "key": jax.random.split(jax.random.key(0), 3), "x": jnp.ones((3, 2))}


def layer(total, one):
    """Returns a total, and the layer's codes, that depend on every array."""
    codes = one["kernel"].qvalue
    assert codes.dtype == jnp.uint4
    key = jax.random.key_data(one["key"])
    read = one["x"].sum() + one["kernel"].scale.sum() + codes.astype(jnp.float32).sum()
    return 2 * total + read, (codes, key)


@pytest.mark.parametrize("columns", [6, 7])
@pytest.mark.ci
def test_scans_are_laxs(columns):
    layers = layers_of(columns)
    wanted = lax.scan(layer, 0.0, layers)
    for found in (
        layer_stack.scan(layer, 0.0, layers),
        layer_stack.unrolled_scan(layer, 0.0, layer_stack.unstacked(layers, 3, inference=True)),
        jax.jit(lambda layers: layer_stack.scan(layer, 0.0, layers))(layers),
    ):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.ci
@pytest.mark.parametrize("make_mesh", [automatic, explicit])
@pytest.mark.parametrize("spec", [(None, None, "x"), (None, "x", "y")])
def test_scans_on_meshes(make_mesh, spec):
    layers = layers_of(8)
    wanted = lax.scan(layer, 0.0, layers)
    mesh = make_mesh(x=2, y=2)
    with jax.set_mesh(mesh):
        layers["kernel"] = jax.device_put(layers["kernel"], NamedSharding(mesh, P(*spec)))
        for found in (
            jax.jit(lambda layers: layer_stack.scan(layer, 0.0, layers))(layers),
            jax.jit(
                lambda all: layer_stack.unrolled_scan(
                    layer, 0.0, layer_stack.unstacked(all, 3, inference=True)
                )
            )(layers),
        ):
            jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_four_bit_arrays_are_sliced_as_bytes_in_inference():
    """Not element by element."""

    def sliced(function):
        names = {"dynamic_slice", "slice", "split", "scan"}
        found = [e for e in equations(function, layers_of()) if e.primitive.name in names]
        assert found
        return {str(one.aval.dtype) for e in found for one in e.invars}

    assert "uint4" not in sliced(lambda layers: layer_stack.scan(layer, 0.0, layers))
    assert "uint4" not in sliced(lambda layers: layer_stack.unstacked(layers, 3, inference=True))
    assert "uint4" in sliced(lambda layers: layer_stack.unstacked(layers, 3))


def test_single_elements_are_scanned_as_they_are():
    """Two of them are not in the same row of a byte, but belong to two layers."""
    numbers = jnp.arange(4, dtype=jnp.uint4)

    def call(x, number):
        return x, number

    for found in (
        layer_stack.scan(call, 0.0, numbers),
        layer_stack.unrolled_scan(call, 0.0, layer_stack.unstacked(numbers, 4, inference=True)),
    ):
        np.testing.assert_array_equal(found[1], numbers)


@pytest.mark.ci
@pytest.mark.parametrize("unroll", [False, True])
def test_a_decoder_takes_layers_as_bytes_only_to_decode(unroll):
    """In a training step, XLA would copy the whole stack."""
    model = quantize(make_model(dataclasses.replace(SMALL, unroll=unroll)), "nf4", tile_size=8)
    graphdef, state = nnx.split(model)
    tokens, cache = jnp.ones((2, 1), jnp.int32), make_cache(SMALL, 2, 4)

    def casts(function, *arguments):
        return any(
            equation.primitive.name == "bitcast_convert_type"
            and "uint4" in {str(one.aval.dtype) for one in (*equation.invars, *equation.outvars)}
            for equation in equations(function, state, *arguments)
        )

    assert not casts(lambda state, tokens: nnx.merge(graphdef, state)(tokens), tokens)
    assert casts(
        lambda state, tokens, cache: nnx.merge(graphdef, state).extend(tokens, cache), tokens, cache
    )


def test_parts_of_a_scan_are_the_whole():
    """With gradients, and each part with its own transformation."""
    kernels = (quantised.draw(FP8, (256, 6), (1, 6), seed=seed) for seed in range(3))
    layers = {"kernel": jax.tree.map(lambda *one: jnp.stack(one), *kernels), "x": jnp.ones((3, 2))}
    counts = []

    def call(total, one):
        codes = one["kernel"].qvalue.astype(jnp.float32)
        read = (one["kernel"].scale.sum() * one["x"] * codes.sum()).sum()
        return jnp.tanh(1e-3 * total * read), total

    def counted(count):
        def transform(function):
            counts.append(count)
            return jax.checkpoint(function, prevent_cse=False)

        return count, transform

    def whole(x):
        return lax.scan(call, 1.0, layers | {"x": x})

    def parted(x):
        return layer_stack.scan_parts([counted(1), counted(2)], call, 1.0, layers | {"x": x})

    for function in (lambda f: f, lambda f: jax.jacobian(lambda x: f(x)[0])):
        wanted, found = (jax.jit(function(one))(layers["x"]) for one in (whole, parted))
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-6), found, wanted)
    assert counts[:2] == [1, 2]
    # The backward pass slices the whole stack as well, by numbers that it does not stack again.
    program = list(equations(jax.jacobian(lambda x: parted(x)[0]), layers["x"]))
    scans = [one for one in program if one.primitive.name == "scan"]
    assert sorted(one.params["length"] for one in scans) == [1, 1, 2, 2]
    stacks = [[v.aval.shape for v in one.invars if v.aval.dtype == FP8] for one in scans]
    assert stacks == [[layers["kernel"].qvalue.shape]] * 4
    assert not any(v.aval.dtype == jnp.int32 and v.aval.ndim for one in scans for v in one.outvars)


def test_a_stack_of_floats_has_one_part():
    layers = layers_of()
    counts = []
    parts = [(1, lambda f: counts.append(1) or f), (2, lambda f: counts.append(2) or f)]
    found = layer_stack.scan_parts(parts, layer, 0.0, layers)
    jax.tree.map(np.testing.assert_array_equal, found, lax.scan(layer, 0.0, layers))
    assert counts == [2]
