"""Reads the records of a data file.

The file can be JSON Lines, a JSON list, CSV or TSV, each of them also compressed by gzip; parquet;
or a folder written by Hugging Face's datasets.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from dora_common.fields import reject_duplicate_fields

FORMS = 'JSON Lines, a JSON list, CSV, parquet, or a folder of datasets\' "save_to_disk"'
# The separators of tables in text, by the end of the file's name.
SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Record(NamedTuple):
    """A record, and its location for error messages."""

    where: str  # the file with the line, row or number
    fields: dict[str, Any]


def read_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file or folder.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, has no record, or has a record that is not an object.
      ImportError: pyarrow is needed but not installed.
    """
    count = 0
    try:
        for where, record in _read(path):
            if not isinstance(record, dict):
                raise ValueError(f"{where} is a {type(record).__name__}; expected a JSON object")
            yield Record(where, record)
            count += 1
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error
    if not count:
        raise ValueError(f"{path} has no records; expected {FORMS}")


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        return _arrow(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected {FORMS}")
    with _open(path) as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    name = path.with_suffix("") if path.suffix == ".gz" else path
    if (separator := SEPARATORS.get(name.suffix)) is not None:
        return _table(path, separator)
    if start.startswith(b"PAR1"):
        return _parquet(path)
    return _json_list(path) if start.startswith(b"[") else _json_lines(path)


def _open(path: Path) -> BinaryIO:
    """Opens a file, and decompresses what gzip has compressed."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if is_compressed else path.open("rb")


def _table(path: Path, separator: str) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a CSV file as objects of strings. Empty cells are left out."""
    csv.field_size_limit(2**31 - 1)  # the default is shorter than some texts
    with io.TextIOWrapper(_open(path), "utf-8-sig", newline="") as lines:
        rows = csv.reader(lines, delimiter=separator, strict=True)
        try:
            names = next(rows, [])
            for cells in filter(None, rows):
                where = f"{path}, line {rows.line_num}"
                if len(cells) != len(names):
                    raise ValueError(
                        f"{where} has {len(cells)} cells; expected the {len(names)} of the header"
                    )
                fields = zip(names, cells, strict=True)
                yield (
                    where,
                    reject_duplicate_fields([(name, cell) for name, cell in fields if cell]),
                )
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is not valid CSV in UTF-8 after line {rows.line_num}: {error}"
            ) from error


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _parse_json(line, where)


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    with _open(path) as file:
        text = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        records = _parse_json(text, str(path))
    except ValueError:
        # Perhaps the file is JSON Lines with a list in its first line. Then the error names a line.
        yield from _json_lines(path)
        return
    for number, record in enumerate(records, 1):
        yield f"{path}, record {number}", record


def _parse_json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=reject_duplicate_fields)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: {error.reason} at byte {error.start}; expected {FORMS}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}; expected {FORMS}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    parquet = _pyarrow("parquet")
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        yield from _rows(path, batches)
    except (OSError, _pyarrow("lib").ArrowException) as error:
        raise ValueError(f"{path} is not a valid parquet file: {error}") from error


def _arrow(folder: Path) -> Iterator[tuple[str, Any]]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise ValueError(f"{folder} has the splits {', '.join(splits)}; expected the folder of one")
    state = folder / "state.json"
    if not state.is_file():
        raise ValueError(f"{folder} is a folder without state.json; expected {FORMS}")
    ipc = _pyarrow("ipc")
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text("utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state} does not list the data files: {error!r}") from error
    for name in names:
        file = folder / name
        try:
            with file.open("rb") as stream, ipc.open_stream(stream) as batches:
                yield from _rows(file, batches)
        except (OSError, _pyarrow("lib").ArrowException) as error:
            raise ValueError(f"{file} is not a valid arrow file: {error}") from error


def _rows(path: Path, batches: Any) -> Iterator[tuple[str, Any]]:
    records = (record for batch in batches for record in batch.to_pylist())
    for number, record in enumerate(records, 1):
        yield f"{path}, row {number}", _without_nulls(record)


def _without_nulls(value: Any) -> Any:
    """Returns a record without null fields, at any depth.

    A table has every column in every row, and every field of a message in every message. The fields
    that a record did not have are null.
    """
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _pyarrow(module: str) -> Any:
    try:
        return __import__(f"pyarrow.{module}", fromlist=[module])
    except ImportError as error:
        raise ImportError(
            "reading parquet and datasets needs pyarrow: pip install 'jax-dora[data]'"
        ) from error
