"""Checks of a bank that both packages make: its slots, the ids of a batch, the model beside it."""

import numbers
from collections.abc import Collection, Iterable
from typing import Any

from dora_common.rules import listing


def check_sizes(slots: Any, max_rank: Any) -> None:
    """Raises TypeError or ValueError unless both are integers of at least 1."""
    for name, size in {"slots": slots, "max_rank": max_rank}.items():
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"{name} is {size!r}; expected an integer of at least 1")
        if int(size) < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")


def check_slot(slot: Any, slots: int) -> None:
    """Raises TypeError or ValueError unless ``slot`` is one of a bank's."""
    if isinstance(slot, bool) or not isinstance(slot, numbers.Integral):
        raise TypeError(f"slot is {slot!r}, a {type(slot).__name__}; expected an integer")
    if not 0 <= int(slot) < slots:
        raise ValueError(f"slot is {slot}; expected 0 to {slots - 1}")


def check_plain(adapted: Collection[str], package: str) -> None:
    """Raises ValueError if layers of the model beside a bank are adapted themselves."""
    if adapted:
        raise ValueError(
            "model holds an adapter already; expected the plain model, beside which a bank holds "
            f"all adapters: {package}.remove_dora takes it out, in:{listing(adapted)}"
        )


def check_room(rank: int, path: str, max_rank: int) -> None:
    """Raises ValueError for an adapter of a larger rank than the bank has room for."""
    if rank > max_rank:
        raise ValueError(
            f"adapter has rank {rank} for {path!r}; expected at most {max_rank}, the bank's "
            "max_rank: make the bank with a larger one"
        )


def check_ids_like(ids: Any, *, are_integers: bool) -> None:
    """Raises TypeError or ValueError unless ``ids``, an array, are integers along one axis."""
    if not are_integers:
        raise TypeError(
            f"adapter_ids has dtype {ids.dtype}; expected integers, a slot for each row"
        )
    if ids.ndim != 1:
        raise ValueError(
            f"adapter_ids has shape {tuple(ids.shape)}; expected (batch,), a slot for each row"
        )


def check_rows(shape: Any, rows: int, *, has_rows: bool = True) -> None:
    """Raises ValueError unless the first axis of x, of this shape, are so many rows."""
    if not has_rows or shape[0] != rows:
        raise ValueError(
            f"x has shape {tuple(shape)}, and adapter_ids has {rows} rows; expected the batch as "
            "x's first axis: [batch, ..., in]"
        )


def check_ids(ids: Iterable[int], slots: int, empty: Collection[int]) -> None:
    """Raises ValueError if one of ``ids`` is neither -1 nor a slot that holds an adapter."""
    known = set(ids)
    if wrong := sorted(one for one in known if not -1 <= one < slots):
        raise ValueError(
            f"adapter_ids has {wrong}; expected slots from 0 to {slots - 1}, or -1 for the base "
            "alone"
        )
    if unfilled := sorted(known.intersection(empty)):
        raise ValueError(
            f"adapter_ids has {unfilled}, whose slots hold no adapter; expected slots that "
            "AdapterBank.load has filled, or -1 for the base alone"
        )
