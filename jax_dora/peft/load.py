"""A PEFT folder into a Flax model."""

import functools
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype

from jax_dora.adapt import DoRARule, apply_dora
from jax_dora.adapt.stack import indices, join, take
from jax_dora.hyperparameters import DropoutMode, adapter_scale
from jax_dora.ops import check
from jax_dora.peft.names import Names
from jax_dora.peft.places import Place, Places, places_of
from peft_format.fit import Adapter, Fit, Shape
from peft_format.folder import Folder, opened

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def load_adapter[Model: nnx.Module](
    model: Model,
    folder: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    names: Names | None = None,
    adapter_dtype: Dtype | None = None,
    dropout_mode: DropoutMode | None = None,
    rngs: nnx.Rngs | None = None,
) -> Model:
    """`model` with the adapter of a PEFT folder.

        model = load_adapter(model, "folder")

    The result is a model of its own; `model` is left as it is, and shares every array with the
    result but the adapter's and those parameters that the folder holds whole (modules_to_save,
    biases). Nothing is computed or changed before everything in the folder has found its place.

    A LoRA folder is loaded too: as the DoRA that computes the same, its magnitude equal to its
    norm. Where only some layers of a stack have an adapter, the others get one that changes
    nothing, with lora_a and lora_b zero.

    Args:
      model: plain, or with an adapter in the very layers, of the very rank and scale, that the
        folder speaks of; the folder's then takes its place.
      folder: holds adapter_config.json and adapter_model.safetensors.
      adapter: the adapter's name, where the files lie in a subfolder of that name.
      names: how PyTorch calls the modules of `model`; `Names()` by default.
      adapter_dtype: of lora_a and lora_b; by default that of the file, or of the adapter that is
        there if it can hold the file's values.
      dropout_mode: of a fresh adapter, where the folder's lora_dropout is not 0; by default as in
        PEFT: "input" for DoRA, "adapter" for LoRA. As always, `model.eval()` turns dropout off.
      rngs: its `dropout` stream makes the masks of a fresh adapter; `nnx.Rngs(0)` by default.

    Raises:
      FileNotFoundError, NotADirectoryError: there is no such folder, or a file is missing from it.
      ValueError: a file is damaged; a tensor has no place in the model or another shape than it, or
        one is missing. What is wrong is listed.
      NotImplementedError: the configuration asks for something that is not supported.
      TypeError: an argument or a field of the configuration has the wrong type.
    """
    names = names or Names()
    _check_dtype(adapter_dtype)
    with opened(folder, "np", adapter) as source:
        places = places_of(model, names)
        fit = source.fit(
            [place.layer for place in places.layers.values()],
            {name: place.shape for name, place in places.parameters.items()},
            adapter=adapter or "default",
        )
        stacks = _by_path(places, fit)
        dtypes = {
            path: _dtype(source, places, path, adapters.values(), adapter_dtype)
            for path, adapters in stacks.items()
        }
        if adapted := places.adapted_paths():
            _check_same(places, source, stacks, adapted)
            loaded = nnx.clone(model)
        else:
            rules = _rules(source, places, stacks, dtypes, dropout_mode)
            loaded = apply_dora(model, rules, rngs=rngs or nnx.Rngs(0))
        modules = places_of(loaded, names)
        for path, adapters in stacks.items():
            _fill(source, modules, path, adapters, dtypes[path])
        _fill_parameters(source, modules, fit)
    return loaded


def _by_path(places: Places, fit: Fit) -> dict[str, dict[str, Adapter]]:
    """The adapters of each module, by layer name: several where the module is a stack.

    Raises:
      ValueError: the layers of a stack differ in rank or alpha.
    """
    stacks: dict[str, dict[str, Adapter]] = {}
    for name, adapter in fit.adapters.items():
        stacks.setdefault(places.layers[name].path, {})[name] = adapter
    for path, adapters in stacks.items():
        kinds = {(one.rank, one.alpha): name for name, one in adapters.items()}
        if len(kinds) > 1:
            told = ", ".join(f"{name} has {kind}" for kind, name in kinds.items())
            raise ValueError(
                f"the layers at {path!r} are stacked in one array; expected one rank and one alpha "
                f"for all of them, but {told}: load into a model whose layers stand in a list"
            )
    return stacks


def _rules(
    source: Folder,
    places: Places,
    stacks: Mapping[str, Mapping[str, Adapter]],
    dtypes: Mapping[str, np.dtype],
    dropout_mode: DropoutMode | None,
) -> list[DoRARule]:
    config = source.config
    groups: dict[tuple[Any, ...], list[str]] = {}
    for path, adapters in stacks.items():
        one = next(iter(adapters.values()))
        dropout = 0.0 if one.layer.kind == "embedding" else config.lora_dropout
        groups.setdefault((one.rank, one.alpha, dropout, dtypes[path]), []).append(path)
    return [
        DoRARule(
            "|".join(map(re.escape, paths)),
            rank=rank,
            alpha=alpha,
            use_rslora=config.use_rslora,
            dropout=dropout,
            dropout_mode=dropout_mode or ("input" if config.use_dora else "adapter"),
            adapter_dtype=dtype,
            lora_a_init=nnx.initializers.zeros_init(),
            lora_b_init=nnx.initializers.zeros_init(),
        )
        for (rank, alpha, dropout, dtype), paths in groups.items()
    ]


