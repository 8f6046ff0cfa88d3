"""An adapter's folder on disk, opened lazily."""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from dora_common.hyperparameters import DropoutMode, adapter_scale
from dora_common.peft.config import AdapterConfig
from dora_common.peft.fit import Adapter, Fit, fit
from dora_common.peft.keys import adapter_in, parse
from dora_common.peft.layers import Outline, Shape
from dora_common.rules import listing

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
_LOG = logging.getLogger(__name__)
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def exported(folder: Path) -> Path | None:
    """Returns the adapter's folder that `folder` is, or that a run in it has exported; None where
    there is neither."""
    return next((one for one in (folder, folder / "adapter") if (one / CONFIG).is_file()), None)


@dataclass(frozen=True)
class Folder:
    """An open folder. Nothing but the header of its tensors has been read.

    Attributes:
      path: where the two files are.
      config: adapter_config.json.
      tensors: dtype, as safetensors names it, and shape, by key.
      adapter: the adapter's name, where the keys have one.
    """

    path: Path
    config: AdapterConfig
    tensors: Mapping[str, tuple[str, Shape]]
    adapter: str
    _file: Any

    def fit(self, outline: Outline) -> Fit:
        """Finds the place of every tensor, as `dora_common.peft.fit.fit` does; a message begins
        with the folder's path."""
        with named_in_errors(self.path):
            return fit(self.config, self.tensors, outline, adapter=self.adapter)

    def fit_to_bank(self, outline: Outline) -> Fit:
        """Does as `fit`; raises NotImplementedError for more than adapters."""
        found = self.fit(outline)
        if whole := [*found.parameters, *found.tokens]:
            raise NotImplementedError(
                f"{self.path} replaces parameters of the base model (modules_to_save, biases or "
                "trainable tokens), which all adapters of a bank share; expected lora_A, lora_B "
                f"and magnitudes alone, and it has:{listing(whole)}"
            )
        return found

    def tell_of_replaced(self, fit: Fit, outline: Outline) -> None:
        """Logs the arguments that `save_adapter` needs to store again what the folder replaces in
        the base model, since the model does not remember it."""
        config, rows = self.config, self.config.trainable_token_indices
        embeddings = sum(layer.kind == "embedding" for layer in outline.layers)
        if not isinstance(rows, Mapping) and embeddings != 1:
            rows = {name.removesuffix(".weight"): its for name, (_, its) in fit.tokens.items()}
        given: dict[str, Any] = {"modules_to_save": config.modules_to_save}
        given["trainable_token_indices"] = rows
        given["bias"] = None if config.bias == "none" else config.bias
        told = ", ".join(f"{name}={value!r}" for name, value in given.items() if value)
        if told and (fit.parameters or fit.tokens):
            _LOG.warning(
                "%s replaces parameters of the base model, which save_adapter stores again only "
                "where it is given %s",
                self.path,
                told,
            )

    def read(self, key: str) -> Any:
        """Returns one tensor, as the framework's array on the host, in the dtype of the file.

        Raises:
          ValueError: it cannot be read, or holds NaN or infinity.
        """
        with named_in_errors(self.path / TENSORS):
            tensor = self._file.get_tensor(key)
            check_finite(key, tensor)
            return tensor

    def read_parameter(self, name: str, keys: Sequence[str]) -> Any:
        """Returns one tensor that has several keys."""
        key, *others = keys
        tensor = self.read(key)
        for other in others:
            same = self.tensors[other] == self.tensors[key]
            if not same or bool((tensor != self.read(other)).any()):
                raise ValueError(f"{self.path}: {key} and {other} differ; expected one {name}")
        return tensor

    def options(self, adapter: Adapter, dropout_mode: DropoutMode | None) -> dict[str, Any]:
        """Returns the hyperparameters of a layer, under the names that a rule has for them."""
        config = self.config
        self.scale(adapter)
        return {
            "rank": adapter.rank,
            "alpha": adapter.alpha,
            "use_rslora": config.use_rslora,
            # An embedding reads no activation that could be dropped.
            "dropout": 0.0 if adapter.layer.kind == "embedding" else config.lora_dropout,
            "dropout_mode": dropout_mode or ("input" if config.use_dora else "adapter"),
        }

    def scale(self, adapter: Adapter) -> float:
        """Returns the scale of a layer; raises where float32 cannot square it."""
        with named_in_errors(self.path / CONFIG):
            return adapter_scale(adapter.rank, adapter.alpha, self.config.use_rslora)

    def dtypes(self, adapter: Adapter) -> set[str]:
        """Returns the dtypes of lora_a and lora_b: "float64", "float32", "float16", "bfloat16"."""
        return {_DTYPES[self.tensors[adapter.keys[name]][0]] for name in ("lora_a", "lora_b")}

    def refuse_rounding(self, key: str, stored: Any, kept: Any) -> None:
        """Refuses a magnitude that the model would keep rounded."""
        if self.tensors[key][0] == "F64" and bool((stored != kept).any()):
            raise ValueError(
                f"{self.path}: {key} is F64, and rounded in a magnitude of {kept.dtype}; pass "
                "adapter_dtype=float32 if it may be"
            )

    def kept[Tensor](self, name: str, tensor: Tensor) -> Tensor:
        """Returns a tensor that was read, as the model keeps it.

        Args:
          name: its key, or its parameter's name.

        Raises:
          ValueError: it is not finite, since its dtype cannot hold the numbers.
        """
        told = f"{self.path}: as {getattr(tensor, 'dtype', None)}, {name}"
        check_finite(told, tensor, "load it into a model, or with an adapter_dtype, of more range")
        return tensor

    def check_norm(self, name: str, norm: Any) -> None:
        """Refuses a layer whose norm with its adapter overflows.

        Args:
          name: of a layer that the folder has an adapter for.
          norm: the layer's.

        Raises:
          ValueError: it is not finite, since the numbers of the adapter are too large to be squared
            or the base weights are not finite.
        """
        told = f"{self.path}: the norm of {name} with its adapter"
        check_finite(told, norm, "an adapter of such numbers has diverged, or the base model")


