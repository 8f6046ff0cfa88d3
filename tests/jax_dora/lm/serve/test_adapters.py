"""The folder of adapters: what comes, changes, goes, is damaged or leads elsewhere."""

import os
import threading
from pathlib import Path

import pytest

from dora_common.peft import writing
from dora_common.peft.config import AdapterConfig
from jax_dora.bank import AdapterBank, AdapterStore
from jax_dora.lm.serve.adapters import Adapters, UnreadableError
from jax_dora.lm.serve.metrics import Metrics


def write(folder: Path, text: str = "1") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(text)


class Text(str):
    """An adapter, which is the text of its file and has a byte for each letter."""

    nbytes = property(len)


def overwrite(folder: Path, text: str) -> None:
    """What `save_adapter` does with an adapter of another configuration that exists."""
    config = AdapterConfig(r=int(text) + 1, target_modules=(".*",))
    writing.write(folder, config, lambda file: file.write_text(text), overwrite=True)


def read(folder: Path) -> Text:
    if not (config := folder / "adapter_config.json").is_file():
        raise FileNotFoundError(f"{config} is missing")
    text = Text((folder / "adapter_model.safetensors").read_text())
    if text == "damaged":
        raise ValueError("a tensor\nis missing")
    return text


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "adapters"
    made.mkdir()
    return made


@pytest.fixture
def told():
    return []


class Bank(AdapterBank):
    """A bank that takes any adapter, and no slot of which is used."""

    @property
    def slots(self) -> int:
        return 1

    def __init__(self):
        pass

    def read(self, adapter, **_):
        return adapter


def watch(folder, told, read=read, *, host_bytes=None, **options):
    store = AdapterStore(Bank(), host_bytes=host_bytes)
    options |= {"base_name": "base", "metrics": Metrics(), "tell": told.append}
    return Adapters(folder, store, read, **options)


@pytest.fixture
def adapters(folder, told):
    return watch(folder, told)


def test_they_come_change_and_go(folder, adapters, told):
    write(folder / "one")
    adapters.scan(settle=False)
    first = adapters.get("one")
    assert (first.name, first.host, adapters.names()) == ("one", "1", ["one"])
    write(folder / "one", "22")
    write(folder / "two")
    adapters.scan()
    # Not yet: it may still be being written.
    assert adapters.get("one") is first
    assert adapters.names() == ["one"]
    adapters.scan()
    assert adapters.get("one").host == "22"
    assert adapters.get("two").host == "1"
    # Whoever began with the first has it still.
    assert first.host == "1"
    again = adapters.get("two")
    adapters.scan()
    assert adapters.get("two") is again
    for file in (folder / "two").iterdir():
        file.unlink()
    adapters.scan()
    # Not yet: it may just be replaced.
    assert adapters.get("two") is again
    adapters.scan()
    assert adapters.names() == ["one"]
    assert len(adapters._store._in_memory) == 1
    assert told == [
        "adapter 'one' is served",
        "adapter 'one' is replaced",
        "adapter 'two' is served",
        "adapter 'two' is gone",
    ]


def test_a_damaged_one_is_told_and_the_others_are_served(folder, adapters, told):
    write(folder / "good")
    write(folder / "bad", "damaged")
    (folder / "notes.txt").write_text("no folder")
    (folder / "empty").mkdir()
    adapters.scan(settle=False)
    assert adapters.names() == ["good"]
    assert adapters.damaged() == {"bad": "a tensor is missing"}
    assert told[0] == f"{folder} has folders without an adapter, not served: empty"
    adapters.scan()
    assert told.count("adapter 'bad' is not served: a tensor is missing") == 1
    write(folder / "bad", "mended")
    write(folder / "good", "damaged")
    adapters.scan()
    adapters.scan()
    # What was sound is served on.
    assert adapters.names() == ["bad", "good"]
    assert adapters.get("good").host == "1"
    assert adapters.damaged().keys() == {"good"}
    assert told[-1] == "adapter 'good' is not replaced: a tensor is missing"


def test_one_that_a_single_scan_misses_is_served_on(folder, adapters, told):
    write(folder / "one")
    adapters.scan(settle=False)
    first = adapters.get("one")
    for _ in range(3):
        (folder / "one").rename(folder.parent / "away")
        adapters.scan()
        (folder.parent / "away").rename(folder / "one")
        adapters.scan()
        assert adapters.get("one") is first
    (folder / "one").rename(folder.parent / "away")
    adapters.scan()
    # A scan that finds out nothing counts neither way.
    folder.rename(folder.parent / "other")
    adapters.scan()
    (folder.parent / "other").rename(folder)
    assert adapters.get("one") is first
    adapters.scan()
    assert adapters.get("one") is None
    assert told[-1] == "adapter 'one' is gone"