def _check_same(
    places: Places,
    source: Folder,
    stacks: Mapping[str, Mapping[str, Adapter]],
    adapted: Iterable[str],
) -> None:
    """
    Raises:
      ValueError: the model's adapters are not of the layers, ranks and scales of the folder's.
    """
    problems = [
        f"{path} has an adapter, the folder none for it" for path in adapted if path not in stacks
    ]
    for path, adapters in stacks.items():
        module: Any = places.modules[path]
        if path not in adapted:
            problems.append(f"{path} has no adapter, the folder has one for it")
            continue
        one = next(iter(adapters.values()))
        scale = adapter_scale(one.rank, one.alpha, source.config.use_rslora)
        if (module.rank, module.scale) != (one.rank, scale):
            problems.append(
                f"{path} has rank {module.rank} and scale {module.scale}, the folder {one.rank} "
                f"and {scale}"
            )
    if problems:
        raise ValueError(
            f"{source.path}: the model holds another adapter; expected none, or one of the same "
            "layers, ranks and scales: load into the base model (jax_dora.remove_dora takes an "
            "adapter out):\n" + "\n".join(f"- {problem}" for problem in problems[:20])
        )


def _dtype(
    source: Folder,
    places: Places,
    path: str,
    adapters: Iterable[Adapter],
    adapter_dtype: Dtype | None,
) -> np.dtype:
    """Of lora_a and lora_b at `path`.

    Raises:
      ValueError: the file's values would be rounded, and nobody asked for that.
    """
    if adapter_dtype is not None:
        return jnp.dtype(adapter_dtype)
    present = getattr(places.modules[path], "lora_a", None)
    with jax.numpy_dtype_promotion("standard"):
        stored = functools.reduce(
            jnp.promote_types,
            {
                jnp.dtype(_DTYPES[source.tensors[key][0]])
                for adapter in adapters
                for key in (adapter.keys["lora_a"], adapter.keys["lora_b"])
            },
        )
        if jax.dtypes.canonicalize_dtype(stored) != stored:
            target, reason = np.dtype(np.float32), "jax without jax_enable_x64"
        else:
            target = stored if present is None else jnp.dtype(present.get_value().dtype)
            reason = f"the {target.name} adapter that the model has there"
        if jnp.promote_types(target, stored) != target:
            raise ValueError(
                f"{source.path} holds {stored.name} for {path!r}, which {reason} would round; "
                f"pass adapter_dtype={target.name!r} if it may"
            )
    return target


def _fill(
    source: Folder, places: Places, path: str, adapters: Mapping[str, Adapter], dtype: np.dtype
) -> None:
    module: Any = places.modules[path]
    stack = places.stacks[path]
    parts = {
        name: places.of_adapter(places.layers[name], one.rank) for name, one in adapters.items()
    }
    for attribute in ("lora_a", "lora_b"):
        variable = getattr(module, attribute)
        tensors = {parts[n][attribute]: one.keys[attribute] for n, one in adapters.items()}
        value = np.zeros(variable.shape, dtype)
        _read_into(value, source, tensors)
        _set(variable, value)
    magnitude = module.magnitude
    tensors = {
        parts[name]["magnitude"]: one.keys["magnitude"]
        for name, one in adapters.items()
        if "magnitude" in one.keys
    }
    if len(tensors) < math.prod(stack):
        magnitude.set_value(_norm(module, stack).astype(magnitude.dtype))
    if tensors:
        value = np.array(jax.device_get(magnitude.get_value()))
        _read_into(value, source, tensors)
        _set(magnitude, value)


def _norm(module: Any, stack: Shape) -> jax.Array:
    if not stack:
        return module.norm()
    return join([take(module, index).norm() for index in indices(stack)], stack)


def _fill_parameters(source: Folder, places: Places, fit: Fit) -> None:
    wholes: dict[tuple[str, str], dict[Place, str]] = {}
    for name, (key, *others) in fit.parameters.items():
        place = places.parameters[name]
        for other in others:
            if source.read(key).tobytes() != source.read(other).tobytes():
                raise ValueError(f"{source.path}: {key} and {other} differ; expected one {name}")
        wholes.setdefault((place.path, place.attribute), {})[place] = key
    for (path, attribute), tensors in wholes.items():
        variable = getattr(places.modules[path], attribute)
        value = np.array(jax.device_get(variable.get_value()))
        _read_into(value, source, tensors)
        _set(variable, value)


def _read_into(array: np.ndarray, source: Folder, tensors: Mapping[Place, str]) -> None:
    """Cast to the array's dtype, layer by layer."""
    for place, key in tensors.items():
        array[place.index] = place.from_torch(source.read(key))


def _set(variable: nnx.Variable, value: np.ndarray) -> None:
    """Where the old value lies."""
    variable.set_value(jax.device_put(value, variable.get_value().sharding))


def _check_dtype(adapter_dtype: Dtype | None) -> None:
    if adapter_dtype is not None and jnp.dtype(adapter_dtype) not in check.FLOATS:
        raise TypeError(
            f"adapter_dtype is {adapter_dtype}; expected float16, bfloat16, float32 or float64"
        )
