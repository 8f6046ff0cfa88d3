"""Loads a PEFT folder into a Flax model."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype

from dora_common.hyperparameters import DropoutMode, adapter_scale
from dora_common.peft.destinations import Adapter, Destinations
from dora_common.peft.folder import Folder, open_folder
from dora_common.peft.layers import Shape
from dora_common.peft.replaced_parameters import replace
from jax_dora.adapt import DoRARule, base_values
from jax_dora.adapt.adapter import adapted_weights, weights_in_code
from jax_dora.adapt.apply import adapt_weight
from jax_dora.adapt.tree import check_model, replace_modules, without_adapters
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers.base_layer import check_has_values
from jax_dora.layers.stack import Stack
from jax_dora.ops import check
from jax_dora.peft.named_model import NamedModel, named_model
from jax_dora.peft.names import Names
from jax_dora.peft.parameters import Index
from jax_dora.peft.untie import untie, untie_adapted_heads

_CACHE_LINE = 64


def load_adapter[Model: nnx.Module](
    model: Model,
    folder: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    names: Names | None = None,
    adapter_dtype: Dtype | None = None,
    dropout_mode: DropoutMode | None = None,
    implementation: str | None = None,
    rngs: nnx.Rngs | None = None,
    example: Any = None,
) -> Model:
    """Returns `model` with the adapter of a PEFT folder.

        model = load_adapter(model, "folder")

    The result is a new model, and `model` is not changed. Both share all arrays except the
    adapter's, and except parameters of the base model that the folder stores whole
    (modules_to_save, biases) or in part (trainable_token_indices), which are cast to the model's
    dtypes. The whole folder is checked against the model before any tensor is read or computed.

    Details:

    - A LoRA folder is loaded as the DoRA adapter that computes the same: its magnitude equals its
      norm.
    - If only some layers of a stack have an adapter, the others get one that changes nothing, with
      lora_a and lora_b zero.
    - If the layers of a stack differ in rank or scale, all get the largest ones. The other layers'
      lora_a and lora_b are padded with zeros, and their lora_b is scaled down in float32 or better.
    - As in PEFT, an output head that is tied to an adapted embedding is not adapted:
      `jax_dora.DoRAEmbed`'s adapt_attend is False.
    - As in PEFT, a module in modules_to_save that shares its weight gets an array of its own.
    - If the folder is of a model with another number of tokens, and stores the embedding and the
      output head, the returned model is resized: by its method `resize_token_embeddings`, such as
      that of `jax_dora.lm.models.CausalLM`. A warning names both numbers.
    - Parameters of the base model that an earlier folder replaced keep the replaced values, and a
      warning lists them. Another one names the arguments with which `save_adapter` stores replaced
      parameters again.
    - The adapter's dropout is off, as after PEFT's `from_pretrained`. To train the adapter further,
      turn dropout on with `model.train()`.

    Args:
      model: a plain model, or a model with an adapter, which is replaced.
      folder: contains adapter_config.json and adapter_model.safetensors.
      adapter: the adapter's name, if the files are in a subfolder with that name or the keys
        include it.
      names: translates the model's paths to PyTorch's names; `Names()` by default.
      adapter_dtype: the dtype of lora_a and lora_b; the dtype in the file by default.
      dropout_mode: the dropout mode if the folder's lora_dropout is not 0; by default the same as
        in PEFT, which is "input" for DoRA and "adapter" for LoRA.
      implementation: the implementation of the compose, as in `jax_dora.ops.dora_linear`.
      rngs: has the `dropout` stream for the masks; `nnx.Rngs(0)` by default.
      example: inputs to call the model with, as for `jax_dora.apply_dora`. Needed if the adapter
        was created with `example`, since the call shows which code reads the weights. Not needed
        if `model` has such an adapter already.

    Raises:
      FileNotFoundError, NotADirectoryError: the folder, one of its files, or an adapter with that
        name does not exist.
      ValueError: a file is damaged; or a tensor matches nothing in the model, has a wrong shape, is
        missing or is not finite. The error lists all problems with tensors' places and shapes. Or
        a parameter that the folder stores is quantised in the model. Or `model` is abstract.
      NotImplementedError: the configuration has something that is not supported.
      TypeError: an argument or a field of the configuration has the wrong type.
    """
    if adapter_dtype is not None:
        check.is_float_dtype("adapter_dtype", adapter_dtype)
    check_model(model)
    check_has_values(model, "jax_dora.peft.load_adapter", can_trace=False)
    names = names or Names()
    known = adapted_weights(model)
    with open_folder(folder, "np", adapter) as source:
        loaded, _ = without_adapters(model)
        if example is not None:
            known = (*(one for one in known if one.is_layer), *weights_in_code(loaded, example))
        named = named_model(loaded, names, known)
        architecture = named.architecture()
        if (size := source.new_vocabulary(loaded, architecture)) is not None:
            resizable: Any = loaded
            resizable.resize_token_embeddings(size)
            named = named_model(loaded, names, known)
            architecture = named.architecture()
        destinations = source.destinations(architecture)
        named.check_not_quantised((*destinations.parameters, *destinations.tokens))
        loaded = untie(loaded, named, destinations, source.config)
        named = named_model(loaded, names, known)
        # Before the adapters, since the layers of a stack that have none keep the kernels' norms.
        _set_parameters(source, named, destinations)
        untie_adapted_heads(named, destinations)
        named = named_model(loaded, names, known)
        stacks = _by_weight(named, destinations)
        rules = {
            weight: dataclasses.replace(
                _rule(source, weight, adapters.values(), dropout_mode, adapter_dtype),
                lora_a_init=_FolderInit("lora_a", source, named, weight, adapters),
                lora_b_init=_FolderInit("lora_b", source, named, weight, adapters),
                implementation=implementation,
            )
            for weight, adapters in stacks.items()
        }
        rngs = rngs or nnx.Rngs(0)
        replacements = {}
        for weight, rule in rules.items():
            layer = adapt_weight(weight.replace(rule=rule), rngs)
            if weight.is_layer:
                replacements[id(weight.module)] = layer
            layer.eval()
            is_exact = adapter_dtype is None
            _set_magnitude(source, layer.magnitude, weight.stack, stacks[weight], is_exact)
        loaded = replace_modules(loaded, replacements)
        source.warn_about_replaced(destinations, architecture)
        replace(loaded, folder, destinations.replaced_rows(architecture))
        base_values.remember(loaded)
    return loaded


def adapter_rules(
    model: nnx.Module,
    folder: str | os.PathLike[str],
    *,
    adapter_dtype: Dtype | None = None,
    dropout_mode: DropoutMode | None = None,
) -> list[DoRARule]:
    """Returns the rules by which `jax_dora.apply_dora` makes an adapter as in a PEFT folder, but a
    fresh one.

    The arguments and errors are those of `load_adapter`, but the shapes of `model`, a model without
    adapters, are enough.
    """
    check_model(model)
    named = named_model(model, Names())
    with open_folder(folder, "np") as source:
        stacks = _by_weight(named, source.destinations(named.architecture()))
        return [
            _rule(source, weight, adapters.values(), dropout_mode, adapter_dtype)
            for weight, adapters in stacks.items()
        ]


def _rule(
    source: Folder,
    weight: AdaptableWeight,
    adapters: Collection[Adapter],
    dropout_mode: DropoutMode | None,
    adapter_dtype: Dtype | None,
) -> DoRARule:
    """Returns the rule of the adapters of a weight, which may be a stack."""
    is_embedding = next(iter(adapters)).layer.kind == "embedding"
    return DoRARule(
        re.escape(weight.path),
        **source.options(_largest(source, adapters), dropout_mode),
        adapter_dtype=adapter_dtype or _dtype(source, weight.path, adapters),
        adapt_attend=False if is_embedding else None,
    )


def _by_weight(
    named: NamedModel, destinations: Destinations
) -> dict[AdaptableWeight, dict[Index, Adapter]]:
    """Returns the adapters of each weight, by their index in the weight's stack."""
    stacks: dict[AdaptableWeight, dict[Index, Adapter]] = {}
    for name, adapter in destinations.adapters.items():
        layer = named.layers[name]
        stacks.setdefault(layer.weight, {})[layer.index] = adapter
    return stacks


