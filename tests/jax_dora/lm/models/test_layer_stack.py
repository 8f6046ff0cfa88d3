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
