"""Ways to damage an adapter folder, for the fuzz tests of every reader."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

# What a value of adapter_config.json is replaced by.
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3, 2.5, 1e300, -0.5, 10**30, float("nan"), float("inf")),
    *("", "all-linear", "none", "all", "lora_only", "LORA", ".*", "(", "[[", "a", "first", "last"),
    *([], [""], ["first"], ["last"], ["first", "last"], [0], [1], [[1]], [None], {}),
    *({"first": 2}, {"first": 5}, {"(": 1}, {"first": -1}, {"": 1}, {"a": "b"}),
)
_OTHERS = ("a_field_of_the_future", "trainable_token_indices", "ensure_weight_tying")
_NAMES = ("first", "last", "lora_A", "lora_B", "weight", "default", "base_layer", "bias", "", "é")
_DTYPES = ("F64", "F32", "F16", "BF16", "I32", "I8", "U8", "BOOL", "F8_E4M3", "X")


def damage(folder: Path, chance: random.Random) -> str:
    """Damage one file of the folder in one way, and say how."""
    ways: tuple[Callable[[Path, random.Random], str], ...] = (
        *(_change_field, _change_field, _change_header, _change_header, _change_header),
        *(
            _add_tensor,
            _flip_header,
            _flip_data,
            _flip_config,
            _cut,
            _lengthen,
            _remove,
            _change_length,
        ),
    )
    return chance.choice(ways)(folder, chance)


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The header of the safetensors file, by hand, and the bytes behind it."""
    raw = (folder / TENSORS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _write(folder: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text + data)


def _change_field(folder: Path, chance: random.Random) -> str:
    fields = json.loads((folder / CONFIG).read_text())
    name = chance.choice([*fields, *_OTHERS])
    if chance.random() < 0.1:
        fields.pop(name, None)
    else:
        fields[name] = chance.choice(_VALUES)
    (folder / CONFIG).write_text(json.dumps(fields))
    return f"{name} = {fields.get(name, 'nothing')!r}"


def _change_header(folder: Path, chance: random.Random) -> str:
    header, data = header_of(folder)
    key = chance.choice([one for one in header if one != "__metadata__"])
    way = chance.choice(["drop", "rename", "swap", "dtype", "shape", "reshape", "offsets", "twice"])
    entry = header[key]
    if way == "drop":
        # Its bytes go too: the file is whole, and a tensor short.
        begin, end = entry["data_offsets"]
        del header[key]
        data = data[:begin] + data[end:]
        for other in header.values():
            if "data_offsets" in other and other["data_offsets"][0] >= end:
                other["data_offsets"] = [at - (end - begin) for at in other["data_offsets"]]
    elif way == "rename":
        part = chance.choice(key.split("."))
        header[key.replace(part, chance.choice(_NAMES), 1)] = header.pop(key)
    elif way == "swap":
        other = chance.choice([one for one in header if one != "__metadata__"])
        header[key], header[other] = header[other], header[key]
    elif way == "dtype":
        entry["dtype"] = chance.choice(_DTYPES)
    elif way == "shape":
        entry["shape"] = [chance.choice([0, 1, 2, 3, 4, 10**18, -1]) for _ in entry["shape"]]
    elif way == "reshape":
        entry["shape"] = chance.choice([entry["shape"][::-1], [1, *entry["shape"]], []])
    elif way == "offsets":
        entry["data_offsets"] = [at + chance.choice([-4, 4, 8]) for at in entry["data_offsets"]]
    else:
        header[key.replace("lora_A", "lora_A.default") + "."] = entry
    _write(folder, header, data)
    return f"{way} of {key}"


def _add_tensor(folder: Path, chance: random.Random) -> str:
    header, data = header_of(folder)
    key = chance.choice([one for one in header if one != "__metadata__"])
    entry = dict(header[key])
    begin, end = entry["data_offsets"]
    entry["data_offsets"] = [len(data), len(data) + end - begin]
    part = chance.choice(key.split("."))
    new = key.replace(part, chance.choice(_NAMES), 1)
    if new in header:
        new = f"{new}.{chance.choice(_NAMES)}"
    _write(folder, header | {new: entry}, data + data[begin:end])
    return f"{new} added"


def _flip(file: Path, at: int, chance: random.Random) -> str:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1 << chance.randrange(8)
    file.write_bytes(bytes(raw))
    return f"a bit at {at} of {file.name}"


def _flip_header(folder: Path, chance: random.Random) -> str:
    header = (folder / TENSORS).stat().st_size - len(header_of(folder)[1])
    return _flip(folder / TENSORS, chance.randrange(header), chance)


def _flip_data(folder: Path, chance: random.Random) -> str:
    size = (folder / TENSORS).stat().st_size
    return _flip(folder / TENSORS, chance.randrange(size - len(header_of(folder)[1]), size), chance)


def _flip_config(folder: Path, chance: random.Random) -> str:
    return _flip(folder / CONFIG, chance.randrange((folder / CONFIG).stat().st_size), chance)


def _cut(folder: Path, chance: random.Random) -> str:
    file = folder / chance.choice([CONFIG, TENSORS])
    raw = file.read_bytes()
    file.write_bytes(raw[: chance.randrange(len(raw))])
    return f"{file.name} cut to {file.stat().st_size}"


def _lengthen(folder: Path, chance: random.Random) -> str:
    file = folder / chance.choice([CONFIG, TENSORS])
    file.write_bytes(file.read_bytes() + bytes(chance.randrange(1, 9)))
    return f"{file.name} lengthened"


def _remove(folder: Path, chance: random.Random) -> str:
    file = folder / chance.choice([CONFIG, TENSORS])
    file.unlink()
    if chance.random() < 0.5:
        file.mkdir()
    return f"no {file.name}"


def _change_length(folder: Path, chance: random.Random) -> str:
    raw = (folder / TENSORS).read_bytes()
    length = chance.choice([0, 1, 2**62, 2**64 - 1, len(raw), chance.randrange(len(raw))])
    (folder / TENSORS).write_bytes(struct.pack("<Q", length) + raw[8:])
    return f"header of {length} bytes"
