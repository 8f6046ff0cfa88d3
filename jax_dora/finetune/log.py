"""metrics.jsonl: a line a step."""

import json
from pathlib import Path
from typing import Any, Self


class Log:
    """The metrics of a run, as far as its steps are done."""

    def __init__(self, file: Path, done: int) -> None:
        """
        Args:
          done: steps; what the file says of later ones, or has begun to say, is cut off.
        """
        self.lines: list[dict[str, Any]] = []
        self._stream = file.open("a+b")
        self._stream.seek(0)
        end = 0
        for raw in self._stream:
            line = _parsed(raw)
            if line is None or line["step"] > done:
                break
            self.lines.append(line)
            end += len(raw)
        self._stream.truncate(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def add(self, line: dict[str, Any]) -> None:
        """Writes a line."""
        self.lines.append(line)
        self._stream.write(json.dumps(line).encode() + b"\n")
        self._stream.flush()


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
        return line if raw.endswith(b"\n") and isinstance(line["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None
