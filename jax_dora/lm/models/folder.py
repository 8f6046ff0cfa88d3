"""Loads a `CausalLM` from a Hugging Face model folder, and saves one."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_dora
from dora_common.disk import add_path_to_disk_errors, hub_hint
from dora_common.replacement import temporary_folder
from jax_dora.layers.base_layer import check_has_values
from jax_dora.lm.models.config import COMPUTATION, DecoderConfig, read_json_object
from jax_dora.lm.models.decoder import CausalLM
from jax_dora.lm.models.quantised_folder import (
    quantised_tensors,
    use_stored_formats,
)
from jax_dora.lm.models.quantised_weights import QuantisedTensor
from jax_dora.lm.models.sharding import DecoderSharding
from jax_dora.lm.models.stored_arrays import (
    StoredArray,
    layer_tensor,
    load_array,
    stored_arrays,
    tensors_equal,
)
from jax_dora.lm.models.tensor_files import StoredTensor, stored_tensors, write_files
from jax_dora.ops import is_quantised
from jax_dora.quantisation import load_kernel, quantise_activations

TIED = "lm_head.weight", "model.embed_tokens.weight"
# The subfolder with named chat templates, in addition to the default template.
EXTRA_TEMPLATES = "additional_chat_templates"

# Returns the sharding of an array, given its path, such as "model/layers/mlp/up_proj/kernel", and
# its shape.
ChooseSharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


def read_config(folder: str | PathLike[str]) -> dict[str, Any]:
    """Returns the contents of config.json.

    If the file has no dtype, the result has the dtype of the embedding's weights, as in
    transformers.

    Raises:
      FileNotFoundError: config.json is missing, or it has no dtype and there are no weights.
      ValueError: config.json is not a JSON object.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        hint = hub_hint(folder)
        if (Path(folder) / "adapter_config.json").is_file():
            hint = (
                "; this is an adapter's folder: load its base model, and the adapter into it by "
                "jax_dora.peft.load_adapter"
            )
        raise FileNotFoundError(
            f"{file} does not exist; expected a Hugging Face model folder{hint}"
        )
    config = read_json_object(file)
    if config.get("dtype") or config.get("torch_dtype"):
        return config
    embedding = stored_tensors(Path(folder)).get(TIED[1])
    return config if embedding is None else {**config, "dtype": embedding.dtype.name}


def load_model(
    folder: str | PathLike[str],
    *,
    sharding: jax.sharding.Sharding | ChooseSharding | None = None,
    quantize: str | None = None,
    act_qtype: str | None = None,
    bwd_qtype: str | None = None,
    **changes: Any,
) -> CausalLM:
    """Returns the model of a Hugging Face folder.

    Weights can be quantised in the folder: by bitsandbytes to NF4, or to FP8 with one scale per
    tensor, output feature or block. They are loaded in that format. `quantize` quantises other
    weights while they are loaded.

    Each array is allocated on its devices and filled block by block, so the host never holds a copy
    of the weights. On CPU, the peak is the size of the model and two blocks, and while a matrix is
    quantised about three copies of it.

    Args:
      folder: a folder with config.json and model.safetensors, or several safetensors files and
        their index; or the same in PyTorch's format, pytorch_model.bin.
      sharding: the sharding of every array, or a function that returns the sharding for a path and
        a shape. By default, arrays are on the default device. Each device reads only its part. A
        `DecoderSharding` also shards activations.
      quantize: "nf4", "int4", "int8" or "float8_e4m3fn": the format, as for `jax_dora.quantize`, in
        which the projections of the layers are loaded. They are quantised on the device, one tensor
        at a time.
      act_qtype: "float8_e4m3fn", as for `jax_dora.quantize`: the projections quantise their
        activations as well. The weights must have that format, by `quantize` or in the folder.
      bwd_qtype: the format of gradients, as for `jax_dora.quantize`; it needs `act_qtype`.
      **changes: values for fields of `DecoderConfig`, instead of config.json's: dtype, attention,
        segments, remat, memory, unroll.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a tensor is missing, damaged, not part of the model, or has another shape than
        config.json says; or `act_qtype` does not fit the format of the weights.
      NotImplementedError: the decoder does not support the model.
    """
    folder = Path(folder)
    formats = {"act_qtype": act_qtype, "bwd_qtype": bwd_qtype}
    abstract, tensors, quantised = _abstract(folder, sharding, quantize, formats, changes)
    config = abstract.config
    graphdef, state = nnx.split(abstract)
    arrays = list(stored_arrays(state, config))
    _check_tensors(folder, config, arrays, tensors, quantised)

    flat = dict(nnx.to_flat_state(state))
    for array in arrays:
        if sharding is None or isinstance(sharding, jax.sharding.Sharding):
            array_sharding = sharding
        else:
            array_sharding = sharding("/".join(array.path), array.shape)
        like = flat[array.path].get_value()
        if is_quantised(like):
            shape = array.shape[1:] if array.stacked else array.shape
            layer = dataclasses.replace(array, shape=shape, stacked=False)

            def read(name: str, sharding: Any, layer: StoredArray = layer) -> Any:
                if name in quantised:
                    return quantised[name].read()
                return load_array(layer, [tensors[name]], sharding)

            value = load_kernel(like, read, array.names, array_sharding, is_stacked=array.stacked)
        else:
            value = load_array(array, [tensors[name] for name in array.names], array_sharding)
        flat[array.path] = flat[array.path].replace(value)
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def abstract_model(
    folder: str | PathLike[str],
    *,
    sharding: jax.sharding.Sharding | ChooseSharding | None = None,
    quantize: str | None = None,
    act_qtype: str | None = None,
    bwd_qtype: str | None = None,
    **changes: Any,
) -> CausalLM:
    """Returns the model that `load_model` would return, with shapes and dtypes instead of arrays.

    It takes the same arguments and raises the same errors as `load_model`.
    """
    formats = {"act_qtype": act_qtype, "bwd_qtype": bwd_qtype}
    return _abstract(Path(folder), sharding, quantize, formats, changes)[0]


