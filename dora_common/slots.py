"""Checks that both packages make for a bank: its slots, the ids of a batch, and the base model."""

from collections.abc import Collection, Iterable
from typing import Any

from dora_common.hyperparameters import is_integer
from dora_common.rules import listing


def check_sizes(slots: Any, max_rank: Any) -> None:
    """Raises TypeError or ValueError unless both are integers of at least 1."""
    for name, size in {"slots": slots, "max_rank": max_rank}.items():
        if not is_integer(size):
            raise TypeError(f"{name} is {size!r}; expected an integer of at least 1")
        if int(size) < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")


def check_slot(slot: Any, slots: int) -> None:
    """Raises TypeError or ValueError unless ``slot`` is an integer from 0 to ``slots - 1``."""
    if not is_integer(slot):
        raise TypeError(f"slot is {slot!r}, a {type(slot).__name__}; expected an integer")
    if not 0 <= int(slot) < slots:
        raise ValueError(f"slot is {slot}; expected 0 to {slots - 1}")


def check_plain(adapted: Collection[str], package: str) -> None:
    """Raises ValueError if the base model of a bank has adapted layers."""
    if adapted:
        raise ValueError(
            "model holds an adapter already; expected the plain base model, since the bank holds "
            f"all adapters: {package}.remove_dora removes it. The adapted layers are:"
            f"{listing(adapted)}"
        )


def check_room(rank: int, path: str, max_rank: int) -> None:
    """Raises ValueError if an adapter has a larger rank than the bank has room for."""
    if rank > max_rank:
        raise ValueError(
            f"adapter has rank {rank} for {path!r}; expected at most {max_rank}, the bank's "
            "max_rank: make the bank with a larger one"
        )


def check_ids_array(ids: Any, *, are_integers: bool) -> None:
    """Raises TypeError or ValueError unless ``ids`` is an array of integers with one axis."""
    if not are_integers:
        raise TypeError(
            f"adapter_ids has dtype {ids.dtype}; expected integers, one slot for each row"
        )
    if ids.ndim != 1:
        raise ValueError(
            f"adapter_ids has shape {tuple(ids.shape)}; expected (batch,), one slot for each row"
        )


def check_rows(shape: Any, rows: int, *, has_rows: bool = True) -> None:
    """Raises ValueError unless the first axis of x has size ``rows`` and is a batch axis at all."""
    if not has_rows or shape[0] != rows:
        raise ValueError(
            f"x has shape {tuple(shape)}, and adapter_ids has {rows} rows; expected x of shape "
            "[batch, ..., in] with as many rows as adapter_ids"
        )


def check_ids(ids: Iterable[int], slots: int, empty: Collection[int]) -> None:
    """Raises ValueError unless each of ``ids`` is -1 or a slot that holds an adapter."""
    known = set(ids)
    if wrong := sorted(one for one in known if not -1 <= one < slots):
        raise ValueError(
            f"adapter_ids has {wrong}; expected slots from 0 to {slots - 1}, or -1 for the base "
            "model without an adapter"
        )
    if unfilled := sorted(known.intersection(empty)):
        raise ValueError(
            f"adapter_ids has {unfilled}, whose slots hold no adapter; expected slots that "
            "AdapterBank.load has filled, or -1 for the base model without an adapter"
        )
