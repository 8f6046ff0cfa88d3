"""Adapter folders on disk: whole or not at all."""

import errno
import json
import multiprocessing
import os
import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dora_common.peft import writing
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import CONFIG, TENSORS, open_folder
from dora_common.peft.layers import Architecture, Layer
from dora_common.peft.writing import write


def adapter(rank: int) -> tuple[AdapterConfig, dict[str, np.ndarray]]:
    tensors = {"base_model.model.a.lora_A.weight": np.full((rank, 3), rank, np.float32)}
    return AdapterConfig(r=rank, lora_alpha=1, target_modules=("a",)), tensors


def save(folder: Path, rank: int, *, overwrite: bool = False) -> None:
    config, tensors = adapter(rank)
    write(folder, config, lambda path: save_file(tensors, path), overwrite=overwrite)


def rank_in(folder: Path) -> int:
    """The rank, which tensors and configuration have to agree about."""
    with open_folder(folder, "np") as source:
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
    for name in (CONFIG, TENSORS):
        assert stat.S_IMODE((tmp_path / "a" / "b" / name).stat().st_mode) == 0o666 & ~mask


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


def test_a_cut_file_is_told_with_its_sizes(tmp_path: Path) -> None:
    save(tmp_path / "a", 2)
    whole = (tmp_path / "a" / TENSORS).read_bytes()
    sizes = f"; it has {len(whole) - 5} bytes; expected {len(whole)} by its header"
    for content, expected in (
        (whole[:-5], sizes),
        (whole[:20], "; it has 20 bytes"),
        (b"version https://git-lfs.github.com/spec/v1", "; it has 42 bytes"),
        (whole[:8] + b"[" * 100_000, ""),
        (b"", "; it has 0 bytes"),
    ):
        (tmp_path / "a" / TENSORS).write_bytes(content)
        with pytest.raises(ValueError, match="not a whole") as caught:
            rank_in(tmp_path / "a")
        assert f"{expected}); copy or download it again" in str(caught.value)


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


def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As elsewhere than on Linux."""
    monkeypatch.setattr(writing, "exchange_folders", lambda *_: False)


@pytest.mark.parametrize("replaced", [0, 1])
def test_what_is_killed_while_replacing_is_no_mixture(
    replaced: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_exchange(monkeypatch)
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


# Kills processes that replace the adapter of rank argv[2] and value 1 by one of rank 3 and value 2,
# each before another of its steps, and prints the values that are left, until one process ends.
KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from dora_common.peft import writing
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import open_folder

folder, old = Path(sys.argv[1]), int(sys.argv[2])
KEY = "base_model.model.a.lora_A.weight"
writing.fsync = lambda _: None  # a kill loses nothing that was written

def save(folder, rank, value):
    tensors = {KEY: np.full((rank, 3), value, np.float32)}
    config = AdapterConfig(r=rank, target_modules=("a",))
    writing.write(folder, config, lambda path: save_file(tensors, path), overwrite=True)

def value_in(folder):
    with open_folder(folder, "np") as source:
        array = source.read(KEY)
        assert array.shape == (source.config.r, 3)
        assert source.config.r == (old if array[0, 0] == 1 else 3)
        return int(array[0, 0])

def write_up_to(limit):
    count = 0
    def hook(event, _):
        nonlocal count
        if event != "os.kill" and event.startswith(("open", "os.", "shutil.", "ctypes.")):
            count += 1
            if count > limit:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(folder, 3, 2)
    os._exit(0)

save(folder, old, 1)
save(folder / "nested", 3, 2)
for limit in range(1000):
    if not (process := os.fork()):
        write_up_to(limit)
    _, status = os.waitpid(process, 0)
    assert status in (0, signal.SIGKILL)
    assert value_in(folder / "nested") == 2
    print(value_in(folder))
    if status == 0:
        break
    save(folder, old, 1)
"""


