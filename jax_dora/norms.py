"""Norms as values: compute them once, and use them until the adapters change.

A norm depends on kernel, lora_a and lora_b alone. None of them changes between two optimizer steps,
so all micro-steps of gradient accumulation can share one norm. In the example, each step computes
the norms from the same adapters that it differentiates, so they are never out of date:

    @nnx.jit
    def train_step(model, optimizer, batches):
        values = jax_dora.norms(model)

        def loss_fn(model, batch):
            return loss_of(jax_dora.with_norms(model, values), batch)

        for batch in batches:
            grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
            ...
        optimizer.update(model, total)

The results are bit for bit those of computing the norm in every call. For inference, `freeze` makes
g = magnitude / norm a constant.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import listing
from jax_dora.adapt import base_values
from jax_dora.adapt.tree import Modules, by_path, check_model, find_dora_layers, named_in_errors
from jax_dora.adapt.weight_adapter import WeightAdapter
from jax_dora.layers import DoRALayer
from jax_dora.layers.base_layer import check_has_values, on_devices_of
from jax_dora.layers.dora_layer import Constant
from jax_dora.layers.magnitude import bounded_norm, g_of_call
from jax_dora.layers.quantised_kernel import check_kernel
from jax_dora.ops.norm import ratio
from jax_dora.ops.projection import INNER_NAME
from jax_dora.ops.saved_inner import AUTOMATIC_POLICIES
from jax_dora.ops.saved_norm import NORM_NAME


class StackedConstant(Constant, nnx.Param):
    """A `Constant` for layers that are stacked along another axis than the first. It is an
    `nnx.Param`, so a transform that splits the kernel along that axis splits the constant along it
    too."""


def norms(model: nnx.Module) -> dict[str, jax.Array]:
    """Computes the norm of every DoRA layer of `model` from its current parameters.

    Returns:
      A dict from the layer's path to its norm, in the magnitude's shape: f32[out], or f32[layers,
        out] for a stack of layers. No gradient flows through it.

    Raises:
      TypeError: `model` is not an nnx module.
      ValueError: `model` has no DoRA layer, or is abstract, outside `nnx.eval_shape`; or the scales
        of a quantised kernel are zero or not finite.
    """
    layers = _dora_layers(model)
    check_has_values(model, "jax_dora.norms")
    values = {}
    for paths, layer in layers.items():
        with named_in_errors(paths[0], "given a norm"):
            check_kernel(layer.kernel_param[...], layer.contraction, layer.stack)
            values[paths[0]] = layer.norm()
    return values


def reset_magnitudes(model: nnx.Module) -> None:
    """Sets every magnitude of `model` to the current norm of its layer, in place, so that g = 1.

    Call this after other weights were put into an adapted model, by `nnx.update` or by assignment.
    The magnitudes that `apply_dora` sets are the norms of the weights of that moment; with them,
    even an adapter whose lora_b is zero would scale the new weights. A trained adapter loses what
    its magnitudes have learned: it becomes the LoRA adapter of its lora_a and lora_b.

    Each magnitude keeps its dtype and sharding. The norms of a model from `with_norms` and the
    constant g of a model from `freeze` are set too.

    Raises:
      TypeError, ValueError: the same errors as `norms`.
    """
    check_model(model, for_linen="jax_dora.linen.reset_magnitudes")
    layers = {paths[0]: layer for paths, layer in _dora_layers(model).items()}
    for path, norm in norms(model).items():
        layer = layers[path]
        magnitude = bounded_norm(norm, layer.result_dtype)
        g = ratio(magnitude, magnitude, layer.result_dtype)
        new = {"magnitude": magnitude, "given_norm": norm, "given_g": g}
        for name, value in new.items():
            if (variable := getattr(layer, name)) is not None:
                _set_like(variable, value)
    base_values.remember(model)


def with_norms[Model: nnx.Module](model: Model, values: Mapping[str, jax.Array]) -> Model:
    """Returns a copy of `model` whose layers use the given norms instead of computing them.

    The copy shares the variables of `model`. Gradients reach the model's adapters through the copy,
    and what a call updates, such as the counts of dropout streams, is updated in `model` too.
    Nothing checks that the norms belong to the adapters, so compute them again after every update.

    Args:
      model: a model with DoRA layers.
      values: what `norms` returned, with all of the model's DoRA layers; the arrays may be traced.

    Raises:
      TypeError: `model` is not an nnx module, or a norm's dtype is neither fp32 nor fp64.
      ValueError: a layer's norm is missing, is abstract or has another shape, or a path is not a
        DoRA layer's.
    """
    _dora_layers(model)
    if not isinstance(values, Mapping):
        raise TypeError(
            f"values is a {type(values).__name__}; expected the dict that jax_dora.norms(model) "
            "returns"
        )
    check_has_values(dict(values), "jax_dora.with_norms", name="a norm")
    copy = nnx.clone(model, variables=False)
    layers = _dora_layers(copy)
    known = by_path(layers)
    if unknown := values.keys() - known.keys():
        raise ValueError(
            f"values has norms for {sorted(unknown)}, where the model has no DoRA layer; the "
            f"model's DoRA layers are:{listing(known)}"
        )
    for paths, layer in layers.items():
        path = next((path for path in paths if path in values), None)
        if path is None:
            raise ValueError(
                f"values has no norm for {paths[0]!r}; expected one for every DoRA layer: "
                "pass all that jax_dora.norms(model) returns"
            )
        value, shape = jnp.asarray(values[path]), layer.magnitude.shape
        if value.dtype not in (jnp.float32, jnp.float64):
            raise TypeError(
                f"values has a norm of dtype {value.dtype} for {path!r}; expected float32, as "
                "jax_dora.norms(model) returns it: a less exact norm makes g less exact"
            )
        if value.shape != shape:
            raise ValueError(
                f"values has a norm of shape {value.shape} for {path!r}; expected {shape}, as "
                "jax_dora.norms(model) returns it"
            )
        value = on_devices_of(layer.magnitude.get_value(), value)
        layer.given_norm = nnx.data(_constant_of(layer)(value))
        layer.given_g = nnx.data(None)
    return copy


def freeze[Model: nnx.Module](model: Model) -> Model:
    """Returns a copy of `model` for inference, with a constant g and adapters that are not
    trainable. The copy shares the arrays of `model`, but not its variables: `model` stays
    trainable, and training it does not change the copy.

    In the copy, lora_a, lora_b and magnitude are neither `nnx.Param`s nor `nnx.LoRAParam`s, so no
    optimizer can change them without changing g. Layers that are stacked along another axis than
    the first are an exception: their adapters stay `nnx.Param`s, so that transforms know the
    axis.

    The adapters' dropout is off until `model.train()` turns it on. Other dropout in the model is
    unchanged; `model.eval()` turns it off.

    Raises:
      TypeError: `model` is not an nnx module.
      ValueError: `model` has no DoRA layer, or is abstract, outside `nnx.eval_shape`.
    """
    _dora_layers(model)
    check_has_values(model, "jax_dora.freeze")
    frozen = with_norms(nnx.clone(model), norms(model))
    for layer in find_dora_layers(frozen).values():
        layer.eval()
        kind = _constant_of(layer)
        layer.given_g = nnx.data(kind(g_of_call(layer, layer.result_dtype)))
        layer.given_norm = nnx.data(None)
        for name in ADAPTER_NAMES:
            variable = getattr(layer, name)
            # The constructor would shard the value again by its metadata, which may lack the
            # leading axis of a stack, and would run the variable's hooks a second time.
            constant = kind.from_metadata(variable.get_raw_value(), variable.get_metadata())
            setattr(layer, name, constant)
    return frozen


def remat_policy(*names: str) -> Callable[..., bool]:
    """Returns a policy for `jax.checkpoint`, `nnx.remat` and `nn.remat` that keeps what only DoRA
    reads, rather than computing it twice.

    The policy keeps these arrays:

    - The norm of every layer, f32[out], which rematerialisation keeps without a policy too.
    - The array that the gradient of a magnitude reads, if the layer would be computed again for
      this gradient alone, as the last projection of a block: nothing in the block reads its result.
      The array is the result or, with a bias and in fp16, x (kernel + s·lora_a lora_b), which has
      the same size. Rematerialisation without a policy keeps it too, but not with another policy.
      Layers with `keep_inner=False` never keep it, and layers with `keep_inner=True` always do.

    Dropout mode "input" has no such array, and does not accept `keep_inner=True`.

    Args:
      *names: further names to keep, as given to `jax.ad_checkpoint.checkpoint_name`.

    Raises:
      TypeError: a name is not a string.
      ValueError: a name is empty.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"remat_policy got {name!r}; expected names, as strings")
        if not name:
            raise ValueError(
                "remat_policy got ''; expected names that your model passes to "
                "jax.ad_checkpoint.checkpoint_name: pass no name to keep only DoRA's own arrays"
            )
    return _remat_policy(names)


@functools.cache
def _remat_policy(names: tuple[str, ...]) -> Callable[..., bool]:
    policy = jax.checkpoint_policies.save_only_these_names(NORM_NAME, INNER_NAME, *names)
    AUTOMATIC_POLICIES.add(policy)
    return policy


def _dora_layers(model: nnx.Module) -> Modules:
    check_model(model)
    layers = find_dora_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no DoRA layer; expected at least one: build the model "
            "with one, or call apply_dora first"
        )
    return layers


def _set_like(variable: nnx.Variable, value: jax.Array) -> None:
    """Sets the value of a variable, with the dtype and the sharding of its current value."""
    before = variable.get_value()
    value = value.astype(before.dtype)
    if not any(isinstance(array, Tracer) for array in (before, value)):
        value = jax.device_put(value, before.sharding)
    variable.set_value(value)


def _constant_of(layer: DoRALayer | WeightAdapter) -> type[Constant]:
    """Returns the variable type for a constant of `layer`, which may be a stack of layers."""
    return StackedConstant if not layer.stack.is_leading else Constant