def _largest(source: Folder, adapters: Collection[Adapter]) -> Adapter:
    """Returns an adapter with the largest rank and the largest scale of a stack's adapters."""
    rank = max(one.rank for one in adapters)
    largest = max(adapters, key=lambda one: abs(source.scale(one)))
    alpha = largest.alpha
    if largest.rank != rank:
        alpha = source.scale(largest) / adapter_scale(rank, 1, source.config.use_rslora)
    return dataclasses.replace(largest, rank=rank, alpha=alpha)


def _dtype(source: Folder, path: str, adapters: Collection[Adapter]) -> np.dtype:
    """Returns the dtype for lora_a and lora_b at `path`: that in the file; at least float32 if
    scales differ, so that lora_b is scaled."""
    dtypes = set[str]().union(*map(source.dtypes, adapters))
    if len({source.scale(one) for one in adapters}) > 1:
        dtypes.add("float32")
    with jax.numpy_dtype_promotion("standard"):
        dtype = functools.reduce(jnp.promote_types, map(jnp.dtype, dtypes))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{source.path} holds {dtype.name} for {path!r}, which JAX rounds unless "
            "jax_enable_x64 is set; pass adapter_dtype='float32' to allow rounding"
        )
    return dtype


class _FolderInit:
    """An initializer that returns lora_a or lora_b from a folder, for each layer of a stack in
    turn: zero without an adapter, and padded with zeros for smaller ranks."""

    of_parameter = True  # called for the whole parameter, not for each of its matrices

    def __init__(
        self,
        name: str,
        source: Folder,
        named: NamedModel,
        weight: AdaptableWeight,
        adapters: Mapping[Index, Adapter],
    ) -> None:
        self.name, self.source, self.named = name, source, named
        self.scale = max(map(source.scale, adapters.values()), key=abs)
        self.adapters = iter([adapters.get(at) for at in weight.stack.indices()])

    def __call__(self, _: Any, shape: Shape, dtype: Any = jnp.float32, *__: Any) -> jax.Array:
        value, adapter = _zeros(shape, dtype), next(self.adapters)
        if adapter is not None:
            key, layer = adapter.keys[self.name], self.named.layers[adapter.layer.name]
            part = layer.adapter_parameters(adapter.rank)[self.name]
            array = part.from_torch(self.source.read(key))
            if self.name == "lora_b" and (scale := self.source.scale(adapter)) != self.scale:
                wide = np.promote_types(array.dtype, np.float32)
                array = array.astype(wide) * wide.type(scale / self.scale)
            # `checked` raises an error with the tensor's name after an overflow.
            with np.errstate(over="ignore"):
                value[tuple(map(slice, array.shape))] = array
            self.source.checked(key, value)
        return jax.device_put(value)