@pytest.mark.parametrize("rank", [2, 3])
def test_a_writer_that_is_killed_leaves_the_old_adapter_or_the_new(
    rank: int, tmp_path: Path
) -> None:
    """At every step; with another configuration, and with the same."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "a"), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [int(line) for line in done.stdout.splitlines()]
    assert found == sorted(found)
    assert found.count(1) > 1
    assert found.count(2) > 1


def test_a_folder_that_is_exchanged_keeps_what_else_is_in_it(tmp_path: Path) -> None:
    folder, link = tmp_path / "a", tmp_path / "link"
    save(folder, 2)
    (folder / "sub" / "sub").mkdir(parents=True)
    (folder / "sub" / "sub" / "file").write_text("mine")
    (folder / "sub" / "there").symlink_to("sub")
    (folder / "sub").chmod(0o750)
    folder.chmod(0o700)
    link.symlink_to(folder)

    save(link, 3, overwrite=True)

    assert link.is_symlink()
    assert rank_in(folder) == 3
    assert (folder / "sub" / "there" / "file").read_text() == "mine"
    assert (folder / "sub" / "there").is_symlink()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "sub")]
    assert modes == [0o700, 0o750]
    assert sorted(tmp_path.iterdir()) == [folder, link]


def test_the_working_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", 2)
    monkeypatch.chdir(tmp_path / "a")

    save(Path(), 3, overwrite=True)

    assert rank_in(Path()) == 3
    assert Path().samefile(tmp_path / "a")


def test_a_large_configuration_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with (tmp_path / CONFIG).open("r+b") as file:
        file.truncate(1 << 40)  # sparse; reading it would fill the memory

    expected = rf"{CONFIG}: it has {1 << 40} bytes; expected at most {1 << 22}"
    with pytest.raises(ValueError, match=expected):
        rank_in(tmp_path)


def test_a_configuration_that_grows_is_read_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    with (tmp_path / CONFIG).open("ab") as file:
        file.write(b" " * (1 << 22))
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result([0] * 10))

    with pytest.raises(ValueError, match="expected at most"):
        rank_in(tmp_path)


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


def test_two_writers_leave_one_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is held between its two files until the second is done, or waits."""
    no_exchange(monkeypatch)
    save(tmp_path / "a", 1)
    replace, halfway, second = Path.replace, threading.Event(), threading.Event()
    overtaken = []

    def slowly(source: Path, target: Path) -> None:
        replace(source, target)
        if target.name == TENSORS and not halfway.is_set():
            halfway.set()
            overtaken.append(second.wait(timeout=0.5))

    def write_second() -> None:
        halfway.wait()
        save(tmp_path / "a", 3, overwrite=True)
        second.set()

    monkeypatch.setattr(Path, "replace", slowly)
    thread = threading.Thread(target=write_second)
    thread.start()
    save(tmp_path / "a", 2, overwrite=True)
    assert overtaken == [False]
    thread.join()

    assert rank_in(tmp_path / "a") == 3


def _write_often(folder: Path, rank: int) -> None:
    for _ in range(20):
        save(folder, rank, overwrite=True)


