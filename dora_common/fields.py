"""Fields of JSON objects."""

from typing import Any


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these fields, as the ``object_pairs_hook`` of ``json.loads``, which
    would take the last of several.

    Raises:
      ValueError: a field is given twice.
    """
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)} given twice; expected every field once")
    return dict(pairs)