def test_one_that_is_overwritten_is_never_lost(folder, adapters, told, monkeypatch):
    """Scans see each state between the steps of `save_adapter` where it cannot exchange folders,
    and none of them as damaged."""
    monkeypatch.setattr(writing, "exchange_folders", lambda *_: False)
    write(folder / "one", "0")
    adapters.scan(settle=False)
    replace, seen = Path.replace, []

    def scan_and_replace(source: Path, target: Path) -> None:
        adapters.scan()
        seen.append((adapters.get("one").host, (folder / "one/adapter_config.json").exists()))
        replace(source, target)

    monkeypatch.setattr(Path, "replace", scan_and_replace)
    for at in range(1, 20):
        overwrite(folder / "one", f"{at}")
        adapters.scan()
        assert adapters.get("one").host == f"{at - 1}"
        adapters.scan()
        assert adapters.get("one").host == f"{at}"
    assert seen == [(f"{at // 2}", False) for at in range(38)]
    assert adapters.damaged() == {}
    assert told == ["adapter 'one' is served", *["adapter 'one' is replaced"] * 19]


def test_one_that_another_thread_overwrites_is_never_lost(folder, adapters, told):
    write(folder / "one", "0")
    adapters.scan(settle=False)

    def overwrite_often() -> None:
        for at in range(1, 101):
            overwrite(folder / "one", f"{at}")

    thread = threading.Thread(target=overwrite_often)
    thread.start()
    while thread.is_alive():
        adapters.scan()
        assert adapters.get("one") is not None
    thread.join()
    adapters.scan()
    adapters.scan()
    assert adapters.get("one").host == "100"
    assert adapters.damaged() == {}
    assert "adapter 'one' is gone" not in told


@pytest.mark.parametrize("settle", [False, True])
@pytest.mark.parametrize("tensors", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("inner", ["", "adapter/"])
def test_one_without_a_configuration_is_damaged(folder, adapters, told, settle, tensors, inner):
    (folder / "bad" / inner).mkdir(parents=True)
    (folder / "bad" / inner / tensors).touch()
    adapters.scan(settle=settle)
    # Not yet: its configuration may still be coming.
    assert (adapters.damaged(), told) == ({}, [])
    adapters.scan()
    assert adapters.names() == []
    assert adapters.damaged() == {"bad": f"{inner}adapter_config.json is missing"}
    assert adapters._metrics.damaged._value.get() == 1
    config = folder / "bad" / inner / "adapter_config.json"
    assert told == [f"adapter 'bad' is not served: {config} is missing"]
    write(folder / "bad" / inner)
    adapters.scan()
    adapters.scan()
    assert adapters.names() == ["bad"]
    assert adapters._metrics.damaged._value.get() == 0


def test_one_that_loses_its_configuration_is_served_on(folder, adapters, told):
    write(folder / "one")
    adapters.scan(settle=False)
    first = adapters.get("one")
    (folder / "one" / "adapter_config.json").unlink()
    for damaged in ([], ["one"], ["one"]):
        adapters.scan()
        assert adapters.get("one") is first
        assert list(adapters.damaged()) == damaged
    path = folder / "one" / "adapter_config.json"
    assert told[1:] == [f"adapter 'one' is not replaced: {path} is missing"]


def test_one_that_changes_while_it_is_read_is_not_damaged(folder, told):
    def read_late(one: Path) -> Text:
        if (one / "adapter_model.safetensors").read_text() == "1":
            (one / "adapter_config.json").unlink()
            (one / "adapter_model.safetensors").write_text("22")
        return read(one)

    adapters = watch(folder, told, read_late)
    write(folder / "one")
    adapters.scan(settle=False)
    assert (adapters.names(), adapters.damaged(), told) == ([], {}, [])
    write(folder / "one", "22")
    adapters.scan()
    adapters.scan()
    assert (adapters.names(), adapters.damaged()) == (["one"], {})


def test_clients_are_told_no_paths(folder, told, monkeypatch):
    """They get the file within the adapter's folder, and the log the whole path."""

    def read(one: Path) -> str:
        file = one / "adapter_config.json"
        raise ValueError(f"{file} of {one}, {file.absolute()}, {file.resolve()}")

    monkeypatch.chdir(folder.parent)
    seen = Path("alias  of it")
    seen.symlink_to(folder)
    adapters = watch(seen, told, read)
    write(folder / "bad")
    write(folder / "run" / "adapter")
    adapters.scan(settle=False)
    config = "adapter_config.json"
    assert adapters.damaged() == {
        "bad": f"{config} of bad, {config}, {config}",
        "run": f"adapter/{config} of adapter, adapter/{config}, adapter/{config}",
    }
    assert f"{folder / 'bad' / config}" in told[0]


def test_a_run_s_folder_is_one(folder, adapters):
    write(folder / "run" / "adapter", "inside")
    adapters.scan(settle=False)
    assert adapters.get("run").host == "inside"


@pytest.mark.parametrize("name", ["base", "with space", "-flag", "ä", "x" * 129])
def test_names_that_are_refused(folder, adapters, name):
    write(folder / name)
    adapters.scan(settle=False)
    assert adapters.names() == []
    assert "expected at most 128 letters, digits" in adapters.damaged()[name]


def test_nothing_outside_is_read(folder, adapters, tmp_path):
    write(tmp_path / "elsewhere", "secret")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    write(folder / "file")
    (folder / "file" / "adapter_model.safetensors").unlink()
    (folder / "file" / "adapter_model.safetensors").symlink_to(
        tmp_path / "elsewhere" / "adapter_model.safetensors"
    )
    write(folder / "inside")
    (folder / "alias").symlink_to(folder / "inside")
    adapters.scan(settle=False)
    assert adapters.names() == ["alias", "inside"]
    assert all("links out of" in told for told in adapters.damaged().values())
    assert str(tmp_path) not in str(adapters.damaged())
    for name in ("../elsewhere", "inside/../../elsewhere", "/etc", ".", "..", ""):
        assert adapters.get(name) is None


def test_a_folder_that_cannot_be_read_takes_nothing_away(folder, adapters, told):
    write(folder / "one")
    adapters.scan(settle=False)
    folder.rename(folder.with_name("away"))
    adapters.scan()
    assert adapters.names() == ["one"]
    assert "cannot be read" in told[-1]


def test_one_that_changes_while_it_is_read_is_read_again(folder, told):
    def read_slowly(one: Path) -> Text:
        text = read(one)
        if text == "1":
            write(one, "22")
        return text

    adapters = watch(folder, told, read_slowly)
    write(folder / "one")
    adapters.scan(settle=False)
    assert adapters.names() == []
    adapters.scan()
    adapters.scan()
    assert adapters.get("one").host == "22"


def test_dangling_links_and_pipes_are_no_adapters(folder, adapters):
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "adapter_config.json")
    adapters.scan(settle=False)
    assert (adapters.names(), adapters.damaged()) == ([], {})


