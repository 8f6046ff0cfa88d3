"""Convolution and embedding in both packages: the same weights, inputs and cotangents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import jax_dora
import torch_dora
from parity import oracle, tolerances
from tests.matrices import within
from tests.tables import thinned

OUT, ALPHA = 8, 5.0
DTYPES = {"float32": (jnp.float32, torch.float32), "bfloat16": (jnp.bfloat16, torch.bfloat16)}


def draw(seed, *shape):
    """Random numbers that every dtype here holds exactly."""
    numbers = np.random.default_rng(seed).normal(size=shape)
    return np.asarray(jnp.asarray(numbers, jnp.bfloat16), np.float32)


def close(jax_array, torch_tensor, bound) -> None:
    """Each within `bound` of the exact result, so at most twice that apart."""
    exact = np.asarray(oracle.fp64(torch_tensor))
    within(jax_array, exact, 2 * np.asarray(bound).reshape(exact.shape))


@pytest.mark.parametrize(
    ("dimensions", "groups", "dtype"),
    thinned(
        [(1, 1, "bfloat16"), (2, 2, "float32"), (2, 2, "bfloat16"), (3, 1, "float32")],
        [(2, 2, "float32")],
    ),
)
def test_convolution(dimensions, groups, dtype):
    jax_dtype, torch_dtype = DTYPES[dtype]
    features, rank, window, size = 6, 4, (3, 2, 1)[:dimensions], (5, 4, 3)[:dimensions]
    inner = features // groups
    values = {
        "x": draw(0, 2, *size, features),
        "kernel": draw(1, *window, inner, OUT) / 4,
        "lora_a": draw(2, *window, inner, rank) / 4,
        "lora_b": draw(3, rank // groups, OUT) / 2,
        "magnitude": 1 + np.abs(draw(4, OUT)),
        "dy": draw(5, 2, *(s - w + 1 for s, w in zip(size, window, strict=True)), OUT),
    }

    base = nnx.Conv(
        features,
        OUT,
        window,
        padding="VALID",
        feature_group_count=groups,
        use_bias=False,
        param_dtype=jax_dtype,
        rngs=nnx.Rngs(0),
    )
    base.kernel.set_value(jnp.asarray(values["kernel"], jax_dtype))
    ours = jax_dora.DoRAConv(base, rank=rank, alpha=ALPHA, rngs=nnx.Rngs(0))
    for name in ("lora_a", "lora_b", "magnitude"):
        getattr(ours, name).set_value(jnp.asarray(values[name]))

    def objective(layer, x):
        y = layer(x)
        dy = jnp.asarray(values["dy"])
        return jnp.vdot(y.astype(jnp.float32), dy), y

    x = jnp.asarray(values["x"], jax_dtype)
    wrt = (nnx.DiffState(0, nnx.LoRAParam), 1)
    (grads, dx), y = nnx.jit(nnx.grad(objective, argnums=wrt, has_aux=True))(ours, x)

    def to_torch(array, transposed=True):
        """[*window, in, out] as [out, in, *window], or channels last as channels first."""
        axes = [*reversed(range(array.ndim - 2, array.ndim)), *range(array.ndim - 2)]
        if not transposed:
            axes = [0, array.ndim - 1, *range(1, array.ndim - 1)]
        return torch.tensor(np.transpose(array, axes).copy())

    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    theirs = torch_dora.DoRAConv(
        make(features, OUT, window, groups=groups, bias=False, dtype=torch_dtype),
        rank=rank,
        alpha=ALPHA,
    )
    with torch.no_grad():
        theirs.weight.copy_(to_torch(values["kernel"]))
        theirs.lora_a.copy_(to_torch(values["lora_a"]))
        theirs.lora_b.copy_(torch.tensor(values["lora_b"].T.copy()))
        theirs.magnitude.copy_(torch.tensor(values["magnitude"]))
    torch_x = to_torch(values["x"], False).to(torch_dtype).requires_grad_()
    torch_y = theirs(torch_x)
    torch_y.backward(to_torch(values["dy"], False).to(torch_dtype))

    # The windows that each position reads, by which the convolution is a matrix product.
    patches = jax.lax.conv_general_dilated_patches(
        jnp.asarray(values["x"]),
        window,
        (1,) * dimensions,
        "VALID",
        dimension_numbers=(
            "N" + "DHW"[-dimensions:] + "C",
            "DHW"[-dimensions:] + "IO",
            "N" + "DHW"[-dimensions:] + "C",
        ),
    )
    patches = np.asarray(patches).reshape(-1, features, int(np.prod(window)))
    bounds = []
    for group in range(groups):
        rows = patches[:, group * inner : (group + 1) * inner].transpose(0, 2, 1)

        def part(array, group=group):
            block = np.split(np.asarray(array), groups, -1)[group]
            return block.reshape(-1, block.shape[-1])

        bounds.append(
            tolerances.dora_linear(
                part(values["dy"]),
                rows.reshape(len(rows), -1),
                part(values["kernel"]).T,
                part(values["lora_a"]).T,
                part(values["lora_b"]).T,
                part(values["magnitude"])[0],
                ALPHA / rank,
                dtype,
            )
        )

    def joined(name, *axes):
        return np.concatenate([getattr(one, name) for one in bounds], *axes)

    close(y, torch_y.movedim(1, -1), joined("y", -1))
    close(grads["lora_b"][...], theirs.lora_b.grad.T, joined("d_lora_b").T)
    close(grads["magnitude"][...], theirs.magnitude.grad, joined("d_magnitude"))
    back = [*range(2, theirs.lora_a.ndim), 1, 0]
    close(grads["lora_a"][...], theirs.lora_a.grad.permute(back), joined("d_lora_a").T)
    # An input is read by several windows: the sum of the bounds of all is more than enough.
    largest = joined("d_x").max() * np.prod(window)
    close(dx, torch_x.grad.movedim(1, -1), np.full(dx.shape, largest))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype):
    jax_dtype, torch_dtype = DTYPES[dtype]
    vocabulary, features, rank = 23, 12, 3
    ids = np.random.default_rng(0).integers(0, vocabulary, (4, 5))
    values = {
        "embedding": draw(1, vocabulary, features),
        "lora_a": draw(2, vocabulary, rank) / 2,
        "lora_b": draw(3, rank, features) / 2,
        "magnitude": 4 + np.abs(draw(4, features)),
    }
    dy = draw(5, *ids.shape, features)

    base = nnx.Embed(vocabulary, features, param_dtype=jax_dtype, rngs=nnx.Rngs(0))
    ours = jax_dora.DoRAEmbed(base, rank=rank, alpha=ALPHA, rngs=nnx.Rngs(0))
    for name, value in values.items():
        getattr(ours, name).set_value(jnp.asarray(value, getattr(ours, name).dtype))

    def objective(layer):
        y = layer(jnp.asarray(ids))
        return jnp.vdot(y.astype(jnp.float32), jnp.asarray(dy)), y

    wrt = nnx.DiffState(0, nnx.LoRAParam)
    grads, y = nnx.jit(nnx.grad(objective, argnums=wrt, has_aux=True))(ours)

    theirs = torch_dora.DoRAEmbedding(
        nn.Embedding(vocabulary, features, dtype=torch_dtype), rank=rank, alpha=ALPHA
    )
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(values["embedding"]))
        theirs.lora_a.copy_(torch.tensor(values["lora_a"]).T)
        theirs.lora_b.copy_(torch.tensor(values["lora_b"]).T)
        theirs.magnitude.copy_(torch.tensor(values["magnitude"]))
    torch_y = theirs(torch.tensor(ids))
    torch_y.backward(torch.tensor(dy).to(torch_dtype))

    bounds = tolerances.dora_linear(
        dy.reshape(-1, features),
        np.eye(vocabulary)[ids.flatten()],
        values["embedding"].T,
        values["lora_a"].T,
        values["lora_b"].T,
        values["magnitude"],
        ALPHA / rank,
        dtype,
    )
    close(y, torch_y, bounds.y)
    close(grads["lora_a"][...], theirs.lora_a.grad.T, bounds.d_lora_a.T)
    close(grads["lora_b"][...], theirs.lora_b.grad.T, bounds.d_lora_b.T)
    close(grads["magnitude"][...], theirs.magnitude.grad, bounds.d_magnitude)
