"""Loads a `SequenceClassifier` from a Hugging Face model folder, and saves one."""

import json
import shutil
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dora_common.disk import hub_hint
from dora_common.replacement import temporary_folder
from jax_dora.lm.encoder.deberta import SequenceClassifier
from jax_dora.lm.encoder.encoder_config import DebertaConfig
from jax_dora.lm.models.config import read_json_object
from jax_dora.lm.models.stored_arrays import LEAVES
from jax_dora.lm.models.tensor_files import stored_tensors, write_files

HEAD = ("pooler", "classifier")
ENCODER = "deberta"
MAX_FILE_BYTES = 2 << 30


class _Stored(NamedTuple):
    """A parameter of the model, the name of its tensor, and the tensor's shape."""

    path: tuple[Any, ...]
    variable: nnx.Variable[Any]
    name: str
    transposed: bool


def load_classifier(
    folder: str | PathLike[str], *, rngs: nnx.Rngs | None = None, **changes: Any
) -> SequenceClassifier:
    """Returns the DeBERTa-v2 or v3 of a Hugging Face folder as a classifier of texts.

    A folder of an encoder alone, such as those that DeBERTa was published in, gets a new head; what
    else it has, such as the head of its pretraining, is not read.

    Args:
      folder: a folder with config.json and the weights, in safetensors or PyTorch's format.
      rngs: for the new head and for dropout; `nnx.Rngs(0)` by default.
      **changes: values for fields of `DebertaConfig`, instead of config.json's: num_labels, dtype,
        param_dtype, rates of dropout.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a tensor is missing, or has another shape than config.json says; or a file is
        damaged.
      NotImplementedError: the folder is of another model.
    """
    folder, rngs = Path(folder), rngs or nnx.Rngs(0)
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; expected a Hugging Face model folder{hub_hint(folder)}"
        )
    config = DebertaConfig.from_hf(read_json_object(file), **changes)
    tensors = stored_tensors(folder)
    model = nnx.eval_shape(lambda: SequenceClassifier(config, rngs=nnx.Rngs(0)))
    model.make_head(rngs)
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    # An encoder's own folder has no name for it.
    prefix = "" if any(name.startswith(f"{ENCODER}.") for name in tensors) else f"{ENCODER}."
    stored = [*_stored(state)]
    names = {one.name: one.name.removeprefix(prefix) for one in stored}
    missing = [name for one in stored if (name := names[one.name]) not in tensors]
    lacking = [name for name in missing if not name.startswith(HEAD)]
    if lacking:
        raise ValueError(
            f"{folder} lacks {len(lacking)} tensors of the model in config.json: {lacking[:5]}"
        )
    for path, variable, name, transposed in stored:
        if (tensor := tensors.get(names[name])) is None:
            continue
        value = tensor.read()
        value = value.T if transposed else value
        if value.shape != variable.shape:
            raise ValueError(
                f"{tensor.name} in {folder} has shape {tensor.shape}; config.json says "
                f"{variable.shape[:: -1 if transposed else 1]}"
            )
        flat[path] = variable.replace(jnp.asarray(value, variable.dtype))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def save_classifier(
    model: SequenceClassifier,
    folder: str | PathLike[str],
    config: dict[str, Any],
    *,
    tokenizer_from: str | PathLike[str] | None = None,
) -> None:
    """Writes a classifier as a Hugging Face folder, which appears once it is complete.

    Args:
      model: a model without adapters; merge them first.
      folder: the folder to create. It must not exist.
      config: the contents of config.json. Its dtype and its number of labels are replaced by the
        model's.
      tokenizer_from: a folder to copy all other files from, such as the tokenizer.

    Raises:
      FileExistsError: `folder` exists.
      ValueError: the model has arrays that the format cannot store, such as adapters.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; expected a new folder")
    stored = [*_stored(nnx.state(model))]

    def read(one: _Stored) -> np.ndarray:
        value = np.asarray(jax.device_get(one.variable.get_value()))
        return value.T if one.transposed else value

    tensors = [(one.name, one.variable.nbytes, lambda one=one: read(one)) for one in stored]
    dtype = jnp.dtype(model.config.param_dtype or model.config.dtype).name
    labels = range(model.config.num_labels)
    config = config | {"architectures": ["DebertaV2ForSequenceClassification"], "dtype": dtype}
    if len(config.get("id2label") or (0, 1)) != len(labels):
        config |= {
            "id2label": {str(n): f"LABEL_{n}" for n in labels},
            "label2id": {f"LABEL_{n}": n for n in labels},
        }
    with temporary_folder(folder) as partial:
        write_files(partial, tensors, MAX_FILE_BYTES)
        for file in Path(tokenizer_from).iterdir() if tokenizer_from else ():
            if file.is_file() and file.suffix not in (".safetensors", ".bin"):
                shutil.copy2(file, partial)
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        partial.rename(folder)


def _stored(state: nnx.State) -> Iterator[_Stored]:
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.RngState):
            continue
        path = (*path[:-1], str(path[-1]))
        if path[-1] not in LEAVES:
            raise ValueError(
                f"the model has {'/'.join(map(str, path))}, which a Hugging Face model folder "
                "cannot store: merge the adapters with jax_dora.merge_dora first"
            )
        leaf, transposed = LEAVES[path[-1]]
        yield _Stored(path, variable, ".".join((*map(str, path[:-1]), leaf)), transposed)
