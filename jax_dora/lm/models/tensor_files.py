"""Reads the weights of a Hugging Face folder block by block, and writes them file by file."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_dora.lm.models.torch_files import torch_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The file, or the index of several files. As in transformers, the first that exists is read.
WEIGHTS = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a safetensors file.

    The tensor is read with plain file operations. With a memory map, its pages would stay resident
    and count as a second copy of the weights.
    """

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        """Returns the whole tensor."""
        flat = replace(self, shape=(1, math.prod(self.shape)))
        ((_, values),) = flat.blocks(slice(0, 1), slice(None), 1)
        return values.reshape(self.shape)

    def blocks(
        self, rows: slice, columns: slice, block_bytes: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yields pairs (index of the first row, block) that cover `rows` and `columns`.

        A block has as many rows as fit into `block_bytes`, before it is cut to `columns`, and at
        least one row. The rows of a vector are its elements.
        """
        row_elements = math.prod(self.shape[1:])
        step = max(1, block_bytes // max(1, row_elements * self.dtype.itemsize))
        with self.file.open("rb") as file:
            for start in range(rows.start, rows.stop, step):
                stop = min(start + step, rows.stop)
                block = np.empty((stop - start, *self.shape[1:]), self.dtype)
                file.seek(self.offset + start * row_elements * self.dtype.itemsize)
                if file.readinto(block.reshape(-1).view(np.uint8).data) != block.nbytes:
                    raise ValueError(f"{self.file} ends inside {self.name}: the file is truncated")
                yield start, block if block.ndim == 1 else block[:, columns]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a folder's files, by name. Reads only the headers.

    The files are in safetensors' format, or PyTorch's (.bin), from which nothing but tensors is
    read.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or the index does not match the files.
      NotImplementedError: a tensor has an unsupported dtype or order.
    """
    name = next((name for name in WEIGHTS if (folder / name).exists()), None)
    if name is None:
        raise FileNotFoundError(f"{folder} has no weights; expected {', '.join(WEIGHTS)}")
    index = folder / name
    if name.endswith(".json"):
        try:
            mapping = json.loads(index.read_text())["weight_map"]
            files = {folder / name for name in mapping.values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not a valid index of files: {error}") from error
    else:
        mapping, files = None, {index}

    tensors: dict[str, StoredTensor] = {}
    for file in sorted(files):
        if not file.is_file() or file.parent != folder:
            raise FileNotFoundError(f"{index} names {file}, which is not a file in {folder}")
        tensors |= _header(file)
    if mapping is not None:
        listed = {name: folder / file for name, file in mapping.items()}
        found = {name: tensor.file for name, tensor in tensors.items()}
        wrong = sorted(name for name in listed | found if listed.get(name) != found.get(name))
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ValueError(
                f"{index} does not match the tensors in its files: {', '.join(wrong[:5])}{more}"
            )
    return tensors


def fingerprint(folder: Path) -> str:
    """Returns a checksum of the names, dtypes, shapes and first bytes of all tensors.

    Two models that were trained differently have different fingerprints. The fingerprint does not
    depend on how tensors are split into files.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(folder).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            digest.update(file.read(min(1024, math.prod(tensor.shape) * tensor.dtype.itemsize)))
    return digest.hexdigest()


def _header(file: Path) -> dict[str, StoredTensor]:
    if file.suffix == ".bin":
        sizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
        return {
            name: StoredTensor(file, name, DTYPES[dtype], shape, offset)
            for name, (dtype, shape, offset) in torch_tensors(file, sizes).items()
        }
    # Opened before safe_open, which reports a file that may not be read as one that does not exist.
    with file.open("rb") as stream:
        try:
            # This checks that the header is valid and that the file has the length in the header.
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is not a valid safetensors file: {error}") from error
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise NotImplementedError(
                f"{name} in {file} has dtype {entry['dtype']}; expected {', '.join(DTYPES)}: "
                "use the model's folder in another format, such as that in 16 bits"
            )
        tensors[name] = StoredTensor(
            file,
            name,
            DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
        )
    return tensors


# A tensor to write: its name, its size in bytes, and a function that returns its values.
type TensorToWrite = tuple[str, int, Callable[[], np.ndarray]]


def write_files(folder: Path, tensors: Sequence[TensorToWrite], max_file_bytes: int) -> None:
    """Writes model.safetensors, or several files with an index.

    The values of one file's tensors are in memory at a time.
    """
    groups = list(_groups(tensors, max_file_bytes))
    names = [SINGLE]
    if len(groups) > 1:
        count = len(groups)
        names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for file, group in zip(names, groups, strict=True):
        values = {name: np.ascontiguousarray(value()) for name, _, value in group}
        save_file(values, folder / file, metadata={"format": "pt"})
    if len(groups) > 1:
        index: dict[str, Any] = {
            "metadata": {"total_size": sum(nbytes for _, nbytes, _ in tensors)},
            "weight_map": {
                name: file for file, group in zip(names, groups, strict=True) for name, *_ in group
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _groups(tensors: Iterable[TensorToWrite], max_bytes: int) -> Iterator[list[TensorToWrite]]:
    """Splits tensors into groups of at most `max_bytes`, or of a single larger tensor."""
    group, size = [], 0
    for tensor in tensors:
        if group and size + tensor[1] > max_bytes:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor[1]
    yield group
