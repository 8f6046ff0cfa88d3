"""The folders that a run writes to."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dora_common.disk import check_can_create, locked
from jax_dora.lm.finetune import processes


@contextlib.contextmanager
def locked_output(output: Path) -> Iterator[None]:
    """Makes the folder of a run, and locks it against other runs.

    Raises:
      BlockingIOError: another run uses the folder.
    """
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            output.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(output, wait=False))
            except BlockingIOError:
                raise BlockingIOError(
                    f"output={output}: it is in use by another run; wait for it, or choose another "
                    "folder"
                ) from None

        processes.run_on_first(lock)
        yield


def check_output(output: Path, folder: Path) -> None:
    """Raises an error if the run would write into the model's folder."""
    if folder.resolve() in _own_folders(output):
        raise ValueError(
            f"output={output}: expected another folder than model={folder}, which the run would "
            "write into"
        )


def _own_folders(output: Path) -> list[Path]:
    """Returns the folders that a run writes to."""
    names = (".", "adapter", "best", "checkpoints", "tensorboard")
    return [(output / name).resolve() for name in names]


def check_merge(folder: Path, output: Path) -> None:
    """Raises an error if the merged model could not be written to `folder` after training."""
    if folder.exists() or folder.resolve() in _own_folders(output):
        raise FileExistsError(
            f"merge={folder}: expected a new folder; it exists already, or is a folder of the run"
        )
    check_can_create(folder, "merge")
