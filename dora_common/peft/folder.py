"""Opens a PEFT adapter folder. Its tensors are read one by one, when they are needed."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from dora_common.disk import hub_hint
from dora_common.hyperparameters import DropoutMode, adapter_scale
from dora_common.peft import checks, formats
from dora_common.peft.config import AdapterConfig
from dora_common.peft.destinations import Adapter, Destinations, find_destinations
from dora_common.peft.keys import adapter_in, parse
from dora_common.peft.layers import Architecture, Shape
from dora_common.peft.vocabulary import new_vocabulary
from dora_common.rules import listing

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
# Rank and alpha patterns with entries for 30,000 layers fit.
_CONFIG_BYTES = 1 << 22
_LOG = logging.getLogger(__name__)
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def find_adapter_folder(folder: Path) -> Path | None:
    """Returns `folder` if it is an adapter folder, or the adapter folder that a training run in it
    has exported, or None."""
    return next((one for one in (folder, folder / "adapter") if (one / CONFIG).is_file()), None)


@dataclass(frozen=True)
class Folder:
    """An open adapter folder. Only the configuration and the header of the tensors are read.

    Attributes:
      path: the folder with the two files.
      config: the contents of adapter_config.json.
      tensors: dtype, as safetensors names it, and shape of each tensor, by key.
      adapter: the adapter's name, which some keys include.
    """

    path: Path
    config: AdapterConfig
    tensors: Mapping[str, tuple[str, Shape]]
    adapter: str
    _file: Any

    def destinations(self, architecture: Architecture) -> Destinations:
        """Returns where the folder's tensors belong; the errors of `find_destinations` begin with
        the folder's path. A warning names keys of rank_pattern and alpha_pattern that no layer
        uses."""
        with named_in_errors(self.path):
            found = find_destinations(self.config, self.tensors, architecture, adapter=self.adapter)
        for problem in self.config.unused_patterns(found.adapters):
            _LOG.warning("%s: %s", self.path / CONFIG, problem)
        return found

    def new_vocabulary(self, model: Any, architecture: Architecture) -> int | None:
        """Returns the number of tokens to which `model` has to be resized, or None, as
        `vocabulary.new_vocabulary` does, and logs a warning. Raises ValueError if the model cannot
        be resized, or the folder does not store what it takes."""
        with named_in_errors(self.path):
            sizes = new_vocabulary(self.config, self.tensors, architecture, adapter=self.adapter)
            if sizes is None:
                return None
            old, new = sizes
            if not hasattr(model, "resize_token_embeddings"):
                raise ValueError(
                    f"it is of a model with {new} tokens, and this {type(model).__name__} has "
                    f"{old} and no method resize_token_embeddings; expected a model with {new}"
                )
        _LOG.warning(
            "%s is of a model with %d tokens, and so the model's embedding and output head are "
            "resized from %d",
            self.path,
            new,
            old,
        )
        return new

    def bank_destinations(self, architecture: Architecture) -> Destinations:
        """Like `destinations`; raises NotImplementedError if the folder has more than an
        adapter."""
        found = self.destinations(architecture)
        if whole := [*found.parameters, *found.tokens]:
            raise NotImplementedError(
                f"{self.path} replaces parameters of the base model (modules_to_save, biases or "
                "trainable tokens), but all adapters of a bank share the base model; expected only "
                f"lora_A, lora_B and magnitudes. The folder also has:{listing(whole)}"
            )
        return found

    def warn_about_replaced(self, destinations: Destinations, architecture: Architecture) -> None:
        """Logs a warning with the arguments by which `save_adapter` stores the parameters of the
        base model that the folder replaces. Modules that stay tied to one in modules_to_save are
        among them: the loaded model does not record that the folder keeps ties."""
        config, rows = self.config, self.config.trainable_token_indices
        modules = [*(config.modules_to_save or ())]
        if config.keeps_ties:
            replaced = destinations.replaced_rows(architecture)
            tied = [name for names in architecture.tied() for name in names if name in replaced]
            modules += [name.removesuffix(".weight") for name in tied if not config.saves(name)]
        embeddings = sum(layer.kind == "embedding" for layer in architecture.layers)
        if not isinstance(rows, Mapping) and embeddings != 1:
            rows = {
                name.removesuffix(".weight"): at for name, (_, at) in destinations.tokens.items()
            }
        options = {
            "modules_to_save": modules,
            "trainable_token_indices": rows,
            "bias": None if config.bias == "none" else config.bias,
        }
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items() if value)
        if arguments and (destinations.parameters or destinations.tokens):
            _LOG.warning(
                "%s replaces parameters of the base model, which save_adapter stores again only "
                "where it is given %s",
                self.path,
                arguments,
            )

    def read(self, key: str) -> Any:
        """Reads one tensor into a host array of the framework, in the dtype of the file. Raises
        ValueError if that fails, or it contains NaN or infinity."""
        with named_in_errors(self.path / TENSORS):
            tensor = self._file.get_tensor(key)
            check_finite(key, tensor)
            return tensor

    def read_parameter(self, name: str, keys: Sequence[str]) -> Any:
        """Reads a parameter that is stored under some keys. Raises ValueError if their tensors
        differ."""
        key, *others = keys
        tensor = self.read(key)
        for other in others:
            is_alike = self.tensors[other] == self.tensors[key]
            if not is_alike or bool((tensor != self.read(other)).any()):
                raise ValueError(f"{self.path}: {key} and {other} differ; expected one {name}")
        return tensor

    def options(self, adapter: Adapter, dropout_mode: DropoutMode | None) -> dict[str, Any]:
        """Returns the hyperparameters of a layer as keyword arguments for a rule."""
        config = self.config
        self.scale(adapter)
        return {
            "rank": adapter.rank,
            "alpha": adapter.alpha,
            "use_rslora": config.use_rslora,
            # The input of an embedding is tokens, which dropout cannot drop.
            "dropout": 0.0 if adapter.layer.kind == "embedding" else config.lora_dropout,
            "dropout_mode": dropout_mode or ("input" if config.use_dora else "adapter"),
        }

    def scale(self, adapter: Adapter) -> float:
        """Returns the scale of a layer, or raises ValueError if float32 cannot square it."""
        with named_in_errors(self.path / CONFIG):
            return adapter_scale(adapter.rank, adapter.alpha, self.config.use_rslora)

    def dtypes(self, adapter: Adapter) -> set[str]:
        """Returns the dtypes of lora_a and lora_b: "float64", "float32", "float16", "bfloat16"."""
        return {_DTYPES[self.tensors[adapter.keys[name]][0]] for name in ("lora_a", "lora_b")}

    def check_not_rounded(self, key: str, stored: Any, kept: Any) -> None:
        """Raises ValueError if the model stores an F64 magnitude with less precision."""
        if self.tensors[key][0] == "F64" and bool((stored != kept).any()):
            raise ValueError(
                f"{self.path}: {key} is F64, and rounded in a magnitude of {kept.dtype}; pass "
                "adapter_dtype=float32 to allow rounding"
            )

    def checked[Tensor](self, name: str, tensor: Tensor) -> Tensor:
        """Returns the tensor of a key or parameter, cast to the model's dtype. Raises ValueError if
        it is no longer finite."""
        subject = f"{self.path}: as {getattr(tensor, 'dtype', None)}, {name}"
        remedy = "use a model dtype, or an adapter_dtype, with a larger range"
        check_finite(subject, tensor, remedy)
        return tensor

    def check_norm(self, name: str, norm: Any) -> None:
        """Raises ValueError if the norm of an adapted layer is not finite: the squares of the
        adapter's numbers overflow, or the base weights are not finite."""
        subject = f"{self.path}: the norm of {name} with its adapter"
        check_finite(subject, norm, "the training of the adapter, or of the base model, diverged")


