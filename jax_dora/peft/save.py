"""A Flax model's adapter into a PEFT folder."""

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
from jax_dora.adapt.site import Site
from jax_dora.adapt.tree import check_model, find_dora_layers
from jax_dora.layers.call import fresh_magnitude
from jax_dora.ops import check
from jax_dora.peft.names import Names
from jax_dora.peft.parameters import TorchLayer, TorchParameter
from jax_dora.peft.torch_view import TorchView, torch_view
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
    bias: str = "none",
    fan_in_fan_out: bool = False,
    for_peft: bool = True,
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
    dtype: Dtype | None = None,
    config: AdapterConfig | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the adapter of `model` as a PEFT folder: adapter_config.json and
    adapter_model.safetensors, which PEFT loads, and computes the same with.

    Logs a warning where an embedding has adapt_attend set: an output head that is tied to it is
    adapted here, and would not be in PEFT.

    The folder appears whole or not at all. On several hosts, call this on one.

    Args:
      model: with adapters.
      folder: made if it is not there.
      names: how PyTorch calls the modules of `model`; `Names()` by default.
      use_dora: False writes a LoRA adapter, for which every magnitude has to be its norm.
      modules_to_save: ends of the names, in PyTorch, of modules to store whole; of modules that
        share a weight, all or none.
      trainable_token_indices: rows to store of embeddings, by the ends of their names in PyTorch;
        or the rows alone, where the model has one embedding.
      bias: "none", or the biases to store: "all", or "lora_only" for those of adapted layers.
      fan_in_fan_out: PyTorch's layers are GPT-2's Conv1D.
      for_peft: False also writes what PEFT refuses to read, and jax_dora reads: a DoRA adapter of
        packed experts, with magnitudes [experts, out].
      base_model_name_or_path, task_type: for whoever reads the folder; PEFT's task types are
        "CAUSAL_LM", "SEQ_CLS" and so on.
      dtype: of lora_a, lora_b and magnitude in the file: float16, bfloat16, float32 or float64; by
        default each has its own.
      config: written as it is instead of one made from the model and the arguments above; it has to
        say the same as the model.
      overwrite: replace an adapter that is in the folder.

    Raises:
      FileExistsError: there is an adapter in the folder, and `overwrite` is False.
      ValueError: the model has no adapter, or one that the format cannot express; `config` does not
        fit the model; a name matches no module; a number is not finite, or not in `dtype`.
      NotImplementedError: an adapted layer has no counterpart in PyTorch, or is a convolution with
        settings that PEFT does not honour; or packed experts have what PEFT refuses.
      TypeError: an argument has the wrong type.
    """
    if dtype is not None:
        check.is_float_dtype("dtype", dtype)
    check_model(model)
    view = torch_view(model, names or Names())
    is_lora = _lora_test(view)
    modules = _adapters_by_name(model, view, is_lora)
    if tied := [name for name, one in modules.items() if getattr(one, "adapt_attend", False)]:
        _LOG.warning(
            "%s: adapt_attend is True, so that an output head that is tied to the embedding is "
            "adapted with it, which PEFT's format cannot say: PEFT will leave such a head as it "
            "is. Train with DoRARule(..., adapt_attend=False) for the same in both; where no head "
            "is tied, nothing differs, and it silences this",
            ", ".join(tied),
        )

    def stored(owner: Any, part: TorchParameter, dtype: Dtype | None = None) -> np.ndarray:
        array = np.asarray(jax.device_get(getattr(owner, part.attribute).get_value()[part.at]))
        # What overflows is told of later, by its key.
        with np.errstate(over="ignore"):
            kind = None if dtype is None else jnp.dtype(dtype)
            return np.ascontiguousarray(part.to_torch(array), dtype=kind)

    def read(name: str) -> np.ndarray:
        one = view.parameters[name]
        return stored(view.modules[one.path], one)

    def read_adapter(name: str, attribute: str) -> np.ndarray:
        module = modules[name]
        parts = view.layers[name].adapter_parameters(module.rank)
        return stored(module, parts[attribute], dtype)

    source = Source(
        outline=view.outline(),
        adapted={
            name: Adapted(
                view.layers[name].layer,
                _as_python(one.rank),
                _as_python(one.alpha),
                one.use_rslora,
                0.0 if one.dropout is None else _as_python(one.dropout.rate),
            )
            for name, one in modules.items()
        },
        modules={*view.names, *(n for n, one in view.layers.items() if one.layer.kind == "linear")},
        read=read,
        read_adapter=read_adapter,
        is_lora=is_lora,
    )
    config = source.config(
        config,
        modules_to_save,
        trainable_token_indices,
        use_dora=use_dora,
        bias=bias,
        fan_in_fan_out=fan_in_fan_out,
        for_peft=for_peft,
        base_model_name_or_path=base_model_name_or_path,
        task_type=task_type,
    )
    check_no_possible_heads(view, config)
    source.write(folder, config, save_file, overwrite=overwrite)


def _adapters_by_name(
    model: nnx.Module, view: TorchView, is_lora: Callable[[str], bool]
) -> dict[str, Any]:
    """Returns, by PyTorch's name of each adapted layer, the object that holds its adapter."""
    paths = [found.paths[0] for found in find_dora_layers(model)]
    if not paths:
        raise ValueError(
            "model has no adapter; expected one with DoRA layers, as jax_dora.apply_dora makes it"
        )
    reachable = {layer.path for layer in view.layers.values()}
    if strange := [path for path in paths if path not in reachable]:
        raise NotImplementedError(
            f"{', '.join(strange)}: projections with batch axes or another order of output axes "
            "than their kernel's, transposed convolutions, or embeddings that are no nnx.Embed; "
            "expected layers that are a Linear, Embedding or ConvNd in PyTorch, or packed experts: "
            "merge them by merge_dora, or store the arrays of get_adapter"
        )
    return {
        name: layer.site.adapter
        for name, layer in view.layers.items()
        if layer.path in set(paths) and not _is_padding(layer, is_lora)
    }


def _is_padding(layer: TorchLayer, is_lora: Callable[[str], bool]) -> bool:
    """Returns whether the layer lies in a stack where others have an adapter and it has none:
    lora_a and lora_b are zero, which no training of an adapter leads to, and the magnitude is the
    norm."""
    holder: Any = layer.site.adapter
    if not layer.index or any(
        bool(jnp.any(part[...][layer.at])) for part in (holder.lora_a, holder.lora_b)
    ):
        return False
    return is_lora(layer.layer.name)


def _as_python(number: Any) -> Any:
    """Returns a number as Python's own, since JSON knows none of NumPy's."""
    return number.item() if isinstance(number, np.generic) else number


def _lora_test(view: TorchView) -> Callable[[str], bool]:
    """Returns a function that says, by a layer's name, whether its magnitude is its norm."""

    @functools.cache
    def are_norms(site: Site) -> np.ndarray:
        holder: Any = site.adapter
        return np.asarray(fresh_magnitude(holder) == holder.magnitude[...])

    def is_lora(name: str) -> bool:
        layer = view.layers[name]
        return bool(are_norms(layer.site)[layer.at].all())

    return is_lora
