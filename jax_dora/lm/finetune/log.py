"""Writes the metrics of a run to metrics.jsonl, one line per step, and to TensorBoard."""

import json
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict, cast


class Line(TypedDict):
    """The metrics of a step. Losses are in nats per token."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float
    eval_loss: NotRequired[float]


class Log:
    """The metrics of a run's finished steps.

    Attributes:
      lines: the lines of metrics.jsonl.
    """

    def __init__(self, folder: Path | None, done: int, *, tensorboard: bool = False) -> None:
        """
        Args:
          folder: the run's folder; None writes nothing.
          done: the number of finished steps. Lines of later steps are removed from the file, and
            also everything from the first damaged line on.
          tensorboard: whether to write TensorBoard files as well.
        """
        self.lines: list[Line] = []
        self._writer: Any = None
        self._stream = None
        if folder is None:
            return
        if tensorboard:
            from tensorboardX import SummaryWriter

            # TensorBoard discards earlier values of the steps from purge_step on.
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
        self._stream = (folder / "metrics.jsonl").open("a+b")
        self._stream.seek(0)
        end = 0
        for raw in self._stream:
            line, last = _parse(raw), self.lines[-1]["step"] if self.lines else 0
            if line is None or not last < line["step"] <= done:
                break
            self.lines.append(line)
            end += len(raw)
        self._stream.truncate(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._writer is not None:
            self._writer.close()

    def add(self, line: Line) -> None:
        """Writes the metrics of a step."""
        self.lines.append(line)
        if self._stream is not None:
            self._stream.write(json.dumps(line).encode() + b"\n")
            self._stream.flush()
        if self._writer is not None:
            for name, value in line.items():
                if name != "step":
                    self._writer.add_scalar(name, value, line["step"])


def _parse(raw: bytes) -> Line | None:
    """Returns a line of metrics.jsonl, or None if it is damaged."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    is_complete = raw.endswith(b"\n") and isinstance(line, dict)
    if not is_complete or line.keys() - Line.__optional_keys__ != Line.__required_keys__:
        return None
    is_valid = all(type(value) in (int, float) for value in line.values())
    return cast(Line, line) if is_valid and isinstance(line["step"], int) else None
