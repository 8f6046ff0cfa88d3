"""Strict parsing of JSON objects."""

from typing import Any


def reject_duplicate_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a JSON object as a dict.

    Pass this function to ``json.loads`` as ``object_pairs_hook``. Without it, ``json.loads`` keeps
    only the last of several fields with the same name.

    Raises:
      ValueError: two fields have the same name.
    """
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)} given twice; expected every field once")
    return dict(pairs)
