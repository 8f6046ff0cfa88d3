"""Strict parsing of JSON objects."""

from typing import Any


def reject_duplicate_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a JSON object as a dict, as ``object_pairs_hook`` of ``json.loads``,
    which else keeps the last of several fields with one name. Raises ValueError if there are
    several."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)} given twice; expected every field once")
    return dict(pairs)
