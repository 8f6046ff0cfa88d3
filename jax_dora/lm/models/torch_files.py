"""Finds the tensors in a file by `torch.save`, without torch, and without running the file's code.

Such a file is an uncompressed zip archive. `data.pkl` in it pickles the tensors' names, dtypes,
shapes and places, and each `data/N` holds the numbers of one storage. Unpickling can call any
function, so only the few that rebuild tensors are known here, and none of them is torch's.
"""

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

REMEDY = "load it with transformers and save it with save_pretrained, as safetensors"
# Names of safetensors' dtypes, by those of torch's storages.
STORAGES = {
    "BFloat16Storage": "BF16",
    "HalfStorage": "F16",
    "FloatStorage": "F32",
    "ByteStorage": "U8",
}


class TorchTensor(NamedTuple):
    """A tensor in a file: the name of its dtype in safetensors, its shape, and its place.

    Attributes:
      storage: the number of its storage, the N in `data/N`.
      start: its first element in the storage.
      strides: the distance of neighbours in the storage along each axis, in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    storage: str
    start: int
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in the storage one after the other."""
        expected = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        axes = zip(self.shape, self.strides, expected, strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in axes)


def torch_tensors(
    file: Path, item_sizes: Mapping[str, int]
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Returns the dtype, by its name in safetensors, the shape and the offset in the file of every
    tensor, by its name.

    Args:
      item_sizes: the sizes of the dtypes in bytes, by their names in safetensors.

    Raises:
      ValueError: the file is damaged, or has anything but tensors by name.
      NotImplementedError: the file is in another format of torch, or a tensor has another dtype or
        is stored in another order.
    """
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            entries = {one.filename.partition("/")[2]: one for one in archive.infolist()}
            if any(one.compress_type != zipfile.ZIP_STORED for one in entries.values()):
                raise ValueError("it is compressed")
            order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
            if order != b"little":
                raise ValueError(f"its byte order is {order!r}")
            with archive.open(entries["data.pkl"]) as pickled:
                found = _Unpickler(pickled).load()
            places = {name: _place(stream, entry.header_offset) for name, entry in entries.items()}
        if not isinstance(found, dict):
            raise ValueError(f"it has a {type(found).__name__} instead of tensors by name")
        tensors = {}
        for name, one in found.items():
            if not isinstance(one, TorchTensor) or not isinstance(name, str):
                raise ValueError(f"{name!r} is a {type(one).__name__} instead of a tensor")
            if not one.is_contiguous:
                raise NotImplementedError(f"{name!r} is stored with strides {one.strides}")
            size, data = item_sizes[one.dtype], f"data/{one.storage}"
            stop = one.start + math.prod(one.shape)
            if min(one.start, *one.shape, 0) < 0 or stop * size > entries[data].file_size:
                raise ValueError(f"{name!r} is larger than its storage")
            tensors[name] = (one.dtype, one.shape, places[data] + one.start * size)
    except NotImplementedError as error:
        raise NotImplementedError(f"{file}: {error}; {REMEDY}") from error
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{file} is not a whole zip archive, as torch.save has written since 1.6: {REMEDY}"
        ) from error
    except OSError:
        raise
    except Exception as error:  # unpickling damaged bytes can raise anything
        message = f"{file} has more or less than a dict of tensors by torch.save: {error}"
        raise ValueError(f"{message}; {REMEDY}") from error
    return tensors


def _place(stream: Any, header: int) -> int:
    """Returns the offset of an entry's bytes, which follow its header, name and extra field."""
    stream.seek(header + 26)
    return header + 30 + sum(int.from_bytes(stream.read(2), "little") for _ in range(2))


class _Unpickler(pickle.Unpickler):
    """Unpickles dicts of `TorchTensor`s and plain values, and nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Returns what stands for a global of the file."""

        # The functions are made anew each time, since a pickle may set attributes of theirs.
        def rebuild(storage: Any, start: Any, shape: Any, strides: Any, *_: Any) -> TorchTensor:
            dtype, key = storage
            numbers = (start, *shape, *strides)
            if type(key) is not str or not all(type(one) is int for one in numbers):
                raise ValueError(f"a tensor has the shape {shape!r} and the strides {strides!r}")
            return TorchTensor(dtype, tuple(shape), key, start, tuple(strides))

        known = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": rebuild,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
        } | {f"torch.{storage}": dtype for storage, dtype in STORAGES.items()}
        if (found := known.get(f"{module}.{name}")) is not None:
            return found
        if module == "torch" and name.endswith("Storage"):
            raise NotImplementedError(f"it has a {name}; expected {', '.join(STORAGES)}")
        raise ValueError(f"it refers to {module}.{name}, which is not run")

    def persistent_load(self, pid: Any, /) -> tuple[str, str]:
        """Returns the dtype and the number of a storage."""
        _, dtype, key, *_ = pid
        if dtype not in STORAGES.values():
            raise ValueError(f"a storage has the dtype {dtype!r}")
        return dtype, key
