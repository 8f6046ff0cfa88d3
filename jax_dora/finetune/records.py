"""Records of a data file, each with where it stands: JSON Lines, a JSON list, parquet, a folder
that Hugging Face's datasets wrote."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dora_common.fields import reject_duplicate_fields

FORMS = 'JSON Lines, a JSON list, parquet, or a folder of datasets\' "save_to_disk"'


class Record(NamedTuple):
    where: str  # the file and the line or row, for messages
    fields: dict[str, Any]


def read_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file or folder."""
    count = 0
    for where, record in _read(path):
        if not isinstance(record, dict):
            raise ValueError(f"{where} is a {type(record).__name__}; expected a JSON object")
        yield Record(where, record)
        count += 1
    if not count:
        raise ValueError(f"{path} has no record; expected {FORMS}")


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        return _arrow(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; expected {FORMS}")
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(b"PAR1"):
        return _parquet(path)
    return _json_list(path) if start.startswith(b"[") else _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _parsed(line, where)


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        records = _parsed(text, str(path))
    except ValueError:
        # JSON Lines whose first record is a list say better what is wrong.
        yield from _json_lines(path)
        return
    for number, record in enumerate(records, 1):
        yield f"{path}, record {number}", record


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=reject_duplicate_fields)
    except UnicodeDecodeError as error:
        told = f"{where} is not UTF-8: {error.reason} at byte {error.start}"
        raise ValueError(f"{told}; the data may be {FORMS}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}; the data may be {FORMS}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    parquet = _pyarrow("parquet")
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        yield from _rows(path, batches)
    except (OSError, _pyarrow("lib").ArrowException) as error:
        raise ValueError(f"{path} is no sound parquet: {error}") from error


def _arrow(folder: Path) -> Iterator[tuple[str, Any]]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(one.name for one in folder.iterdir() if one.is_dir())
        raise ValueError(f"{folder} has the splits {', '.join(splits)}; expected one of them")
    state = folder / "state.json"
    if not state.is_file():
        raise ValueError(f"{folder} is a folder without state.json; expected {FORMS}")
    ipc = _pyarrow("ipc")
    try:
        names = [one["filename"] for one in json.loads(state.read_text("utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state} names no data files: {error!r}") from error
    for name in names:
        file = folder / name
        try:
            with file.open("rb") as stream, ipc.open_stream(stream) as batches:
                yield from _rows(file, batches)
        except (OSError, _pyarrow("lib").ArrowException) as error:
            raise ValueError(f"{file} is no sound arrow file: {error}") from error


def _rows(path: Path, batches: Any) -> Iterator[tuple[str, Any]]:
    records = (record for batch in batches for record in batch.to_pylist())
    for number, record in enumerate(records, 1):
        yield f"{path}, row {number}", _without_nulls(record)


def _without_nulls(value: Any) -> Any:
    """Returns what was put into a table, which has every column in every row, and every field of a
    message in every message."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _pyarrow(module: str) -> Any:
    try:
        return __import__(f"pyarrow.{module}", fromlist=[module])
    except ImportError as error:
        raise ImportError("parquet and datasets need: pip install 'jax-dora[data]'") from error