@pytest.fixture
def small(folder, told):
    """Three adapters of 3 bytes, with room for two of them, and what was read."""
    for name in ("one", "two", "six"):
        write(folder / name, name)
    reads = []

    def read_and_note(one: Path) -> Text:
        reads.append(one.name)
        return read(one)

    adapters = watch(folder, told, read_and_note, host_bytes=6)
    adapters.scan(settle=False)  # in the order of their names
    assert reads == ["one", "six", "two"]
    reads.clear()
    return adapters, reads


def test_the_least_recently_used_are_read_again(small):
    adapters, reads = small
    assert adapters.names() == ["one", "six", "two"]
    assert adapters.get("six").host == "six"
    assert adapters.get("one").host == "one"  # in place of "two"
    assert adapters.get("six").host == "six"
    assert reads == ["one"]
    assert adapters.get("two").host == "two"  # in place of "one"
    assert adapters.get("six").host == "six"
    assert reads == ["one", "two"]
    assert adapters._metrics.reads._value.get() == 2


def test_what_is_used_stays_in_memory(small):
    """A second request for it gets the same version, which has the same slot."""
    adapters, reads = small
    used = adapters.get("one")
    for name in ("two", "six", "two"):
        adapters.get(name)
    reads.clear()
    assert adapters.get("one") is used
    assert reads == []


def test_one_larger_than_the_limit_is_kept_while_it_is_the_last(small, folder):
    adapters, reads = small
    write(folder / "one", "much longer")
    adapters.scan()
    adapters.scan()
    assert adapters.get("one").host == adapters.get("one").host == "much longer"
    assert reads == ["one"]
    adapters.get("two")
    assert len(adapters._store._in_memory) == 1


def test_what_cannot_be_read_again_is_told(small, folder, told):
    """Until a scan finds another adapter in the folder, or none."""
    adapters, _ = small
    write(folder / "one", "damaged")
    with pytest.raises(UnreadableError, match="'one' has to be read again, and its folder has"):
        adapters.get("one")
    assert told[-1] == "adapter 'one' cannot be read again: a tensor is missing"
    write(folder / "one", "new")
    with pytest.raises(UnreadableError):
        adapters.get("one")
    adapters.scan()
    adapters.scan()
    assert adapters.get("one").host == "new"
    (folder / "six").rename(folder.parent / "six")
    adapters.scan()
    adapters.scan()
    assert adapters.get("six") is None


def test_one_that_is_replaced_while_it_is_read_again(folder, told):
    """Whoever waits for the old version gets the new one."""
    write(folder / "one", "one")
    write(folder / "two", "two")

    def read_and_replace(one: Path) -> Text:
        text = read(one)
        if adapters.names() == ["one", "two"] and text == "one":
            write(folder / "one", "new")
            adapters.scan()
            adapters.scan()
        return text

    adapters = watch(folder, told, read_and_replace, host_bytes=3)
    adapters.scan(settle=False)
    assert adapters.get("one").host == "new"


def test_a_file_that_is_too_large_is_not_read(folder, told):
    adapters = watch(folder, told, file_bytes=1000)
    write(folder / "good", "x" * 1000)
    write(folder / "large", "x" * 1001)
    adapters.scan(settle=False)
    assert adapters.names() == ["good"]
    message = "adapter_model.safetensors has 1,001 bytes; expected at most 1,000, enough for"
    assert adapters.damaged()["large"].startswith(message)
    assert f"adapter 'large' is not served: {folder / 'large'}/{message}" in told[1]