def _set_magnitude(
    source: Folder,
    magnitude: nnx.Variable,
    stack: Stack,
    adapters: Mapping[Index, Adapter],
    is_exact: bool,
) -> None:
    """Sets the magnitudes that the folder has; other layers keep their norm. If `is_exact`,
    rounding one is an error."""
    old = magnitude.get_value()
    value = np.array(jax.device_get(old))
    for index, adapter in adapters.items():
        # The initial magnitude is the norm, clipped to the largest number of its dtype.
        at = stack.at(index)
        overflown = value[at] == np.finfo(value.dtype).max
        source.check_norm(adapter.layer.name, np.where(overflown, np.inf, value[at]))
        if key := adapter.keys.get("magnitude"):
            stored = source.read(key).reshape(value[at].shape)
            value[at] = stored
            if is_exact:
                source.check_not_rounded(key, stored, value[at])
    magnitude.set_value(jax.device_put(value, old.sharding))


def _set_parameters(source: Folder, named: NamedModel, destinations: Destinations) -> None:
    """Replaces the base model's parameters that the folder stores whole or in part."""
    replaced = [(name, keys, None) for name, keys in destinations.parameters.items()]
    replaced += [(name, (key,), list(rows)) for name, (key, rows) in destinations.tokens.items()]
    by_array: dict[tuple[str, str], list[tuple[str, tuple[str, ...], Any]]] = {}
    for name, keys, rows in replaced:
        one = named.parameters[name]
        by_array.setdefault((one.path, one.attribute), []).append((name, keys, rows))
    for (path, attribute), parts in by_array.items():
        variable = getattr(named.modules[path], attribute)
        old = variable.get_value()
        value = _zeros(old.shape, old.dtype)
        whole = {named.parameters[name].at for name, _, rows in parts if rows is None}
        if len(whole) < math.prod(named.stacks[path].shape):
            value[...] = jax.device_get(old)
        for name, keys, rows in parts:
            one, matrix = named.parameters[name], source.read_parameter(name, keys)
            with np.errstate(over="ignore"):
                if rows is not None:
                    matrix, stored = np.array(one.to_torch(value[one.at])), matrix
                    matrix[rows] = stored
                value[one.at] = one.from_torch(matrix)
            source.checked(name, value[one.at])
        variable.set_value(jax.device_put(value, old.sharding))


def _zeros(shape: Shape, dtype: Any) -> np.ndarray:
    """Returns zeros that begin on a cache line: JAX uses such an array without a copy on CPU."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + _CACHE_LINE, np.uint8)
    start = -buffer.ctypes.data % _CACHE_LINE
    return buffer[start : start + size].view(dtype).reshape(shape)