def _abstract(
    folder: Path,
    sharding: Any,
    quantize: str | None,
    formats: dict[str, str | None],
    changes: dict[str, Any],
) -> tuple[CausalLM, dict[str, StoredTensor], dict[str, QuantisedTensor]]:
    """Returns the abstract model, the folder's tensors, and the folder's quantised weights."""
    contents = read_config(folder)
    if isinstance(sharding, DecoderSharding):
        changes = {"sharding": sharding} | changes
    config = DecoderConfig.from_hf(contents, **changes)
    tensors = stored_tensors(folder)
    model = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))
    arrays = list(stored_arrays(nnx.state(model), config))
    names = [name for array in arrays for name in array.names]
    quantised = quantised_tensors(names, tensors, contents)
    if quantised and quantize is not None:
        raise ValueError(
            f"quantize is {quantize!r}, but {folder} is quantised already, for example "
            f"{next(iter(quantised))}; expected None: its weights are loaded in their own format"
        )
    if quantize is not None:
        make = functools.partial(jax_dora.quantize, qtype=quantize, **formats)
        model = nnx.eval_shape(lambda: make(CausalLM(config, rngs=nnx.Rngs(0))))
    use_stored_formats(model, arrays, quantised)
    if quantize is None and any(formats.values()):
        quantise_activations(model, **formats)
    return model, tensors, quantised


