"""What the reads of a weight say: who reads it, whether an adapter can, and what the head is."""

from typing import Any

from jax_dora.adapt.tree import Found
from jax_dora.weights.reads import Key, Read, Traced


def is_adapted_read(read: Read, axes: str) -> bool:
    """Returns whether the operation has an adapted form along these axes."""
    if read.kind == "other":
        return False
    flat, mine = (one.replace("s", "b") for one in (read.axes, axes))
    swapped = flat.translate(str.maketrans("io", "oi"))
    loose = [
        all(a == b or (a != "b" and b == "b") for a, b in zip(form, mine, strict=True))
        for form in (flat, swapped)
    ]
    return flat == mine if read.kind == "lookup" else any(loose)


def reader_of(
    found: Found, modules: list[Found], reads: tuple[Read, ...]
) -> tuple[Any, tuple[str, ...]] | None:
    """Returns the innermost module that holds a weight and in whose methods all of its reads
    stand, and the path from it to the weight's owner."""
    numbers = {path: place for place, one in enumerate(modules) for path in one.paths}
    inside = frozenset.intersection(*(read.scopes for read in reads))
    for path in found.paths:
        parts = path.split("/") if path else []
        for length in range(len(parts), -1, -1):
            place = numbers.get("/".join(parts[:length]))
            if place is not None and inside.intersection(modules[place].paths):
                return modules[place].module, tuple(parts[length:])
    return None


def heads(traced: Traced | None) -> list[Key]:
    """Returns the weight, if any, whose product makes the result's last axis, of the size of a
    vocabulary that is looked up."""
    if traced is None:
        return []
    products = [
        (read, key)
        for key, reads in traced.reads.items()
        for read in reads
        if read.kind == "product"
    ]
    vocabularies = {
        read.features for reads in traced.reads.values() for read in reads if read.kind == "lookup"
    }
    if not products:
        return []
    last, key = max(products, key=lambda one: one[0].order)
    return [key] if last.features in vocabularies & traced.results else []
