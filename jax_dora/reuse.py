"""The norm once, not every time: kept in the model while the adapters stand still.

The norm depends on kernel, lora_a and lora_b alone. Between two optimizer steps none of them moves,
so micro-steps of gradient accumulation, and a rematerialised forward pass, can share one:

    jax_dora.keep_norms(model)                     # once, after apply_dora

    @nnx.jit
    def train_step(model, optimizer, batch):       # optimizer: optax.MultiSteps, say
        jax_dora.refresh_norms(model)              # recomputes only if an adapter has changed
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(...)
        optimizer.update(model, grads)
        return loss

`nnx.jit` returns, and so copies, all of the model at every call. A large one is split, into what
moves and what `jax.jit` only reads; the kept norms (`jax_dora.DoRANorm`) are of the first:

    graphdef, adapters, norms, frozen = nnx.split(model, nnx.LoRAParam, jax_dora.DoRANorm, ...)

    @jax.jit
    def train_step(adapters, norms, state, frozen, batch):
        model = nnx.merge(graphdef, adapters, norms, frozen)
        jax_dora.refresh_norms(model)
        norms = nnx.state(model, jax_dora.DoRANorm)

        def loss_of(adapters):
            model = nnx.merge(graphdef, adapters, norms, frozen, copy=True)
            return loss_fn(model, batch)

        loss, grads = jax.value_and_grad(loss_of)(adapters)
        updates, state = optimizer.update(grads, state, adapters)
        return optax.apply_updates(adapters, updates), norms, state, loss

Results are bit for bit those of recomputing. A kept norm carries a fingerprint of what it was
computed from, and a layer compares it on every call (it reads the adapter, which is small beside
the kernel): a stale norm raises in eager code and is NaN in compiled code, never quietly wrong. Of
the frozen kernel the fingerprint reads every 64th input row: enough to notice other weights.

A model that scans over a stack of layers compares them all at once, in its forward pass and outside
of the scan, with `checked_norms`.

For inference, `freeze` keeps the norms for good: its adapters are no longer trainable parameters.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from jax_dora.hyperparameters import ADAPTER_NAMES
from jax_dora.model import check_model
from jax_dora.ops.linear import NORM_NAME

KERNEL_STRIDE = 64


class DoRANorm(nnx.Variable):
    """A kept norm, or its fingerprint; no parameter, so optimizers and adapter files pass it by."""


class FrozenAdapter(nnx.Variable):
    """lora_a, lora_b or magnitude of a frozen DoRA layer: no `nnx.Param`, so nothing trains it."""


def keep_norms(model: Any) -> None:
    """Computes the norm of every DoRA layer of `model` and keeps it in the layer.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: there is no DoRA layer in `model`.
    """
    for layer in _dora_layers(model):
        layer.kept_norm = nnx.data(DoRANorm(_norm(layer)))
        layer.kept_fingerprint = nnx.data(DoRANorm(_fingerprint(layer)))


def refresh_norms(model: Any) -> None:
    """Recomputes the kept norms of `model` if any adapter differs from what they were made of.

    Call it at the start of a training step, inside `nnx.jit`: whether anything changed is one
    comparison on the device.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: there is no DoRA layer in `model`, or one keeps no norm.
    """
    layers = list(_dora_layers(model))
    for layer in layers:
        if getattr(layer, "kept_norm", None) is None:
            raise ValueError(
                "a DoRA layer of this model keeps no norm; call jax_dora.keep_norms(model) first"
            )
    now = [_fingerprint(layer) for layer in layers]
    same = jnp.stack(
        [
            jnp.all(layer.kept_fingerprint[...] == fingerprint)
            for layer, fingerprint in zip(layers, now, strict=True)
        ]
    ).all()
    norms = lax.cond(
        same,
        lambda: [layer.kept_norm[...] for layer in layers],
        lambda: [_norm(layer) for layer in layers],
    )
    for layer, norm, fingerprint in zip(layers, norms, now, strict=True):
        layer.kept_norm[...] = norm
        layer.kept_fingerprint[...] = fingerprint


def drop_norms(model: Any) -> None:
    """Lets every DoRA layer of `model` compute its norm on each call again.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: there is no DoRA layer in `model`.
    """
    for layer in _dora_layers(model):
        layer.kept_norm = layer.kept_fingerprint = nnx.data(None)


def freeze(model: Any) -> Any:
    """A copy of `model` for inference, which shares its arrays: norms kept, adapters not trainable.

    lora_a, lora_b and magnitude become `FrozenAdapter`s, which neither `nnx.Param` nor
    `nnx.LoRAParam` finds, so that no optimizer can move them from under the norms; and no call
    looks at the adapters again. Their dropout is off, until `model.train()` turns it on. What else
    `model` drops is its own affair, and `model.eval()`'s. `model` itself stays trainable.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: there is no DoRA layer in `model`.
    """
    frozen = nnx.merge(*nnx.split(model))
    keep_norms(frozen)
    for layer in _dora_layers(frozen):
        layer.eval()
        _settle(layer)
    return frozen


def checked_norms(model: Any) -> Any:
    """`model` for the length of one call: kept norms are compared with the adapters here, once.

    A layer compares on every call, and inside a scan over a stack of layers that is many small
    reductions. Outside, it is a few large ones:

        def __call__(self, x):
            graphdef, layers = nnx.split(jax_dora.checked_norms(self.layers))
            return lax.scan(lambda x, one: (nnx.merge(graphdef, one)(x), None), x, layers)[0]

    Gradients reach the adapters of `model` through it. Make it anew in every call: like `freeze`'s,
    it has no parameters that an optimizer could move from under the norms. Variables are shared:
    what a call updates, such as the counts of dropout's streams, is updated in `model`. What it
    adds to a module, as `Module.sow` does, stays in the copy.

    Returns:
      A copy that shares the variables of `model`; `model` itself where no layer keeps a norm with
      its fingerprint.

    Raises:
      RuntimeError: a norm is stale; in compiled code it is NaN instead.
    """
    if not any(_is_watched(layer) for layer in _find_dora_layers(model)):
        return model
    # Of the same variables, so that dropout's streams go on counting.
    checked = nnx.clone(model, variables=False)
    for layer in _find_dora_layers(checked):
        if _is_watched(layer):
            layer.kept_norm = nnx.data(DoRANorm(_checked_norm(layer)))
            _settle(layer)
    return checked


def current_norm(layer: Any) -> jax.Array:
    """The norm that a call of `layer` uses, named "dora_norm" for `remat_policy`."""
    if getattr(layer, "kept_norm", None) is None:
        return checkpoint_name(layer.norm(), NORM_NAME)
    if not _is_watched(layer):
        return layer.kept_norm[...]
    return checkpoint_name(_checked_norm(layer), NORM_NAME)


def _is_watched(layer: Any) -> bool:
    """Whether the layer keeps a norm that its adapter may outrun."""
    return getattr(layer, "kept_norm", None) is not None and layer.kept_fingerprint is not None


def _checked_norm(layer: Any) -> jax.Array:
    """The kept norm where the adapter is the one it was computed from, else NaN, or an error."""
    same = jnp.all(layer.kept_fingerprint[...] == _fingerprint(layer), axis=-1)
    if not isinstance(same, Tracer) and not same.all():
        raise RuntimeError(
            f"the kept norm of a {type(layer).__name__} is stale: its adapter has changed since; "
            "call jax_dora.refresh_norms(model) at the start of every step"
        )
    norm = layer.kept_norm[...]
    if same.ndim:
        same = same.reshape(same.shape + (1,) * (norm.ndim - same.ndim))
    return jnp.where(same, norm, jnp.nan)


def _settle(layer: Any) -> None:
    """No call looks at the adapter again, and no optimizer finds it."""
    layer.kept_fingerprint = nnx.data(None)
    for name in ADAPTER_NAMES:
        variable = getattr(layer, name)
        # As it is: a constructor would lay it out again by its metadata, which of a stack may lack
        # the leading axis, and run its hooks once more.
        frozen = FrozenAdapter.from_metadata(variable.get_raw_value(), variable.get_metadata())
        setattr(layer, name, frozen)


def _find_dora_layers(model: Any) -> Iterator[Any]:
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module) and hasattr(node, "lora_a") and hasattr(node, "magnitude"):
            yield node


def _dora_layers(model: Any) -> Iterator[Any]:
    found = False
    for layer in _find_dora_layers(model):
        found = True
        yield layer
    if not found:
        check_model(model)
        raise ValueError(
            f"{type(model).__name__} has no DoRA layer; build it with one, or call apply_dora first"
        )


def _norm(layer: Any) -> jax.Array:
    # One after the other: a norm may have a temporary as large as the kernel.
    return _over_stack(layer, lambda one: one.norm(), lax.map)


def _fingerprint(layer: Any) -> jax.Array:
    def of_one(one):
        arrays = (one.lora_a[...], one.lora_b[...], _every_so_many_rows(_kernel(one)))
        return jnp.concatenate([_digest(array) for array in arrays])

    return _over_stack(layer, of_one, lambda function, stack: jax.vmap(function)(stack))


def _every_so_many_rows(kernel: jax.Array) -> jax.Array:
    spec = jax.typeof(kernel).sharding.spec
    if not any(spec):
        return kernel[::KERNEL_STRIDE]
    # A mesh with explicit axes asks where the rows are to go.
    rows = jnp.arange(0, kernel.shape[0], KERNEL_STRIDE)
    return kernel.at[rows].get(out_sharding=jax.P(None, *spec[1:]))


def _kernel(layer: Any) -> jax.Array:
    return getattr(layer, getattr(layer, "kernel_name", "kernel"))[...]


def _over_stack(layer: Any, function: Callable[[Any], jax.Array], mapped: Callable) -> jax.Array:
    """`function` of `layer`, or of each layer of a stack made by `nnx.vmap`, along leading axes.

    `mapped(function, stack)` calls `function` with what lies along the first axis of `stack`.
    """
    for _ in range(layer.lora_a.ndim - _single_ndim(layer)):
        function = functools.partial(_of_stack, function, mapped)
    return function(layer)


def _single_ndim(layer: Any) -> int:
    """The number of axes of lora_a in a layer that is not stacked."""
    if not hasattr(layer, "layout"):
        return 2
    place = layer.layout().lora_a
    matrices = jax.ShapeDtypeStruct(place.matrices, jnp.float32)
    return jax.eval_shape(place.from_matrices, matrices).ndim


def _of_stack(function: Callable[[Any], jax.Array], mapped: Callable, layer: Any) -> jax.Array:
    stacked = nnx.Any(nnx.Param, FrozenAdapter)
    graphdef, state, rest = nnx.split(layer, stacked, ...)
    return mapped(lambda one: function(nnx.merge(graphdef, one, rest)), state)


def _digest(array: jax.Array) -> jax.Array:
    """uint32[2]: the sum of the array's bits, and the same weighted by position.

    Weights are odd, so that no change of a single element leaves the second as it was. Sums of
    integers are exact in any order, so that a digest does not depend on how the array is laid out
    or sharded; nothing is flattened or gathered.
    """
    array = lax.stop_gradient(array)
    bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * min(array.dtype.itemsize, 4)}"))
    bits = bits.astype(jnp.uint32)
    if array.dtype.itemsize >= 4:
        # The sign must count in a lower bit too: two changes of the highest add up to none.
        bits = bits ^ (bits >> 16)
    plain = weighted = bits
    # An axis at a time: a weight of the last costs one multiplication an element, those of the
    # others, which are hashes, meet its sums only. Both sums at each, so that one reading serves.
    for axis in reversed(range(bits.ndim)):
        weight = lax.broadcasted_iota(jnp.uint32, weighted.shape, axis)
        weight = weight * np.uint32(0x9E3779B2) + np.uint32(1)
        if axis < bits.ndim - 1:
            weight = weight * np.uint32(0x7FEB352D + 2 * axis)
            weight = (weight ^ (weight >> 15)) | 1
        plain, weighted = jnp.sum(plain, axis), jnp.sum(weighted * weight, axis)
    return jnp.stack([plain, weighted])
