"""A PEFT folder into a Flax model."""

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
from dora_common.peft.fit import Adapter, Fit
from dora_common.peft.folder import Folder, opened
from dora_common.peft.layers import Shape
from jax_dora.adapt import DoRARule, remove_dora
from jax_dora.adapt.adapter import adapted_weights, find_adaptable_weights, stack_axes
from jax_dora.adapt.apply import adapt_site
from jax_dora.adapt.site import Site
from jax_dora.adapt.tree import check_model, replace_modules
from jax_dora.layers.stack import Stack
from jax_dora.ops import check
from jax_dora.peft.names import Names
from jax_dora.peft.parameters import Index
from jax_dora.peft.torch_view import TorchView, torch_view
from jax_dora.peft.untie import untie

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

    The result is a model of its own; `model` is left as it is, and shares every array with the
    result but the adapter's and those parameters that the folder holds whole (modules_to_save,
    biases) or rows of (trainable_token_indices), which are cast to the model's dtypes. Everything
    in the folder finds its place before anything is read, computed or made.

    A LoRA folder is loaded too: as the DoRA that computes the same, its magnitude equal to its
    norm. Where only some layers of a stack have an adapter, the others get one that changes
    nothing, with lora_a and lora_b zero. Where the layers of a stack differ in rank or scale, all
    get the largest: the others' lora_a and lora_b are padded with zeros, and their lora_b is scaled
    down, in float32 or better. An output head that is tied to an adapted embedding stays as it is,
    as in PEFT: `jax_dora.DoRAEmbed`'s adapt_attend is False. A module of modules_to_save whose
    weight is tied to another gets an array of its own, as in PEFT. What an earlier folder replaced
    in the base model stays as that folder had it; a warning is logged of what `save_adapter` has to
    be given to store it again.

    The adapter's dropout is off, as after PEFT's `from_pretrained`; to train the adapter further,
    turn it on by `model.train()`.

    Args:
      model: plain, or with an adapter, in whose place the folder's comes.
      folder: holds adapter_config.json and adapter_model.safetensors.
      adapter: the adapter's name, where the files lie in a subfolder of that name, or the keys have
        it.
      names: how PyTorch calls the modules of `model`; `Names()` by default.
      adapter_dtype: of lora_a and lora_b; by default that of the file.
      dropout_mode: where the folder's lora_dropout is not 0; by default as in PEFT, "input" for
        DoRA and "adapter" for LoRA.
      implementation: of the compose, as in `jax_dora.ops.dora_linear`.
      rngs: its `dropout` stream makes the masks; `nnx.Rngs(0)` by default.
      example: what the model is called with, as `jax_dora.apply_dora`'s, where the adapter was made
        with one: it says which code reads the weights. Nobody needs it for a model that holds such
        an adapter.

    Raises:
      FileNotFoundError, NotADirectoryError: there is no such folder or adapter, or a file is
        missing from it.
      ValueError: a file is damaged; a tensor has no place in the model or another shape than it, or
        one is missing, or is not finite. What is wrong is listed.
      NotImplementedError: the configuration asks for something that is not supported.
      TypeError: an argument or a field of the configuration has the wrong type.
    """
    if adapter_dtype is not None:
        check.is_float_dtype("adapter_dtype", adapter_dtype)
    check_model(model)
    names = names or Names()
    where = {"held": adapted_weights(model), "stack_axes": dict(stack_axes(model))}
    with opened(folder, "np", adapter) as source:
        loaded = remove_dora(model)
        if example is not None:
            where["held"] = find_adaptable_weights(loaded, example)
        view = torch_view(loaded, names, **where)
        outline = view.outline()
        fit = source.fit(outline)
        stacks = _by_site(view, fit)
        rules = {
            site: DoRARule(
                re.escape(site.names[0]),
                **source.options(_of_stack(source, adapters.values()), dropout_mode),
                adapter_dtype=adapter_dtype or _dtype(source, site.names[0], adapters.values()),
                adapt_attend=False if one.layer.kind == "embedding" else None,
                lora_a_init=_Stored("lora_a", source, view, site, adapters),
                lora_b_init=_Stored("lora_b", source, view, site, adapters),
                implementation=implementation,
            )
            for site, adapters in stacks.items()
            for one in [next(iter(adapters.values()))]
        }
        rngs = rngs or nnx.Rngs(0)
        replacements = {}
        for site, rule in rules.items():
            layer = adapt_site(site, rule, rngs)
            if site.is_layer:
                replacements[id(site.found.module)] = layer
            layer.eval()
            exactly = adapter_dtype is None
            _set_magnitude(source, layer.magnitude, site.stack, stacks[site], exactly)
        loaded = untie(loaded, view, fit, source.config)
        loaded = replace_modules(loaded, replacements)
        _set_parameters(source, torch_view(loaded, names, **where), fit)
        source.tell_of_replaced(fit, outline)
    return loaded


def _by_site(view: TorchView, fit: Fit) -> dict[Site, dict[Index, Adapter]]:
    """Returns the adapters of each site, by their index in it: several where it is a stack."""
    stacks: dict[Site, dict[Index, Adapter]] = {}
    for name, adapter in fit.adapters.items():
        layer = view.layers[name]
        stacks.setdefault(layer.site, {})[layer.index] = adapter
    return stacks


def _of_stack(source: Folder, adapters: Collection[Adapter]) -> Adapter:
    """Returns an adapter of the largest rank and scale of layers that are one array."""
    rank = max(one.rank for one in adapters)
    largest = max(adapters, key=lambda one: abs(source.scale(one)))
    alpha = largest.alpha
    if largest.rank != rank:
        alpha = source.scale(largest) / adapter_scale(rank, 1, source.config.use_rslora)
    return dataclasses.replace(largest, rank=rank, alpha=alpha)


def _dtype(source: Folder, path: str, adapters: Collection[Adapter]) -> np.dtype:
    """Returns the dtype in which lora_a and lora_b at `path` are stored, or float32 where lora_b
    is scaled and they are in less."""
    dtypes = set[str]().union(*map(source.dtypes, adapters))
    if len({source.scale(one) for one in adapters}) > 1:
        dtypes.add("float32")
    with jax.numpy_dtype_promotion("standard"):
        dtype = functools.reduce(jnp.promote_types, map(jnp.dtype, dtypes))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{source.path} holds {dtype.name} for {path!r}, which JAX rounds unless "
            "jax_enable_x64 is set; pass adapter_dtype='float32' if it may"
        )
    return dtype


class _Stored:
    """Initializes a layer's lora_a or lora_b from a folder, called for each layer of a stack in
    turn. Layers that have no adapter get zeros, as do ranks that only others have."""

    of_parameter = True  # and not of each of its matrices

    def __init__(
        self,
        name: str,
        source: Folder,
        view: TorchView,
        site: Site,
        adapters: Mapping[Index, Adapter],
    ) -> None:
        self.name, self.source, self.view = name, source, view
        self.scale = max(map(source.scale, adapters.values()), key=abs)
        self.adapters = iter([adapters.get(at) for at in site.stack.indices()])

    def __call__(self, _: Any, shape: Shape, dtype: Any = jnp.float32, *__: Any) -> jax.Array:
        value, adapter = _zeros(shape, dtype), next(self.adapters)
        if adapter is not None:
            key, layer = adapter.keys[self.name], self.view.layers[adapter.layer.name]
            part = layer.of_adapter(adapter.rank)[self.name]
            array = part.from_torch(self.source.read(key))
            if self.name == "lora_b" and (scale := self.source.scale(adapter)) != self.scale:
                wide = np.promote_types(array.dtype, np.float32)
                array = array.astype(wide) * wide.type(scale / self.scale)
            with np.errstate(over="ignore"):  # told with its name
                value[tuple(map(slice, array.shape))] = array
            self.source.kept(key, value)
        return jax.device_put(value)


def _set_magnitude(
    source: Folder,
    magnitude: nnx.Variable,
    stack: Stack,
    adapters: Mapping[Index, Adapter],
    exactly: bool,
) -> None:
    """Sets the magnitudes that the folder has; a LoRA adapter, and a layer without one, keep the
    norm."""
    old = magnitude.get_value()
    value = np.array(jax.device_get(old))
    for index, adapter in adapters.items():
        # A layer's own magnitude, which is its norm, ends at the largest number.
        at = stack.at(index)
        overflown = value[at] == np.finfo(value.dtype).max
        source.check_norm(adapter.layer.name, np.where(overflown, np.inf, value[at]))
        if key := adapter.keys.get("magnitude"):
            stored = source.read(key).reshape(value[at].shape)
            value[at] = stored
            if exactly:
                source.refuse_rounding(key, stored, value[at])
    magnitude.set_value(jax.device_put(value, old.sharding))


def _set_parameters(source: Folder, view: TorchView, fit: Fit) -> None:
    wanted = [(name, keys, None) for name, keys in fit.parameters.items()]
    wanted += [(name, (key,), list(rows)) for name, (key, rows) in fit.tokens.items()]
    read: dict[tuple[str, str], list[tuple[str, tuple[str, ...], Any]]] = {}
    for name, keys, rows in wanted:
        one = view.parameters[name]
        read.setdefault((one.path, one.attribute), []).append((name, keys, rows))
    for (path, attribute), parts in read.items():
        variable = getattr(view.modules[path], attribute)
        old = variable.get_value()
        value = _zeros(old.shape, old.dtype)
        if sum(rows is None for _, _, rows in parts) < math.prod(view.stacks[path].shape):
            value[...] = jax.device_get(old)
        for name, keys, rows in parts:
            one, matrix = view.parameters[name], source.read_parameter(name, keys)
            with np.errstate(over="ignore"):
                if rows is not None:
                    matrix, stored = np.array(one.to_torch(value[one.at])), matrix
                    matrix[rows] = stored
                value[one.at] = one.from_torch(matrix)
            source.kept(name, value[one.at])
        variable.set_value(jax.device_put(value, old.sharding))


def _zeros(shape: Shape, dtype: Any) -> np.ndarray:
    """Returns zeros that JAX takes over without a copy on CPU, since they begin on a cache line:
    the host never holds an array twice."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + _CACHE_LINE, np.uint8)
    start = -room.ctypes.data % _CACHE_LINE
    return room[start : start + size].view(dtype).reshape(shape)
