"""A checkpoint counts once it is whole, and never when its bytes have changed."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.lm.finetune import checkpoints as module
from jax_dora.lm.finetune.checkpoints import SUMS, Checkpoints
from tests.jax_dora.lm.finetune.faults import limit_files


def arrays(step):
    return {"a": jnp.full((3, 5), step, jnp.bfloat16), "b": [jnp.arange(4) + step]}


@pytest.fixture
def checkpoints(tmp_path):
    one = Checkpoints(tmp_path / "run", keep=2)
    for step in (2, 4, 6):
        one.save(step, arrays(step), {"step": step})
    return one


def test_round_trip(checkpoints):
    assert checkpoints.steps() == [4, 6]
    assert [checkpoints.damage(step) for step in (4, 6)] == [None, None]
    assert checkpoints.facts(6) == {"step": 6}
    [device] = jax.devices()[:1]
    like = {"a": jax.device_put(arrays(0)["a"], device), "b": arrays(0)["b"]}
    restored = checkpoints.restore(6, like)
    for found, expected in zip(*map(jax.tree.leaves, (restored, arrays(6))), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    # A step would be compiled again for arrays that are committed where they were not.
    assert [one.committed for one in jax.tree.leaves(restored)] == [True, False]


def test_sums_are_those_of_sha256sum(checkpoints):
    folder = checkpoints.folder / "6"
    for line in (folder / SUMS).read_text().splitlines():
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert sorted(one.name for one in folder.iterdir()) == sorted(
        [SUMS, "arrays.safetensors", "facts.json"]
    )


def flip(file):
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def cut(file):
    file.write_bytes(file.read_bytes()[:-2])


def remove(file):
    file.unlink()


@pytest.mark.parametrize("change", [flip, cut, remove])
def test_no_file_changes_unseen(checkpoints, change):
    for file in sorted((checkpoints.folder / "6").iterdir()):
        before = file.read_bytes()
        change(file)
        damage = checkpoints.damage(6)
        assert damage is not None, file
        assert str(checkpoints.folder / "6") in damage
        file.write_bytes(before)
    assert checkpoints.damage(6) is None


def test_killed_before_the_sums(checkpoints, monkeypatch):
    """The one before is still there, also where only one is to be kept; what is left goes."""
    with monkeypatch.context() as patch:

        def stop(_):
            raise KeyboardInterrupt

        patch.setattr(module, "_sums", stop)
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)
        checkpoints.keep = 1
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(8, arrays(8), {})
    assert checkpoints.steps() == [4, 6]
    assert [one.name for one in checkpoints.unfinished()] == [".8.partial"]
    checkpoints.save(8, arrays(8), {})
    assert sorted(one.name for one in checkpoints.folder.iterdir()) == ["8"]


@pytest.mark.parametrize("size", [10, 200])
def test_full_disk(checkpoints, size):
    """What could be written of it goes, so that there is room again."""
    large = {"a": jax.random.normal(jax.random.key(0), (10,))}
    with limit_files(size), pytest.raises(OSError, match=r"(?i)file too large.*run/8"):
        checkpoints.save(8, large, {"long": "x" * 1000})
    assert sorted(one.name for one in checkpoints.folder.iterdir()) == ["4", "6"]
    assert checkpoints.damage(6) is None


def test_a_step_is_saved_anew_and_later_ones_go(checkpoints):
    checkpoints.save(5, arrays(5), {"step": 5})
    assert checkpoints.steps() == [4, 5]
    checkpoints.save(5, arrays(7), {"step": 7})
    assert [checkpoints.facts(step) for step in checkpoints.steps()] == [{"step": 4}, {"step": 7}]
