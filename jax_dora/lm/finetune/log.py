"""Writes the metrics of a run to metrics.jsonl, one line per step, and passes them on."""

import contextlib
import json
from collections.abc import Callable, Iterator
from importlib import import_module
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


# Gets the metrics of each step.
Callback = Callable[[Line], None]


class Log:
    """The metrics of a run's finished steps.

    Attributes:
      lines: the lines of metrics.jsonl.
    """

    def __init__(self, folder: Path | None, done: int, *callbacks: Callback) -> None:
        """
        Args:
          folder: the run's folder; None writes nothing.
          done: the number of finished steps. Lines of later steps are removed from the file, and
            also everything from the first damaged line on.
          callbacks: are called with each line that is added.
        """
        self.lines: list[Line] = []
        self._callbacks = callbacks
        self._stream = None
        if folder is None:
            return
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

    def add(self, line: Line) -> None:
        """Writes the metrics of a step."""
        self.lines.append(line)
        if self._stream is not None:
            self._stream.write(json.dumps(line).encode() + b"\n")
            self._stream.flush()
        for callback in self._callbacks:
            callback(line)


@contextlib.contextmanager
def reporting(name: str | None, folder: Path, done: int, settings: Any) -> Iterator[list[Callback]]:
    """Yields a callback that passes metrics to TensorBoard, wandb or trackio, or none.

    Args:
      name: "tensorboard", "wandb" or "trackio", or None. The package is imported only if it is
        named.
      folder: the run's folder, whose name is the name of the run.
      done: the number of finished steps.
      settings: the settings of the run, to show with it.
    """
    if name is None:
        yield []
        return
    package: Any = import_module({"tensorboard": "tensorboardX"}.get(name, name))
    writer: Any = None
    if name == "tensorboard":
        # TensorBoard discards earlier values of the steps from purge_step on.
        writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
    else:
        package.init(project="jax-dora", name=folder.resolve().name, config=settings)

    def report(line: Line) -> None:
        values = {key: value for key, value in line.items() if key != "step"}
        if writer is None:
            package.log(values, step=line["step"])
            return
        for key, value in values.items():
            writer.add_scalar(key, value, line["step"])

    close = package.finish if writer is None else writer.close
    try:
        yield [report]
    finally:
        close()


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
