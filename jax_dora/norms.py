"""Norms as values: take them once, use them as often as the adapters stand still.

The norm depends on kernel, lora_a and lora_b alone. Between two optimizer steps none of them moves,
so the micro-steps of gradient accumulation can share one norm. Taken in the step that
differentiates those very adapters, it cannot be stale:

    @nnx.jit
    def train_step(model, optimizer, batches):
        values = jax_dora.norms(model)

        def loss_fn(model, batch):
            return loss_of(jax_dora.with_norms(model, values), batch)

        for batch in batches:
            grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
            ...
        optimizer.update(model, total)

Results are bit for bit those of computing the norm in every call. For inference, `freeze` makes
g = magnitude / norm a constant.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import listing
from jax_dora.adapt.tree import Found, check_model, find_dora_layers
from jax_dora.layers import DoRALayer
from jax_dora.layers.base import Constant
from jax_dora.layers.call import g_of_call
from jax_dora.ops.linear import NORM_NAME
from jax_dora.ops.projection import INNER_NAME
from jax_dora.weights.weight_adapter import WeightAdapter


class StackedConstant(Constant, nnx.Param):
    """A `Constant` of layers that are stacked along another axis than the first: an `nnx.Param`, so
    that whatever takes the kernel apart along that axis takes the constant apart along it too."""


def norms(model: nnx.Module) -> dict[str, jax.Array]:
    """Computes the norm of every DoRA layer of `model`, as its parameters are now.

    Returns:
      By the layer's path, the norm in the shape of its magnitude: f32[out], or f32[layers, out] of
      a stack. No gradient flows through it.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: there is no DoRA layer in `model`.
    """
    return {found.paths[0]: found.module.norm() for found in _dora_layers(model)}


def with_norms[Model: nnx.Module](model: Model, values: Mapping[str, jax.Array]) -> Model:
    """Returns a copy of `model`, for a call or a few, whose layers use these norms.

    The copy shares the variables of `model`: gradients reach its adapters through it, and what a
    call updates, such as the counts of dropout's streams, is updated in `model`. Nothing compares
    the norms with the adapters; take them anew after every update.

    Args:
      model: a model with DoRA layers.
      values: what `norms` has returned, for all of its DoRA layers; traced arrays too.

    Raises:
      TypeError: `model` is no nnx module, or a norm's dtype is not fp32 or fp64.
      ValueError: a layer's norm is missing or has another shape, or a path is no DoRA layer's.
    """
    _dora_layers(model)
    if not isinstance(values, Mapping):
        raise TypeError(
            f"values is a {type(values).__name__}; expected the dict that jax_dora.norms(model) "
            "returns"
        )
    copy = nnx.clone(model, variables=False)
    layers = _dora_layers(copy)
    paths = {path for found in layers for path in found.paths}
    if unknown := values.keys() - paths:
        raise ValueError(
            f"values has norms for {sorted(unknown)}; the model's DoRA layers are:{listing(paths)}"
        )
    for found in layers:
        path = next((path for path in found.paths if path in values), None)
        if path is None:
            raise ValueError(
                f"values has no norm for {found.paths[0]!r}; expected one for every DoRA layer, as "
                "jax_dora.norms(model) returns them"
            )
        value, shape = jnp.asarray(values[path]), found.module.magnitude.shape
        if value.dtype not in (jnp.float32, jnp.float64):
            raise TypeError(
                f"values has a norm of dtype {value.dtype} for {path!r}; expected float32, as "
                "jax_dora.norms(model) returns it: g is only as exact as its norm"
            )
        if value.shape != shape:
            raise ValueError(
                f"values has a norm of shape {value.shape} for {path!r}; expected {shape}, as "
                "jax_dora.norms(model) returns it"
            )
        constant = _constant_of(found.module)
        found.module.given_norm, found.module.given_g = nnx.data(constant(value)), nnx.data(None)
    return copy


def freeze[Model: nnx.Module](model: Model) -> Model:
    """Returns a copy of `model` for inference, which shares its arrays: g constant, adapters not
    trainable.

    Neither `nnx.Param` nor `nnx.LoRAParam` finds lora_a, lora_b and magnitude in it, so that no
    optimizer can move them from under g; but `nnx.Param` does where layers are stacked along
    another axis than the first, since that is how a transform knows their axis. The adapters'
    dropout is off, until `model.train()` turns it on; what else `model` drops is `model.eval()`'s
    to turn off. `model` itself stays trainable.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: there is no DoRA layer in `model`.
    """
    frozen = with_norms(nnx.merge(*nnx.split(model)), norms(model))
    for found in find_dora_layers(frozen):
        layer = found.module
        layer.eval()
        kind = _constant_of(layer)
        layer.given_g = nnx.data(kind(g_of_call(layer, layer.result_dtype)))
        layer.given_norm = nnx.data(None)
        for name in ADAPTER_NAMES:
            variable = getattr(layer, name)
            # As it is: a constructor would lay it out again by its metadata, which of a stack may
            # lack the leading axis, and run its hooks once more.
            constant = kind.from_metadata(variable.get_raw_value(), variable.get_metadata())
            setattr(layer, name, constant)
    return frozen


def remat_policy(*names: str) -> Callable[..., bool]:
    """Returns a policy for `jax.checkpoint`, `nnx.remat` and `nn.remat` that keeps what DoRA layers
    would compute twice for little.

    That is every layer's norm: f32[out], which depends on no activation, so that keeping it costs
    next to nothing and saves the backward pass one reading of every kernel. And, of the layers with
    `keep_inner=True`, the result, or under a bias and in fp16 x (kernel + s·lora_a lora_b), which
    is as large.

    The last projection of a rematerialised block is where `keep_inner` is worth a thought. Nothing
    in the block reads its result, so a plain or a LoRA layer is not computed again there; a DoRA
    layer is, for the sake of its magnitude's gradient alone, which reads that array:

        rules = [DoRARule(r"blocks/\\d+/down", 16, 32, keep_inner=True), DoRARule(...)]
        nnx.remat(block, policy=jax_dora.remat_policy())

    (Not with dropout mode "input", in which there is no such array.)

    Args:
      *names: further names given by `jax.ad_checkpoint.checkpoint_name`, to be kept too.

    Raises:
      TypeError: a name is no string.
      ValueError: a name is empty.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"remat_policy is given {name!r}; expected names, as strings")
        if not name:
            raise ValueError(
                "remat_policy is given ''; expected names that jax.ad_checkpoint.checkpoint_name "
                "has given: leave it out to keep none of your own"
            )
    return jax.checkpoint_policies.save_only_these_names(NORM_NAME, INNER_NAME, *names)


def _dora_layers(model: nnx.Module) -> list[Found]:
    check_model(model)
    layers = find_dora_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no DoRA layer; build it with one, or call apply_dora first"
        )
    return layers


def _constant_of(layer: DoRALayer | WeightAdapter) -> type[Constant]:
    """Returns the variable for a constant of a layer, perhaps of a stack."""
    return StackedConstant if layer.stack.axis else Constant