def check_finite(
    key: str, tensor: Any, reason: str = "where training diverged, take an earlier state"
) -> None:
    """Refuses a tensor with NaN or infinity in it.

    Args:
      key: the tensor's.
      tensor: of NumPy or of PyTorch.
      reason: what may have led to it.
    """
    is_finite = abs(tensor) < math.inf
    if not bool(is_finite.all()):
        count = int((~is_finite).sum())
        raise ValueError(
            f"{key} holds NaN or infinity, in {count} of {math.prod(tensor.shape)} elements; "
            f"expected finite numbers: {reason}"
        )


@contextlib.contextmanager
def opened(
    folder: str | os.PathLike[str], framework: Literal["np", "pt"], adapter: str | None = None
) -> Iterator[Folder]:
    """Opens an adapter folder for reading.

    Args:
      folder: holds adapter_config.json and adapter_model.safetensors.
      framework: what `Folder.read` returns: NumPy's arrays or PyTorch's tensors.
      adapter: the adapter's name: of the subfolder that holds its files, or as the keys have it;
        "default" is also an adapter without a name.

    Raises:
      FileNotFoundError, NotADirectoryError: there is no such folder, or a file is missing from it,
        or no adapter of that name.
      ValueError, TypeError, NotImplementedError: a file is damaged, or asks for what is not
        supported.
    """
    path = _find(Path(folder), adapter)
    with named_in_errors(path / CONFIG):
        version = _version(path / CONFIG)
        config = AdapterConfig.from_json((path / CONFIG).read_text(encoding="utf-8"))
    with named_in_errors(path / TENSORS):
        # Mapped pages would stay in memory beside the arrays that are made of them.
        file = safe_open(path / TENSORS, framework=framework, backend="pread")
    with file:
        with named_in_errors(path):
            # `writing.write` takes the configuration away before it touches the tensors.
            if _version(path / CONFIG) != version:
                raise ValueError("another adapter was written while this one was read; read again")
        with named_in_errors(path / TENSORS):
            slices = {key: file.get_slice(key) for key in file.keys()}
            tensors = {
                key: (one.get_dtype(), tuple(one.get_shape())) for key, one in slices.items()
            }
        if path == Path(folder):
            _check_name(path, adapter, tensors)
        name = adapter or "default"
        if config.target_modules is None:
            found = [parse(key, name) for key in tensors]
            targets = {one.module for one in found if one.role not in (None, "tokens")}
            config = replace(config, target_modules=tuple(sorted(targets)) or None)
        yield Folder(path, config, tensors, name, file)


def _find(folder: Path, adapter: str | None) -> Path:
    if not folder.exists():
        raise FileNotFoundError(f"folder is {folder}; expected an adapter folder on this machine")
    if not folder.is_dir():
        raise NotADirectoryError(f"folder is {folder}, a file; expected the folder it lies in")
    path = folder
    if adapter is not None and (folder / adapter / CONFIG).is_file():
        path = folder / adapter
    if not (path / CONFIG).is_file():
        named = _subfolders(folder)
        hint = f"; it has the adapters {', '.join(named)}: pass adapter=" if named else ""
        raise FileNotFoundError(f"{path / CONFIG} is missing{hint}")
    if not (path / TENSORS).is_file():
        hint = (
            f"; {PICKLE} is never read, since unpickling can run any code: load it with PEFT and "
            "save it with safe_serialization=True"
            if (path / PICKLE).exists()
            else ""
        )
        raise FileNotFoundError(f"{path / TENSORS} is missing{hint}")
    return path


def _check_name(path: Path, adapter: str | None, tensors: Mapping[str, Any]) -> None:
    named = {name for key in tensors if (name := adapter_in(key))}
    if adapter in (None, "default", path.name) or adapter in named:
        return
    there = sorted({*_subfolders(path), *(named or {"default"})})
    raise FileNotFoundError(
        f"adapter is {adapter!r}, which {path} does not have; expected one of {', '.join(there)}"
    )


def _subfolders(folder: Path) -> list[str]:
    return sorted(one.parent.name for one in folder.glob(f"*/{CONFIG}"))


@contextlib.contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Puts the path before the message of what goes wrong."""
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
