"""Lists the collectives of a compiled program."""

import math
import re
from typing import NamedTuple

_INSTRUCTION = re.compile(
    r"= (?P<types>\(.*?\)|\S+) (?P<kind>all-gather|all-reduce|all-to-all|collective-permute|"
    r"reduce-scatter|collective-broadcast)(?:-start)?\("
)
_TYPE = re.compile(r"\b(?P<name>pred|bf16|f8\w+|[fsuc](?P<bits>\d+))\[(?P<shape>[\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2}
# The groups of devices: a list of them, their shape, or the axes of a mesh that they go over.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\]|"
    r"mesh\[(?P<mesh>.*?)\] \{(?P<axes>.*?)\})"
)


class Collective(NamedTuple):
    """One collective of a program: its kind, and the types and bytes of its results; for a
    reduce-scatter, the bytes of its operands."""

    kind: str
    types: tuple[str, ...]
    bytes: int


def collectives(program: str) -> list[Collective]:
    """Returns the collectives of a compiled program, `compiled.as_text()`.

    Raises ValueError for a reduce-scatter that names no groups of devices.
    """
    found = []
    for line in program.splitlines():
        match = _INSTRUCTION.search(line)
        if not match:
            continue
        kind = match["kind"]
        types = [(one.group(0), _size(one)) for one in _TYPE.finditer(match["types"])]
        if f"{kind}-start(" in line:  # Its type lists the operands before the results.
            if match["types"].startswith("(("):
                types = types[len(types) // 2 :]
            elif kind in ("all-gather", "collective-permute"):
                types = [types[1]]
        size = sum(size for _, size in types) * (_devices(line) if kind == "reduce-scatter" else 1)
        found.append(Collective(kind, tuple(name for name, _ in types), size))
    return found


def _devices(line: str) -> int:
    """Returns the number of devices that an instruction goes over."""
    match = _GROUPS.search(line)
    if match is None:
        raise ValueError(f"needs replica_groups of one or more devices; got {line.strip()!r}")
    if match["mesh"]:
        sizes = dict(axis.split("=") for axis in match["mesh"].split(","))
        return math.prod(int(sizes[axis]) for axis in match["axes"].split(","))
    return int(match["size"] or match["first"].count(",") + 1)


def _size(match: re.Match[str]) -> int:
    name = match["name"]
    width = _BYTES.get(name) or (1 if name.startswith("f8") else int(match["bits"]) // 8)
    shape = [int(size) for size in match["shape"].split(",") if size]
    return width * math.prod(shape)
