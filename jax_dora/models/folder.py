"""Hugging Face model folders: config.json and safetensors, to a `CausalLM` and back."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_dora
from dora_common.disk import add_path_to_disk_errors
from jax_dora.adapt.quantize import shard_kernel
from jax_dora.models.config import COMPUTATION, DecoderConfig, read_object
from jax_dora.models.decoder import CausalLM
from jax_dora.models.quantised_folder import (
    as_in_folder,
    compute_by_rows,
    load_quantised,
    quantised_tensors,
)
from jax_dora.models.quantised_weights import QuantisedTensor
from jax_dora.models.sharding import DecoderSharding
from jax_dora.models.targets import Target, equal, fetch, load, nbytes, targets
from jax_dora.models.weights import StoredTensor, stored_tensors, write_files
from jax_dora.ops.quantised import is_quantised
from jax_dora.ops.row_wise import with_contiguous_columns

TIED = "lm_head.weight", "model.embed_tokens.weight"
# A folder of chat templates beside the default one, by their names.
MORE_TEMPLATES = "additional_chat_templates"

# Says where an array goes: called with its path, such as "model/layers/mlp/up_proj/kernel", and its
# shape.
ChooseSharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


def read_config(folder: str | PathLike[str]) -> dict[str, Any]:
    """Returns the contents of config.json; of one that names no dtype with that of the weights,
    their embedding's, as transformers loads them.

    Raises:
      FileNotFoundError, ValueError: it is not there, or no JSON object; or it names no dtype, and
        there are no weights.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: expected a Hugging Face model folder")
    config = read_object(file)
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
    **changes: Any,
) -> CausalLM:
    """Returns the model of a Hugging Face folder.

    Weights that are quantised already, by bitsandbytes to NF4 or to FP8 with scales for a tensor,
    an output feature or a block, are read as they are; others are quantised as they are read if
    asked.

    Every array is made on its devices at once and filled block by block, so that the host holds no
    copy of the weights: on CPU the peak is the model and one block.

    Args:
      folder: config.json with model.safetensors, or several files and their index.
      sharding: of every array, or a function of its path and shape; the default device if not
        given. Each device reads only its part. A `DecoderSharding` shards activations too.
      quantize: "nf4", "int4", "int8" or "float8_e4m3fn", as `jax_dora.quantize` takes it, for the
        projections of the layers: tensor by tensor, on the device.
      act_qtype: "float8_e4m3fn", as `jax_dora.quantize` takes it beside that format, has the
        projections quantise their activations too; also of a folder that is in it already.
      **changes: fields of `DecoderConfig` to set otherwise than config.json: dtype, attention,
        remat, memory, unroll.

    Raises:
      FileNotFoundError, ValueError: a file or a tensor is missing, damaged, of another shape than
        config.json says, or has no place in the model; `act_qtype` does not go with its format.
      NotImplementedError: a model that this decoder does not compute.
    """
    folder = Path(folder)
    abstract, stored, found = _abstract(folder, sharding, quantize, act_qtype, changes)
    config = abstract.config
    graphdef, state = nnx.split(abstract)
    wanted = list(targets(state, config))
    _check(folder, config, wanted, stored, found)

    def read(target: Target, sharding: jax.sharding.Sharding | None) -> Any:
        (name,) = target.names
        if name in found:
            return shard_kernel(found[name].read(), sharding)
        return load(target, [stored[name]], sharding)

    flat = dict(nnx.to_flat_state(state))
    for target in wanted:
        if sharding is None or isinstance(sharding, jax.sharding.Sharding):
            chosen = sharding
        else:
            chosen = sharding("/".join(target.path), target.shape)
        like = flat[target.path].get_value()
        if is_quantised(like):
            value = load_quantised(target, like, read, chosen)
            value = with_contiguous_columns(value) if act_qtype else value
        else:
            value = load(target, [stored[name] for name in target.names], chosen)
        flat[target.path] = flat[target.path].replace(value)
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def abstract_model(
    folder: str | PathLike[str],
    *,
    sharding: jax.sharding.Sharding | ChooseSharding | None = None,
    quantize: str | None = None,
    act_qtype: str | None = None,
    **changes: Any,
) -> CausalLM:
    """Returns the model that `load_model` would return, of shapes alone; arguments and errors as
    its."""
    return _abstract(Path(folder), sharding, quantize, act_qtype, changes)[0]


