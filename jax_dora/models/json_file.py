"""JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object that a file holds.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: it is no JSON, or no object.
    """
    try:
        value = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}; expected a JSON object")
    return value