def test_processes_that_write_at_once_leave_one_adapter(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(tmp_path / "a", r)) for r in (2, 3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0

    assert rank_in(tmp_path / "a") in (2, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_who_comes_second_finds_the_folder_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(Path, "rename", rename)
        save(tmp_path / "a", 3)
        rename(source, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(tmp_path / "a", 2)
    assert rank_in(tmp_path / "a") == 3


def _write_and_hang(folder: Path, started: Any) -> None:
    def hang(path: Path) -> None:
        path.write_bytes(b"half")
        os.utime(path.parent, (0, 0))
        started.set()
        time.sleep(600)

    write(folder, adapter(2)[0], hang)


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    writer = context.Process(target=_write_and_hang, args=(tmp_path / "a", started), daemon=True)
    writer.start()
    assert started.wait(timeout=60)
    (left,) = tmp_path.iterdir()
    others = [tmp_path / name for name in (".a.mine", f".b.{'0' * 32}")]
    for other in others:
        other.mkdir()
        os.utime(other, (0, 0))
    save(tmp_path / "a", 2)
    assert left.is_dir(), "its writer is alive"
    writer.kill()
    writer.join()

    save(tmp_path / "a", 3, overwrite=True)

    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a", *others])


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_with_the_folder(error: Exception, tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise error

    with pytest.raises(OSError, match="No space left on device") as refusal:
        write(tmp_path / "a", adapter(2)[0], fail)

    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOSPC, str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_not_finite_is_not_read(value: float, dtype: str, tmp_path: Path) -> None:
    config, tensors = adapter(2)
    (key,) = tensors
    array = tensors[key].astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    array[1, 2] = value
    write(tmp_path / "a", config, lambda path: save_file({key: array}, path))

    with (
        open_folder(tmp_path / "a", "np") as source,
        pytest.raises(ValueError, match=rf"{key} holds NaN or infinity, in 1 of 6 elements"),
    ):
        source.read(key)


def named(folder: Path, name: str) -> None:
    config, tensors = adapter(2)
    tensors = {key.replace("lora_A", f"lora_A.{name}"): a for key, a in tensors.items()}
    write(folder, config, lambda path: save_file(tensors, path))


def test_an_adapter_is_found_by_its_name_alone(tmp_path: Path) -> None:
    save(tmp_path / "a", 2)
    save(tmp_path / "a" / "second", 3)
    named(tmp_path / "b", "third")
    for folder, name in (
        ("a", None),
        ("a", "default"),
        ("a", "second"),
        ("a/second", "second"),
        ("b", "third"),
    ):
        with open_folder(tmp_path / folder, "np", name) as source:
            assert source.config.r == (3 if name == "second" else 2)
    for folder, name, there in (
        ("a", "sceond", "default, second"),
        ("b", "second", "third"),
        ("a/second", "third", "default"),
        ("a", "../a", "default, second"),
        ("a", "second/../second", "default, second"),
    ):
        with (
            pytest.raises(FileNotFoundError, match=f"adapter is '{name}'.*one of {there}$"),
            open_folder(tmp_path / folder, "np", name),
        ):
            pass


def test_keys_of_another_adapter_ask_for_its_name(tmp_path: Path) -> None:
    named(tmp_path / "a", "third")
    with (
        open_folder(tmp_path / "a", "np") as source,
        pytest.raises(ValueError, match="of the adapter 'third'; pass adapter='third'"),
    ):
        source.destinations(Architecture([Layer("a", "linear", 3, 3)], {}, {}))


FOREIGN = {
    "MLX's format: merge it with mlx_lm.fuse": (
        "adapters",
        "model.layers.0.self_attn.q_proj.lora_a",
    ),
    "diffusers' format: load it": ("pytorch_lora_weights", "unet.down.0.to_q.lora.down.weight"),
    "diffusers'": ("pytorch_lora_weights", "transformer.blocks.0.to_q.lora_A.weight"),
    "kohya's format": ("lora", "lora_unet_down_blocks_0_attentions_0_to_q.dora_scale"),
    "ComfyUI's format": ("lora", "diffusion_model.blocks.0.q.lora_A.weight"),
    "LyCORIS's format: load it": ("lora", "lycoris_model_layers_0_q_proj.lora_down.weight"),
    "LyCORIS's format with another": ("lora", "lora_unet_down_blocks_0_to_q.hada_w1_a"),
}


@pytest.mark.parametrize("told", FOREIGN)
def test_the_format_of_another_tool_is_named(told: str, tmp_path: Path) -> None:
    name, key = FOREIGN[told]
    file = tmp_path / f"{name}.safetensors"
    save_file({key: np.zeros((2, 2), np.float32)}, file)
    for folder, error in ((file, NotADirectoryError), (tmp_path, FileNotFoundError)):
        with pytest.raises(error, match=told), open_folder(folder, "np"):
            pass


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("adapter.weights.h5", "h5 is in Keras' format: transposed, lora_a is PEFT's"),
        ("model.keras", "keras is in Keras' format"),
        ("adapters.npz", "npz is in NumPy's format; if an old version of mlx-lm"),
        ("_CHECKPOINT_METADATA", "METADATA is in an Orbax checkpoint, such as MaxText's"),
    ],
)
def test_a_file_of_another_kind_is_named(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    for folder, error in ((tmp_path / name, NotADirectoryError), (tmp_path, FileNotFoundError)):
        with pytest.raises(error, match=told), open_folder(folder, "np"):
            pass


def test_mlx_writes_a_configuration_of_the_same_name(tmp_path: Path) -> None:
    parameters = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    fields = {"fine_tune_type": "dora", "num_layers": 16, "lora_parameters": parameters}
    (tmp_path / CONFIG).write_text(json.dumps(fields))
    tensors = {"model.layers.0.self_attn.q_proj.m": np.zeros(2, np.float32)}
    for name, error in (
        ("adapters.safetensors", FileNotFoundError),
        (TENSORS, NotImplementedError),
    ):
        save_file(tensors, tmp_path / name)
        with pytest.raises(error, match=r"MLX's format.*mlx_lm\.fuse"), open_folder(tmp_path, "np"):
            pass


def test_a_file_of_peft_s_is_not_taken_for_another_format(tmp_path: Path) -> None:
    save(tmp_path / "a", 2)
    with pytest.raises(NotADirectoryError, match=rf"holds {CONFIG} and {TENSORS}$"):
        rank_in(tmp_path / "a" / TENSORS)


@pytest.mark.parametrize(
    ("name", "is_hinted"),
    [
        ("owner/adapter-r8", True),
        ("there/adapter", False),
        ("./adapter", False),
        ("adapter", False),
    ],
)
def test_a_name_of_the_hub_gets_the_command_that_downloads(
    name: str, is_hinted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with (
        pytest.raises(FileNotFoundError, match=f"folder is {Path(name)}") as caught,
        open_folder(name, "np"),
    ):
        pass
    hint = f"; nothing is downloaded here: .*hf download {name} --local-dir FOLDER"
    assert bool(re.search(hint, str(caught.value))) == is_hinted
