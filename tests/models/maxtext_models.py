"""A linen decoder of MaxText's own layers, whose layers are stacked along axis 1 as MaxText's are
(`param_scan_axis`)."""

import importlib
from typing import Any

import jax
from flax import linen as nn

WIDTH = 6


def dense(features: Any, names: tuple[str, ...], **options: Any) -> nn.Module:
    """Returns MaxText's `DenseGeneral` as it stands in a linen module."""
    linears = importlib.import_module("maxtext.layers.linears")
    return linears.dense_general(
        in_features_shape=options.pop("shape", WIDTH),
        out_features_shape=features,
        kernel_axes=names,
        **options,
    )


class Mlp(nn.Module):
    """A gate alone."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = dense(5, ("embed", "mlp"), name="wi_0")(x)
        return dense(WIDTH, ("mlp", "embed"), shape=5, name="wo")(nn.silu(gate))


class Layer(nn.Module):
    """Projections into heads and back, and the MLP."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        heads = dense((2, 4), ("embed", "heads", "kv"), name="query")(x)
        out = dense(WIDTH, ("heads", "kv", "embed"), shape=(2, 4), axis=(-2, -1), name="out")
        x = x + out(nn.tanh(heads))
        return x + Mlp(name="mlp")(x), None


class Decoder(nn.Module):
    """Three layers, scanned and rematerialised."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stack = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return stack(name="layers")(x, None)[0]
