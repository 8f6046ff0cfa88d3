"""Saves the adapter of a Flax model as a PEFT folder."""

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype
from safetensors.numpy import save_file

from dora_common.peft.config import AdapterConfig
from dora_common.peft.save import Adapted, Source
from jax_dora.adapt import base_values
from jax_dora.adapt.adapted_class import adapter_of
from jax_dora.adapt.tree import check_model, find_dora_layers, named_in_errors
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers.base_layer import check_has_values
from jax_dora.layers.magnitude import check_rank, fresh_magnitude
from jax_dora.ops import check
from jax_dora.peft.named_model import NamedModel, named_model
from jax_dora.peft.names import Names
from jax_dora.peft.parameters import TorchLayer, TorchParameter
from jax_dora.peft.untie import check_no_possible_heads

_LOG = logging.getLogger(__name__)


def save_adapter(
    model: nnx.Module,
    folder: str | os.PathLike[str],
    *,
    names: Names | None = None,
    use_dora: bool = True,
    modules_to_save: Sequence[str] | str = (),
    trainable_token_indices: Mapping[str, Sequence[int]] | Sequence[int] | None = None,
    layers_to_transform: Sequence[int] = (),
    bias: str = "none",
    fan_in_fan_out: bool = False,
    for_peft: bool = True,
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
    dtype: Dtype | None = None,
    config: AdapterConfig | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the adapter of `model` as a PEFT folder.

    The folder has the files adapter_config.json and adapter_model.safetensors. PEFT loads it and
    computes the same with it. It is written atomically. On several hosts, call this on one of them.

    Logs a warning if an embedding has adapt_attend set: an output head that is tied to it is
    adapted here, but not in PEFT. Another warning lists parameters of the base model that have
    changed since the model got its adapter, as by training with `wrt=nnx.Param`, and that are not
    stored.

    Args:
      model: a model with an adapter.
      folder: the folder, which is created if it does not exist.
      names: translates the model's paths to PyTorch's names; `Names()` by default.
      use_dora: False writes a LoRA adapter, which requires every magnitude to equal its norm.
      modules_to_save: ends of the PyTorch names of modules to store whole. Modules that share a
        weight have to be stored together.
      trainable_token_indices: rows of embeddings to store, by the ends of the embeddings' PyTorch
        names; or only the rows if the model has a single embedding.
      layers_to_transform: the only indices of layers that have adapters, for adapter_config.json.
        Not needed: without it the names of the adapted layers say so.
      bias: the biases to store: "none", "all", or "lora_only" for the biases of adapted layers.
      fan_in_fan_out: whether the layers are GPT-2's Conv1D in PyTorch.
      for_peft: False also allows what only jax_dora can read: a DoRA adapter of packed experts,
        with magnitudes [experts, out].
      base_model_name_or_path, task_type: information for readers. PEFT's task types are
        "CAUSAL_LM", "SEQ_CLS" and so on.
      dtype: the dtype of lora_a, lora_b and magnitude in the file: float16, bfloat16, float32 or
        float64; by default each keeps its own dtype.
      config: a configuration to write instead of one made from the model and the arguments above.
        It has to match the model.
      overwrite: whether to replace an existing adapter in the folder.

    Raises:
      FileExistsError: the folder has an adapter, and `overwrite` is False.
      ValueError: the model is abstract; it has no adapter, or one that the format cannot express;
        `config` does not match the model; a name matches no module; or a parameter to store is
        quantised; or a number is not finite, or overflows in `dtype`.
      NotImplementedError: an adapted layer has no counterpart in PyTorch, or is a convolution with
        settings that PEFT ignores in adapters; or packed experts have settings that PEFT rejects.
      TypeError: an argument has the wrong type.
    """
    if dtype is not None:
        check.is_float_dtype("dtype", dtype)
    check_model(model)
    check_has_values(model, "jax_dora.peft.save_adapter", can_trace=False)
    named = named_model(model, names or Names())
    is_lora = _lora_test(named)
    modules = _adapters_by_name(model, named, is_lora)
    for name, one in modules.items():
        with named_in_errors(name, "saved"):
            check_rank(one)
    if tied := [name for name, one in modules.items() if getattr(one, "adapt_attend", False)]:
        _LOG.warning(
            "%s: adapt_attend is True, so that an output head that is tied to the embedding is "
            "adapted too. PEFT's format cannot express this, and PEFT will not adapt such a head. "
            "Train with DoRARule(..., adapt_attend=False) for the same results in both. If no head "
            "is tied, the results are the same, and adapt_attend=False only avoids this warning",
            ", ".join(tied),
        )

    def stored(owner: Any, part: TorchParameter, dtype: Dtype | None = None) -> np.ndarray:
        array = np.asarray(jax.device_get(getattr(owner, part.attribute).get_value()[part.at]))
        # Source.write raises an error with the key after an overflow.
        with np.errstate(over="ignore"):
            kind = None if dtype is None else jnp.dtype(dtype)
            return np.ascontiguousarray(part.to_torch(array), dtype=kind)

    def read(name: str) -> np.ndarray:
        named.check_not_quantised([name])
        one = named.parameters[name]
        return stored(named.modules[one.path], one)

    def read_adapter(name: str, attribute: str) -> np.ndarray:
        module = modules[name]
        parts = named.layers[name].adapter_parameters(module.rank)
        return stored(module, parts[attribute], dtype)

    source = Source(
        architecture=named.architecture(),
        adapted={
            name: Adapted(
                named.layers[name].layer,
                _as_python(one.rank),
                _as_python(one.alpha),
                one.use_rslora,
                0.0 if one.dropout is None else _as_python(one.dropout.rate),
            )
            for name, one in modules.items()
        },
        modules={
            *named.names,
            *(n for n, one in named.layers.items() if one.layer.kind == "linear"),
        },
        read=read,
        read_adapter=read_adapter,
        is_lora=is_lora,
    )
    config = source.config(
        config,
        modules_to_save,
        trainable_token_indices,
        layers_to_transform,
        use_dora=use_dora,
        bias=bias,
        fan_in_fan_out=fan_in_fan_out,
        for_peft=for_peft,
        base_model_name_or_path=base_model_name_or_path,
        task_type=task_type,
    )
    check_no_possible_heads(named, config)
    stored_paths = {
        f"{one.path}/{one.attribute}".lstrip("/")
        for name, one in named.parameters.items()
        for module in [name.rpartition(".")[0]]
        if config.stores(name, of_adapted_layer=module in modules)
        or config.token_indices_of(module)
    }
    base_values.warn_of_changed(model, "save_adapter", stored_paths)
    source.write(folder, config, save_file, overwrite=overwrite)


def _adapters_by_name(
    model: nnx.Module, named: NamedModel, is_lora: Callable[[str], bool]
) -> dict[str, Any]:
    """Returns the objects that hold the adapters, by PyTorch's names of the adapted layers."""
    paths = [path for path, *_ in find_dora_layers(model)]
    if not paths:
        raise ValueError(
            "model has no adapter; expected a model with DoRA layers, from jax_dora.apply_dora"
        )
    reachable = {layer.path for layer in named.layers.values()}
    if unsupported := [path for path in paths if path not in reachable]:
        raise NotImplementedError(
            f"{', '.join(unsupported)}: projections with batch axes or another order of output "
            "axes than their kernel's, transposed convolutions, or embeddings that are no "
            "nnx.Embed; expected layers that are a Linear, Embedding or ConvNd in PyTorch, or "
            "packed experts: merge the adapter with merge_dora, or store the arrays of get_adapter"
        )
    return {
        name: adapter_of(layer.weight)
        for name, layer in named.layers.items()
        if layer.path in set(paths) and not _is_padding(layer, is_lora)
    }


def _is_padding(layer: TorchLayer, is_lora: Callable[[str], bool]) -> bool:
    """Returns whether a layer of a stack has no real adapter, unlike others: its lora_a and lora_b
    are zero, which training does not lead to, and its magnitude is the norm."""
    holder: Any = adapter_of(layer.weight)
    arrays = [part[...] for part in (holder.lora_a, holder.lora_b)]
    has_adapter = any(bool(jnp.any(array[layer.at])) for array in arrays)
    if not layer.index or has_adapter or not any(bool(jnp.any(array)) for array in arrays):
        return False
    return is_lora(layer.layer.name)


def _as_python(number: Any) -> Any:
    """Converts a NumPy number to a Python number, which JSON can hold."""
    return number.item() if isinstance(number, np.generic) else number


def _lora_test(named: NamedModel) -> Callable[[str], bool]:
    """Returns a function from a layer's name to whether the layer's magnitude equals its norm."""

    @functools.cache
    def are_norms(weight: AdaptableWeight) -> np.ndarray:
        holder: Any = adapter_of(weight)
        return np.asarray(fresh_magnitude(holder) == holder.magnitude[...])

    def is_lora(name: str) -> bool:
        layer = named.layers[name]
        return bool(are_norms(layer.weight)[layer.at].all())

    return is_lora