def check_finite(
    key: str, tensor: Any, reason: str = "if training diverged, use an earlier checkpoint"
) -> None:
    """Raises ValueError if a NumPy array or PyTorch tensor contains NaN or infinity; `reason` is
    the likely cause, or the remedy."""
    is_finite = abs(tensor) < math.inf
    if not bool(is_finite.all()):
        count = int((~is_finite).sum())
        raise ValueError(
            f"{key} holds NaN or infinity, in {count} of {math.prod(tensor.shape)} elements; "
            f"expected finite numbers: {reason}"
        )


def check_folder(folder: Any) -> None:
    """Raises TypeError or ValueError if `folder` is not a path, or is empty, which would mean the
    current folder."""
    expected = "the path of a folder; '.' is the current one"
    checks.check_type("folder", folder, str | os.PathLike, expected)
    checks.check(bool(os.fspath(folder)), "folder", folder, expected)


def open_tensors(path: Path, framework: Literal["np", "pt"]) -> safe_open:
    """Opens a safetensors file. Raises OSError with the path and the reason if it cannot be
    opened, and SafetensorError if it is damaged."""
    # safe_open reports a file that may not be read as one that does not exist.
    path.open("rb").close()
    # With memory mapping, the pages would stay in memory in addition to the arrays.
    return safe_open(path, framework=framework, backend="pread")


