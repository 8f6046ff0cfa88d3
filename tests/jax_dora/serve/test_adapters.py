"""The folder of adapters: what comes, changes, goes, is damaged or leads elsewhere."""

import os
from pathlib import Path

import pytest

from jax_dora.serve.adapters import Adapters
from jax_dora.serve.metrics import Metrics


def write(folder: Path, text: str = "1") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(text)


def read(folder: Path) -> str:
    text = (folder / "adapter_model.safetensors").read_text()
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


@pytest.fixture
def adapters(folder, told):
    return Adapters(folder, read, base_name="base", metrics=Metrics(), tell=told.append)


def test_they_come_change_and_go(folder, adapters, told):
    write(folder / "one")
    adapters.scan(settle=False)
    first = adapters.get("one")
    assert (first.name, first.value, adapters.names()) == ("one", "1", ["one"])
    write(folder / "one", "22")
    write(folder / "two")
    adapters.scan()
    # Not yet: it may still be being written.
    assert adapters.get("one") is first
    assert adapters.names() == ["one"]
    adapters.scan()
    assert adapters.get("one").value == "22"
    assert adapters.get("two").value == "1"
    # Whoever began with the first has it still.
    assert first.value == "1"
    again = adapters.get("two")
    adapters.scan()
    assert adapters.get("two") is again
    for file in (folder / "two").iterdir():
        file.unlink()
    adapters.scan()
    assert adapters.names() == ["one"]
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
    assert adapters.get("good").value == "1"
    assert adapters.damaged().keys() == {"good"}
    assert told[-1] == "adapter 'good' is not replaced: a tensor is missing"


def test_clients_are_told_no_paths(folder, told, monkeypatch):
    """They get the file within the adapter's folder, and the log the whole path."""

    def read(one: Path) -> str:
        file = one / "adapter_config.json"
        raise ValueError(f"{file} of {one}, {file.absolute()}, {file.resolve()}")

    monkeypatch.chdir(folder.parent)
    seen = Path("alias  of it")
    seen.symlink_to(folder)
    adapters = Adapters(seen, read, base_name="base", metrics=Metrics(), tell=told.append)
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
    assert adapters.get("run").value == "inside"


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
    def read_slowly(one: Path) -> str:
        text = read(one)
        if text == "1":
            write(one, "22")
        return text

    adapters = Adapters(folder, read_slowly, base_name="base", metrics=Metrics(), tell=told.append)
    write(folder / "one")
    adapters.scan(settle=False)
    assert adapters.names() == []
    adapters.scan()
    adapters.scan()
    assert adapters.get("one").value == "22"


def test_dangling_links_and_pipes_are_no_adapters(folder, adapters):
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "adapter_config.json")
    adapters.scan(settle=False)
    assert (adapters.names(), adapters.damaged()) == ([], {})
