"""The safetensors files of a Hugging Face folder, read piecewise and written one file at a time."""

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

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file. It is read with plain file calls: pages of a memory map would
    stay resident and count as a second copy of the weights."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def whole(self) -> np.ndarray:
        """Returns all of it."""
        flat = replace(self, shape=(1, math.prod(self.shape)))
        ((_, found),) = flat.blocks(slice(0, 1), slice(None), 1)
        return found.reshape(self.shape)

    def blocks(
        self, rows: slice, columns: slice, block_bytes: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, a block of whole rows cut to `columns`), of at most `block_bytes` if
        one row is; a vector is a matrix of one-element rows."""
        row_elements = math.prod(self.shape[1:])
        step = max(1, block_bytes // (row_elements * self.dtype.itemsize))
        with self.file.open("rb") as file:
            for start in range(rows.start, rows.stop, step):
                stop = min(start + step, rows.stop)
                block = np.empty((stop - start, *self.shape[1:]), self.dtype)
                file.seek(self.offset + start * row_elements * self.dtype.itemsize)
                if file.readinto(block.reshape(-1).view(np.uint8).data) != block.nbytes:
                    raise ValueError(f"{self.file} ends inside {self.name}: it was cut short")
                yield start, block if block.ndim == 1 else block[:, columns]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of the folder's safetensors files, by name; reads only their headers."""
    index = folder / INDEX
    if index.exists():
        try:
            mapping = json.loads(index.read_text())["weight_map"]
            files = {folder / name for name in mapping.values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files: {error}") from error
    elif (folder / SINGLE).exists():
        mapping, files = None, {folder / SINGLE}
    else:
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}")

    tensors: dict[str, StoredTensor] = {}
    for file in sorted(files):
        if not file.is_file() or file.parent != folder:
            raise FileNotFoundError(f"{index} names {file}, which is no file of {folder}")
        tensors |= _header(file)
    if mapping is not None:
        listed = {name: folder / file for name, file in mapping.items()}
        found = {name: tensor.file for name, tensor in tensors.items()}
        wrong = sorted(name for name in listed | found if listed.get(name) != found.get(name))
        if wrong:
            raise ValueError(f"{index} and the files beside it disagree about {_some(wrong)}")
    return tensors


def fingerprint(folder: Path) -> str:
    """Returns a checksum of every tensor's name, dtype, shape and first bytes: folders of models
    that differ by training differ in it, however their files are cut."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(folder).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            digest.update(file.read(min(1024, math.prod(tensor.shape) * tensor.dtype.itemsize)))
    return digest.hexdigest()


def _header(file: Path) -> dict[str, StoredTensor]:
    try:
        # Checks that the header is sound and the file as long as it says.
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is no sound safetensors file: {error}") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise NotImplementedError(
                f"{name} in {file} has dtype {entry['dtype']}; expected {', '.join(DTYPES)}"
            )
        tensors[name] = StoredTensor(
            file,
            name,
            DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
        )
    return tensors


# A tensor to be written: its name, its bytes, and what returns it.
type Written = tuple[str, int, Callable[[], np.ndarray]]


def write_files(folder: Path, tensors: Sequence[Written], max_file_bytes: int) -> None:
    """Writes model.safetensors, or several files and their index, one file's tensors at a time."""
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


def _groups(tensors: Iterable[Written], max_bytes: int) -> Iterator[list[Written]]:
    group, size = [], 0
    for tensor in tensors:
        if group and size + tensor[1] > max_bytes:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor[1]
    yield group


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