def _abstract(
    folder: Path,
    sharding: Any,
    quantize: str | None,
    act_qtype: str | None,
    changes: dict[str, Any],
) -> tuple[CausalLM, dict[str, StoredTensor], dict[str, QuantisedTensor]]:
    """Returns the abstract model, the folder's tensors, and its weights that are quantised."""
    contents, stored = read_config(folder), stored_tensors(folder)
    if isinstance(sharding, DecoderSharding):
        changes = {"sharding": sharding} | changes
    config = DecoderConfig.from_hf(contents, **changes)
    model = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))
    wanted = list(targets(nnx.state(model), config))
    names = [name for target in wanted for name in target.names]
    found = quantised_tensors(names, stored, contents)
    if found and quantize is not None:
        raise ValueError(
            f"quantize is {quantize!r} and {folder} is quantised already, {next(iter(found))} for "
            "one; expected None: it is read as it is"
        )
    if quantize is not None:
        make = functools.partial(jax_dora.quantize, qtype=quantize, act_qtype=act_qtype)
        model = nnx.eval_shape(lambda: make(CausalLM(config, rngs=nnx.Rngs(0))))
    as_in_folder(model, wanted, found)
    if quantize is None and act_qtype is not None:
        compute_by_rows(model, act_qtype)
    return model, stored, found


def save_model(
    model: CausalLM,
    folder: str | PathLike[str],
    config: dict[str, Any],
    *,
    tokenizer_from: str | PathLike[str] | None = None,
    max_file_bytes: int = 2 << 30,
) -> None:
    """Writes the model as a Hugging Face folder, which appears only once it is complete.

    Of a model whose arrays lie with several processes, all of them call this, and the first writes.

    Args:
      model: without adapters: merge them first. Quantised kernels are written as floats.
      folder: must not exist, or be empty.
      config: contents of config.json, as `read_config` gives them; its dtype is set to the model's.
      tokenizer_from: a folder whose other files (tokenizer, generation settings, chat template) are
        copied.
      max_file_bytes: a file holds more only if a single tensor does. The host holds one file's
        tensors at a time.

    Raises:
      FileExistsError: `folder` has something in it.
      ValueError: the model has arrays that the format has no place for, such as adapters, or is
        not the one that `config` describes.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; expected a new or an empty folder")
    dtype = jnp.dtype(model.config.dtype)
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
            nbytes(target),
            functools.partial(fetch, arrays[target.path].get_value(), target, layer),
        )
        for target in targets(state, model.config)
        for layer, name in enumerate(target.names)
    ]
    leaves = jax.tree.leaves(state)
    if jax.process_index() and not all(array.is_fully_addressable for array in leaves):
        for _, _, value in tensors:
            value()
        return

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with add_path_to_disk_errors(folder):
            write_files(partial, tensors, max_file_bytes)
        if tokenizer_from is not None:
            _copy_other_files(Path(tokenizer_from), partial)
        named = config.keys() & {"dtype", "torch_dtype"} or {"dtype"}
        config = {name: value for name, value in config.items() if name != "quantization_config"}
        text = json.dumps(config | dict.fromkeys(named, dtype.name), indent=2, sort_keys=True)
        config_file = partial / "config.json"
        config_file.write_text(text + "\n")
        # Temporary folders and safetensors files are private to their owner; a model need not be.
        for file in filter(Path.is_file, partial.iterdir()):
            shutil.copymode(config_file, file)
        partial.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check(
    folder: Path,
    config: DecoderConfig,
    targets: list[Target],
    stored: dict[str, StoredTensor],
    quantised: dict[str, QuantisedTensor],
) -> None:
    expected = {name: target.tensor_shape() for target in targets for name in target.names}
    missing = sorted(set(expected) - set(stored))
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of the model: {missing[:5]}")
    for name, shape in expected.items():
        found = quantised.get(name, stored[name])
        if found.shape != shape:
            raise ValueError(
                f"{name} in {folder} has shape {found.shape}; config.json says {shape}"
            )
        if name not in quantised and stored[name].dtype.itemsize == 1:
            raise NotImplementedError(
                f"{name} in {folder} has dtype {stored[name].dtype}; expected a float dtype"
            )
    # Computed from the config, and stored by old versions only.
    # Scales of activations are for products in FP8, of which there are none here.
    known = (".rotary_emb.inv_freq", ".input_scale", ".input_scale_ub")
    surplus = {name for name in stored if not name.endswith(known)} - set(expected)
    surplus -= set().union(*(one.names for one in quantised.values()))
    if config.tie_word_embeddings and TIED[0] in surplus:
        if not equal(stored[TIED[0]], stored[TIED[1]]):
            raise ValueError(
                f"{folder} has an {TIED[0]} that differs from {TIED[1]}, though config.json ties "
                "them: set tie_word_embeddings to false in it to use both"
            )
        surplus.discard(TIED[0])
    if surplus:
        raise ValueError(
            f"{folder} has {len(surplus)} tensors that the model of its config.json has no place "
            f"for: {sorted(surplus)[:5]}"
        )


def _copy_other_files(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        weights = ".safetensors" in file.name or file.suffix in (".bin", ".pt", ".pth", ".gguf")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copy2(file, folder)
    if (templates := source / MORE_TEMPLATES).is_dir():
        shutil.copytree(templates, folder / MORE_TEMPLATES)
