"""The 32 lanes of a warp as arrays of NumPy, for kernels that permute bytes of registers."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

LANE = np.arange(32)


def _prmt(low: Any, high: Any, choice: Any) -> np.ndarray:
    """Returns the bytes of both words that each four bits of `choice` name."""
    low, high, choice = (
        np.broadcast_to(np.asarray(x, np.uint64), LANE.shape) for x in (low, high, choice)
    )
    both = low & 0xFFFFFFFF | (high << np.uint64(32))
    found = np.zeros(LANE.shape, np.uint64)
    for byte in range(4):
        shift = 8 * (choice >> np.uint64(4 * byte) & np.uint64(7))
        found |= (both >> shift & np.uint64(255)) << np.uint64(8 * byte)
    return found


def run(text: str, *operands: Any) -> np.ndarray:
    """Returns the result of "prmt.b32 $0, $1, $2, choice;", the only instruction here."""
    match = re.fullmatch(r"prmt\.b32 \$0, \$1, \$2, (\$3|0x[0-9A-F]+);", text)
    assert match is not None
    return _prmt(*operands[:2], operands[2] if match[1] == "$3" else int(match[1], 16))


def plant(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[tuple[Any, Any]]:
    """Lets a module compute on arrays of lanes, and returns the (place, words) that it stores."""
    stored: list[tuple[Any, Any]] = []

    def store(place: Any, words: Any) -> None:
        stored.extend((place[i], [word[i] for word in words]) for i in LANE)

    ptx = SimpleNamespace(
        i32=lambda value: value,
        lane=lambda: LANE,
        run=run,
        further=lambda place, offset: place + offset,
        store_words=store,
    )
    arith = SimpleNamespace(
        andi=lambda a, b: a & b,
        addi=lambda a, b: a + b,
        subi=lambda a, b: a - b,
        muli=lambda a, b: a * b,
        shli=lambda a, b: a << b,
        shrui=lambda a, b: a >> b,
        xori=lambda a, b: a ^ b,
        cmpi=lambda _, a, b: a != b,
        select=np.where,
        CmpIPredicate=SimpleNamespace(ne=None),
    )
    utils = SimpleNamespace(memref_ptr=lambda ref: ref)
    monkeypatch.setattr(module, "ptx", ptx)
    monkeypatch.setattr(module, "arith", arith)
    monkeypatch.setattr(module, "mgpu", SimpleNamespace(utils=utils))
    return stored