@contextlib.contextmanager
def open_folder(
    folder: str | os.PathLike[str], framework: Literal["np", "pt"], adapter: str | None = None
) -> Iterator[Folder]:
    """Opens an adapter folder for reading, as NumPy arrays or PyTorch tensors.

    `adapter` is the name of the subfolder with its files, or a part of the tensors' keys; "default"
    also means an adapter without a name. Raises FileNotFoundError or NotADirectoryError if the
    folder, one of its files, or the adapter does not exist; ValueError, TypeError or
    NotImplementedError if a file is damaged, or has something that is not supported.
    """
    check_folder(folder)
    checks.check_type("adapter", adapter, str | None, "a name, or None")
    path = _find(Path(folder), adapter)
    with named_in_errors(path / CONFIG):
        version = _version(path / CONFIG)
        config = AdapterConfig.from_json(_read_config(path / CONFIG))
    with named_in_errors(path / TENSORS):
        file = open_tensors(path / TENSORS, framework)
    with file:
        with named_in_errors(path):
            # `writing.write` removes the configuration before it replaces the tensors.
            if _version(path / CONFIG) != version:
                raise ValueError(
                    "another adapter was written while this one was read; load it again"
                )
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


def _read_config(file: Path) -> str:
    """Returns the contents of adapter_config.json. Raises ValueError if it is too large."""
    with file.open("rb") as stream:
        contents = stream.read(_CONFIG_BYTES + 1)
        size = max(len(contents), os.fstat(stream.fileno()).st_size)
    if size > _CONFIG_BYTES:
        raise ValueError(f"it has {size} bytes; expected at most {_CONFIG_BYTES}")
    return contents.decode("utf-8")


def _find(folder: Path, adapter: str | None) -> Path:
    if not folder.exists():
        raise FileNotFoundError(
            f"folder is {folder}; expected an adapter folder on this machine{hub_hint(folder)}"
        )
    if not folder.is_dir():
        raise NotADirectoryError(
            f"folder is {folder}, a file; expected a PEFT folder, which holds {CONFIG} and "
            f"{TENSORS}{formats.hint(folder)}"
        )
    path = folder
    if adapter in _subfolders(folder):
        path = folder / adapter
    if not (path / CONFIG).is_file():
        named = _subfolders(folder)
        hint = f"; it has the adapters {', '.join(named)}: pass adapter=" if named else ""
        if not hint and (path / "config.json").is_file():
            hint = "; the folder is a model's, as its config.json says: pass an adapter's"
        hint = hint or formats.hint(path)
        raise FileNotFoundError(f"{path / CONFIG} is missing{hint}")
    if not (path / TENSORS).is_file():
        hint = (
            f"; {PICKLE} is never read, since unpickling can run any code: load the adapter with "
            "PEFT and save it with safe_serialization=True"
            if (path / PICKLE).exists()
            else formats.hint(path)
        )
        raise FileNotFoundError(f"{path / TENSORS} is missing{hint}")
    return path


def _check_name(path: Path, adapter: str | None, tensors: Mapping[str, Any]) -> None:
    named = {name for key in tensors if (name := adapter_in(key))}
    if adapter in (None, "default", path.name) or adapter in named:
        return
    there = sorted({*_subfolders(path), *(named or {"default"})})
    raise FileNotFoundError(
        f"adapter is {adapter!r}, but {path} has no adapter of that name; expected one of "
        f"{', '.join(there)}"
    )


def _subfolders(folder: Path) -> list[str]:
    return sorted(one.parent.name for one in folder.glob(f"*/{CONFIG}"))


@contextlib.contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Puts the path in front of the message of errors about the folder's contents."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason})") from error
    except (ValueError, TypeError, NotImplementedError) as error:
        raise type(error)(f"{path}: {error}") from error
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a whole safetensors file ({error}{_sizes(path)}); copy or download it "
            "again, or save the adapter again"
        ) from error


def _sizes(file: Path) -> str:
    """Returns a part of an error message: the bytes that a safetensors file has, and those that its
    header tells, if it can be read; else ""."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = 8 + int.from_bytes(stream.read(8), "little")
            fields = json.loads(stream.read(header - 8)) if header <= size else {}
        ends = [one["data_offsets"][1] for name, one in fields.items() if name != "__metadata__"]
        expected = f"; expected {header + max(ends)} by its header" if ends else ""
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return ""
    return f"; it has {size} bytes{expected}"


def _version(file: Path) -> tuple[int, int] | None:
    """Returns a value that changes when the file is replaced, or None if there is no file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
