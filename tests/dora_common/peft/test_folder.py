"""Adapter folders on disk: whole or not at all."""

import multiprocessing
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import CONFIG, TENSORS, opened
from dora_common.peft.writing import write


def adapter(rank: int) -> tuple[AdapterConfig, dict[str, np.ndarray]]:
    tensors = {"base_model.model.a.lora_A.weight": np.full((rank, 3), rank, np.float32)}
    return AdapterConfig(r=rank, lora_alpha=1, target_modules=("a",)), tensors


def save(folder: Path, rank: int, *, overwrite: bool = False) -> None:
    config, tensors = adapter(rank)
    write(folder, config, lambda path: save_file(tensors, path), overwrite=overwrite)


def rank_in(folder: Path) -> int:
    """The rank, which tensors and configuration have to agree about."""
    with opened(folder, "np") as source:
        (key,) = source.tensors
        array = source.read(key)
        assert array.shape == (source.config.r, 3)
        assert (array == source.config.r).all()
        return source.config.r


def test_a_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    save(tmp_path / "a" / "b", 2)

    assert rank_in(tmp_path / "a" / "b") == 2
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == [CONFIG, TENSORS, "b"]
    mask = os.umask(0)
    os.umask(mask)
    for path in (tmp_path / "a" / "b", tmp_path / "a"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~mask


def test_another_adapter_is_replaced_only_when_told(tmp_path: Path) -> None:
    save(tmp_path / "a", 2)
    (tmp_path / "a" / "README.md").write_text("mine")

    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(tmp_path / "a", 3)
    assert rank_in(tmp_path / "a") == 2
    save(tmp_path / "a", 3, overwrite=True)

    assert rank_in(tmp_path / "a") == 3
    assert (tmp_path / "a" / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["a", "adapter_model.bin"])
def test_a_place_that_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    target = tmp_path / "a" if name != "a" else tmp_path / "file"
    (target / name if name != "a" else target).write_text("")

    with pytest.raises(FileExistsError, match=str(target)):
        save(target, 2, overwrite=True)


@pytest.mark.parametrize("there", [False, True])
def test_a_failure_while_writing_leaves_what_was_there(there: bool, tmp_path: Path) -> None:
    if there:
        save(tmp_path / "a", 2)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "a", adapter(3)[0], fail, overwrite=True)

    assert [path.name for path in tmp_path.iterdir()] == ["a"] * there
    assert not there or rank_in(tmp_path / "a") == 2


@pytest.mark.parametrize("replaced", [0, 1])
def test_what_is_killed_while_replacing_is_no_mixture(
    replaced: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 2)
    replace, calls = Path.replace, []

    def killed(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > replaced:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "a", 3, overwrite=True)

    with pytest.raises(FileNotFoundError, match=CONFIG):
        rank_in(tmp_path / "a")


def _write_forever(folder: Path) -> None:
    while True:
        for rank in (1, 2, 3):
            save(folder, rank, overwrite=True)


def test_a_reader_beside_a_writer_sees_one_adapter_or_none(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    writer = multiprocessing.get_context("spawn").Process(
        target=_write_forever, args=(tmp_path / "a",), daemon=True
    )
    writer.start()
    seen = set()
    try:
        while not {1, 2, 3} <= seen:
            try:
                seen.add(rank_in(tmp_path / "a"))
            except (FileNotFoundError, ValueError):
                continue
    finally:
        writer.kill()
        writer.join()
