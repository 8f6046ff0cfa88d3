"""An adapter's folder on disk: opened lazily, written whole or not at all."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from dora_common.peft.config import AdapterConfig
from dora_common.peft.fit import Fit, Layer, Shape, fit

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"


@dataclass(frozen=True)
class Folder:
    """An open folder. Nothing but the header of its tensors has been read.

    Attributes:
      path: where the two files are.
      config: adapter_config.json.
      tensors: dtype, as safetensors names it, and shape, by key.
    """

    path: Path
    config: AdapterConfig
    tensors: Mapping[str, tuple[str, Shape]]
    _file: Any

    def fit(
        self, layers: list[Layer], parameters: Mapping[str, Shape], *, adapter: str = "default"
    ) -> Fit:
        """As `dora_common.peft.fit.fit`; the message begins with the folder's path."""
        with _telling(self.path):
            return fit(self.config, self.tensors, layers, parameters, adapter=adapter)

    def read(self, key: str) -> Any:
        """One tensor, as the framework's array on the host, in the dtype of the file.

        Raises:
          ValueError: it cannot be read.
        """
        with _telling(self.path / TENSORS):
            return self._file.get_tensor(key)


@contextlib.contextmanager
def opened(
    folder: str | os.PathLike[str], framework: Literal["np", "pt"], adapter: str | None = None
) -> Iterator[Folder]:
    """Open an adapter folder for reading.

    Args:
      folder: holds adapter_config.json and adapter_model.safetensors.
      framework: what `Folder.read` returns: NumPy's arrays or PyTorch's tensors.
      adapter: the adapter's name; its files may lie in a subfolder of that name.

    Raises:
      FileNotFoundError, NotADirectoryError: there is no such folder, or a file is missing from it.
      ValueError, TypeError, NotImplementedError: a file is damaged, or asks for what is not
        supported.
    """
    path = _find(Path(folder), adapter)
    with _telling(path / CONFIG):
        version = _version(path / CONFIG)
        config = AdapterConfig.from_json((path / CONFIG).read_text(encoding="utf-8"))
    with _telling(path / TENSORS):
        # Mapped pages would stay in memory beside the arrays that are made of them.
        file = safe_open(path / TENSORS, framework=framework, backend="pread")
    with file:
        with _telling(path):
            # `write` takes the configuration away before it touches the tensors.
            if _version(path / CONFIG) != version:
                raise ValueError("another adapter was written while this one was read; read again")
        with _telling(path / TENSORS):
            slices = {key: file.get_slice(key) for key in file.keys()}
            tensors = {
                key: (one.get_dtype(), tuple(one.get_shape())) for key, one in slices.items()
            }
        yield Folder(path, config, tensors, file)


def write(
    folder: str | os.PathLike[str],
    config: AdapterConfig,
    write_tensors: Callable[[Path], None],
    *,
    overwrite: bool = False,
) -> None:
    """Write an adapter folder. Whoever reads it meanwhile, or after this was killed, finds the old
    adapter, the new one, or none: never a part of one, nor the tensors of one with the
    configuration of another. Other files in the folder are left alone.

    Args:
      folder: made if it is not there.
      write_tensors: writes the safetensors file at the path it is given.
      overwrite: replace an adapter that is there.

    Raises:
      FileExistsError: there is an adapter, and `overwrite` is False; or a file has that name.
    """
    path = Path(folder)
    check_free(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    new.mkdir()
    try:
        write_tensors(new / TENSORS)
        (new / CONFIG).write_text(config.to_json(), encoding="utf-8")
        for name in (TENSORS, CONFIG):
            _to_disk(new / name)
        if not path.is_dir():
            new.rename(path)
        else:
            # Without its configuration a folder is no adapter: so is this one until both are in.
            (path / CONFIG).unlink(missing_ok=True)
            (new / TENSORS).replace(path / TENSORS)
            (new / CONFIG).replace(path / CONFIG)
        _to_disk(path)
        _to_disk(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def check_free(folder: str | os.PathLike[str], *, overwrite: bool) -> None:
    """
    Raises:
      FileExistsError: `write` would refuse.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"folder is {path}, a file; expected a folder, or none")
    there = [name for name in (CONFIG, TENSORS, _PICKLE) if (path / name).exists()]
    if there and not overwrite:
        raise FileExistsError(
            f"folder {path} holds {', '.join(there)}; expected no adapter there: choose another "
            "folder, or pass overwrite=True"
        )
    if (path / _PICKLE).exists():
        raise FileExistsError(
            f"folder {path} holds {_PICKLE}; expected no other adapter there: choose another folder"
        )


def _find(folder: Path, adapter: str | None) -> Path:
    if not folder.exists():
        raise FileNotFoundError(f"folder is {folder}; expected an adapter folder on this machine")
    if not folder.is_dir():
        raise NotADirectoryError(f"folder is {folder}, a file; expected the folder it lies in")
    path = folder
    if adapter is not None and (folder / adapter / CONFIG).is_file():
        path = folder / adapter
    if not (path / CONFIG).is_file():
        named = sorted(one.parent.name for one in folder.glob(f"*/{CONFIG}"))
        hint = f"; it has the adapters {', '.join(named)}: pass adapter=" if named else ""
        raise FileNotFoundError(f"{path / CONFIG} is missing{hint}")
    if not (path / TENSORS).is_file():
        hint = (
            f"; {_PICKLE} is never read, since unpickling can run any code: load it with PEFT and "
            "save it with safe_serialization=True"
            if (path / _PICKLE).exists()
            else ""
        )
        raise FileNotFoundError(f"{path / TENSORS} is missing{hint}")
    return path


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Put the path before the message of what goes wrong."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason})") from error
    except (ValueError, TypeError, NotImplementedError) as error:
        raise type(error)(f"{path}: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error


def _version(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
