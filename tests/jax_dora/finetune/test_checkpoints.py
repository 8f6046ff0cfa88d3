"""A checkpoint counts once it is whole, and never when its bytes have changed."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.finetune import checkpoints as module
from jax_dora.finetune.checkpoints import SUMS, Checkpoints


def arrays(step):
    return {"a": jnp.full((3, 5), step, jnp.float32), "b": jnp.arange(4) + step}


@pytest.fixture
def folder(tmp_path):
    with Checkpoints(tmp_path / "run", keep=2) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, arrays(step), {"step": step})
    return tmp_path / "run"


def test_round_trip(folder):
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [4, 6]
        assert [checkpoints.damage(step) for step in (4, 6)] == [None, None]
        assert checkpoints.facts(6) == {"step": 6}
        restored = checkpoints.restore(6, arrays(0))
    for name, array in arrays(6).items():
        np.testing.assert_array_equal(restored[name], array)
        # Committed arrays would compile the step again.
        assert not restored[name].committed


def test_sums_are_those_of_sha256sum(folder):
    lines = (folder / "6" / SUMS).read_text().splitlines()
    assert all(len(line.partition("  ")[0]) == 64 for line in lines)
    named = {line.partition("  ")[2] for line in lines}
    there = {str(f.relative_to(folder / "6")) for f in (folder / "6").rglob("*") if f.is_file()}
    assert named == there - {SUMS}


def every_file(folder):
    return sorted(file for file in (folder / "6").rglob("*") if file.is_file())


def flip(file):
    raw = bytearray(file.read_bytes()) or bytearray(1)
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def cut(file):
    file.write_bytes(file.read_bytes()[:-2] or b"x")


def remove(file):
    file.unlink()


def add(file):
    file.with_name("more").write_bytes(b"")


@pytest.mark.parametrize("change", [flip, cut, remove, add])
def test_no_file_changes_unseen(folder, change):
    with Checkpoints(folder) as checkpoints:
        for file in every_file(folder):
            before = file.read_bytes()
            change(file)
            damage = checkpoints.damage(6)
            assert damage is not None, file
            assert str(folder / "6") in damage
            file.write_bytes(before)
            file.with_name("more").unlink(missing_ok=True)
        assert checkpoints.damage(6) is None


def test_killed_before_the_sums(folder, monkeypatch):
    """The one before is still there, also where only one is to be kept."""

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_sums", stop)
    with Checkpoints(folder, keep=1) as checkpoints, pytest.raises(KeyboardInterrupt):
        checkpoints.save(8, arrays(8), {})
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [4, 6, 8]
        assert "unfinished" in checkpoints.damage(8)
        assert not checkpoints.is_finished(8)
        assert checkpoints.damage(6) is None


def test_full_disk(folder, monkeypatch, caplog):
    """What could be written of it goes, so that there is room again."""

    def full(file):
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(module, "_write_sums", full)
    with (
        Checkpoints(folder) as checkpoints,
        pytest.raises(OSError, match=r"No space left on device.*run/8"),
    ):
        checkpoints.save(8, arrays(8), {})
    assert sorted(one.name for one in folder.iterdir()) == ["4", "6"]
    assert not caplog.records
    assert logging.root.manager.disable == logging.NOTSET


def test_a_step_is_saved_anew_and_later_ones_go(folder):
    flip(every_file(folder)[0])
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(5, arrays(5), {"step": 5})
        assert checkpoints.steps() == [4, 5]
        checkpoints.save(5, arrays(7), {"step": 7})
        assert checkpoints.facts(5) == {"step": 7}
        assert json.loads(json.dumps(checkpoints.facts(4))) == {"step": 4}


def test_what_killed_writers_left_is_removed(folder):
    (folder / "8.orbax-checkpoint-tmp-123").mkdir()
    (folder / f"8.{SUMS}").write_text("")
    with Checkpoints(folder) as checkpoints:
        assert sorted(one.name for one in folder.iterdir()) == ["4", "6"]
        assert checkpoints.steps() == [4, 6]