def save_model(
    model: CausalLM,
    folder: str | PathLike[str],
    config: dict[str, Any],
    *,
    tokenizer_from: str | PathLike[str] | None = None,
    files: Mapping[str, str | None] | None = None,
    max_file_bytes: int = 2 << 30,
) -> None:
    """Writes a model as a Hugging Face folder. The folder appears once it is complete.

    If the model's arrays are spread over several processes, every process has to call this
    function. The first process writes.

    Args:
      model: a model without adapters; merge them first. Quantised kernels are written as floats.
      folder: the folder to create. It must not exist, or be empty.
      config: the contents of config.json, as returned by `read_config`. Its dtype is replaced with
        the model's, and so is what an adapter's folder can change: the number of tokens, and
        whether the head is tied.
      tokenizer_from: a folder to copy all other files from, such as the tokenizer, the generation
        settings and the chat template.
      files: the contents of files, by name, that replace those of `tokenizer_from`; None for files
        to leave out.
      max_file_bytes: the maximum size of a safetensors file, unless a single tensor is larger. The
        host holds the tensors of one file at a time.

    Raises:
      FileExistsError: `folder` is not empty.
      TypeError: `config` is not a dict.
      ValueError: the model is abstract, or has arrays that the format cannot store, such as
        adapters; or `config` describes a different model.
    """
    check_has_values(model, "jax_dora.lm.models.save_model", can_trace=False)
    if not isinstance(config, dict):
        raise TypeError(
            f"config is a {type(config).__name__}; expected the contents of config.json, as "
            "jax_dora.lm.models.read_config(folder) returns them"
        )
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; expected a new or an empty folder")
    dtype = jnp.dtype(model.config.dtype)
    config = config | {"vocab_size": model.config.vocab_size}
    described = DecoderConfig.from_hf(
        config, **{name: getattr(model.config, name) for name in COMPUTATION}
    )
    if described != model.config:
        raise ValueError(f"config describes {described}; expected the model's {model.config}")
    state = nnx.state(model)
    arrays = dict(nnx.to_flat_state(state))
    tensors = [
        (
            name,
            array.tensor_bytes,
            functools.partial(layer_tensor, arrays[array.path].get_value(), array, layer),
        )
        for array in stored_arrays(state, model.config)
        for layer, name in enumerate(array.names)
    ]
    leaves = jax.tree.leaves(state)
    if jax.process_index() and not all(array.is_fully_addressable for array in leaves):
        # Gathering an array is a collective operation, so every process has to take part.
        for _, _, value in tensors:
            value()
        return

    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder) as partial:
        with add_path_to_disk_errors(folder):
            write_files(partial, tensors, max_file_bytes)
        if tokenizer_from is not None:
            _copy_other_files(Path(tokenizer_from), partial)
        for file, text in ((partial / name, text) for name, text in (files or {}).items()):
            if text is None:
                file.unlink(missing_ok=True)
            else:
                file.parent.mkdir(exist_ok=True)
                file.write_text(text, "utf-8")
        changes = dict.fromkeys(config.keys() & {"dtype", "torch_dtype"} or {"dtype"}, dtype.name)
        if model.config.tie_word_embeddings and model.lm_head is not None:
            changes["tie_word_embeddings"] = False
        config = {name: value for name, value in config.items() if name != "quantization_config"}
        text = json.dumps(config | changes, indent=2, sort_keys=True)
        config_file = partial / "config.json"
        config_file.write_text(text + "\n")
        # safetensors creates files that only their owner can read.
        for file in filter(Path.is_file, partial.iterdir()):
            shutil.copymode(config_file, file)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)


def _check_tensors(
    folder: Path,
    config: DecoderConfig,
    arrays: list[StoredArray],
    tensors: dict[str, StoredTensor],
    quantised: dict[str, QuantisedTensor],
) -> None:
    expected = {name: array.tensor_shape for array in arrays for name in array.names}
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors of the model in config.json: {missing[:5]}"
        )
    for name, shape in expected.items():
        tensor = quantised.get(name, tensors[name])
        if tensor.shape != shape:
            raise ValueError(
                f"{name} in {folder} has shape {tensor.shape}; config.json says {shape}"
            )
        if name not in quantised and tensors[name].dtype.itemsize == 1:
            raise NotImplementedError(
                f"{name} in {folder} has dtype {tensors[name].dtype}; expected a float dtype"
            )
    # Old versions of transformers stored the rotary frequencies, which follow from the config.
    # Static scales of activations are not used: activations are quantised with their own scales.
    ignored = (".rotary_emb.inv_freq", ".input_scale", ".input_scale_ub")
    surplus = {name for name in tensors if not name.endswith(ignored)} - set(expected)
    surplus -= set().union(*(one.names for one in quantised.values()))
    if config.tie_word_embeddings and TIED[0] in surplus:
        if not tensors_equal(tensors[TIED[0]], tensors[TIED[1]]):
            raise ValueError(
                f"{folder} has an {TIED[0]} that differs from {TIED[1]}, but config.json ties "
                "them: set tie_word_embeddings to false in config.json to use both"
            )
        surplus.discard(TIED[0])
    if surplus:
        raise ValueError(
            f"{folder} has {len(surplus)} tensors that are not part of the model in config.json: "
            f"{sorted(surplus)[:5]}"
        )


def _copy_other_files(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        is_weights = ".safetensors" in file.name or file.name.endswith(
            (".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
        )
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copy2(file, folder)
    if (templates := source / EXTRA_TEMPLATES).is_dir():
        shutil.copytree(templates, folder / EXTRA_TEMPLATES)
