"""Adapters behind slots: who keeps one, who loses it, and what is refused."""

import math
import os
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from jax_dora import AdapterBank, set_adapter, with_bank
from jax_dora.bank import AdapterStore, HostAdapter, SlotsBusy
from jax_dora.peft import save_adapter
from tests.jax_dora.bank.adapters import drawn, merged
from tests.jax_dora.small_models import Block

MODEL = Block(nnx.Rngs(0))
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
X = np.random.default_rng(0).normal(size=(1, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def made():
    """A bank's plan is compiled once for all tests, and nobody uses the arrays themselves."""
    return AdapterBank(MODEL, 2, 4)


@pytest.fixture
def store(made):
    return AdapterStore(type(made).tree_unflatten(made._programs, (made._programs.make(),)))


def adapter(seed):
    return drawn(AdapterBank(MODEL, 1, 4), {"linear": 2, "heads": 1}, seed)


def serves(store, slot, seed):
    y = with_bank(MODEL, store.bank, [slot])(X)
    expected = merged(MODEL, store.bank, adapter(seed))(X)
    return np.allclose(y, expected, **CLOSE)


def test_the_least_recently_used_makes_room(store):
    for seed, name in enumerate("abc"):
        store.add(name, adapter(seed))
    assert store.names == ("a", "b", "c")
    a, b = store.acquire("a"), store.acquire("b")
    assert {a, b} == {0, 1}
    store.release("b")
    store.release("a")
    assert store.acquire("a") == a  # at once: it is still there, and now used after b
    store.release("a")
    assert store.acquire("c") == b
    assert serves(store, b, 2)
    assert serves(store, a, 0)
    assert (store.loads, store.evictions) == (3, 1)
    assert store.slots == {"a": a, "c": b}


def test_what_is_held_stays(store):
    for seed, name in enumerate("abc"):
        store.add(name, adapter(seed))
    first, again, b = store.acquire("a"), store.acquire("a"), store.acquire("b")
    assert first == again
    store.release("a", first)
    with pytest.raises(SlotsBusy, match="all 2 slots"):
        store.acquire("c")
    store.release("a")
    assert store.acquire("c") == first
    assert serves(store, b, 1)
    with pytest.raises(ValueError, match="'a' is released, but nobody"):
        store.release("a")
    with pytest.raises(ValueError, match="'b' in slot 0 is released, but nobody"):
        store.release("b", first)


def test_an_adapter_is_replaced_while_it_is_used(store):
    store.add("a", adapter(0))
    old = store.acquire("a")
    store.add("a", adapter(1))
    new = store.acquire("a")
    assert new != old
    assert serves(store, old, 0)
    assert serves(store, new, 1)
    store.release("a", old)
    with pytest.raises(ValueError, match="slots hold no adapter"):
        with_bank(MODEL, store.bank, [old])
    store.release("a")
    assert store.acquire("a") == new


def test_an_adapter_is_removed_while_it_is_used(store):
    store.add("a", adapter(0))
    slot = store.acquire("a")
    store.remove("a")
    assert "a" not in store
    assert len(store) == 0
    with pytest.raises(KeyError, match="no adapter 'a'"):
        store.acquire("a")
    assert serves(store, slot, 0)
    store.release("a")
    with pytest.raises(ValueError, match="slots hold no adapter"):
        with_bank(MODEL, store.bank, [slot])


def test_what_is_wrong_is_told(store):
    store.add("french", adapter(0))
    with pytest.raises(KeyError, match="no adapter 'fench'; the nearest are french"):
        store.acquire("fench")
    with pytest.raises(ValueError, match="name is ''"):
        store.add("", adapter(0))
    with pytest.raises(FileNotFoundError):
        store.add("french", "no-such-folder")
    with pytest.raises(KeyError, match="no adapter 3"):
        store.acquire(3)
    for host_bytes in (-1, math.nan, 1.5, True, "1"):
        with pytest.raises(ValueError, match=f"host_bytes is {host_bytes!r}; expected a whole"):
            AdapterStore(store.bank, host_bytes=host_bytes)
    with pytest.raises(TypeError, match="bank is a Block; expected an AdapterBank"):
        AdapterStore(MODEL)
    other = AdapterBank(nnx.Dict(other=nnx.Linear(3, 3, rngs=nnx.Rngs(0))), 1, 8)
    with pytest.raises(ValueError, match="read by the bank of another model"):
        store.add("french", other.read(drawn(other, {"other": 2})))
    assert serves(store, store.acquire("french"), 0)


def small_store(bank, folder, names):
    """A store of folders, with room for one of them on the host."""
    small = AdapterStore(bank, host_bytes=1)
    for seed, name in enumerate(names):
        write(folder / name, seed)
        small.add(name, folder / name)
    return small


def in_memory(store):
    """The names of the adapters that are in host memory."""
    return [name for name, one in store._versions.items() if one.adapter() is not None]


def write(folder, seed):
    save_adapter(set_adapter(MODEL, adapter(seed)), folder, overwrite=True)


def test_folders_are_read_again_where_the_host_has_no_room(store, tmp_path):
    small = small_store(store.bank, tmp_path, "abc")
    assert in_memory(small) == ["c"]
    for seed, name in enumerate("abc"):
        assert serves(small, small.acquire(name), seed)
        small.release(name)
    for name in "abc":
        small.remove(name)
    assert len(small._in_memory) == 0


def test_a_version_in_use_stays(store, tmp_path):
    """In host memory, and after it was replaced: as long as a request of a server refers to it."""
    small = small_store(store.bank, tmp_path, "abc")
    used = small.get("a")
    small.get("b")
    assert in_memory(small) == ["a", "b"]
    assert small.get("a") is used
    write(tmp_path / "a", 3)
    small.add("a", tmp_path / "a")
    assert small.get("a") is not used
    slot = small.acquire(used)
    assert serves(small, slot, 0)
    assert serves(small, small.acquire("a"), 3)
    small.release(used)
    with pytest.raises(ValueError, match="slots hold no adapter"):
        with_bank(MODEL, small.bank, [slot])
    with pytest.raises(ValueError, match="'a' is released, but nobody"):
        small.release(used)
    del used
    small.remove("a")
    small.release("a")
    small.get("c")
    assert in_memory(small) == ["c"]


def test_what_is_stored_with_an_adapter(store, tmp_path):
    write(tmp_path, 0)
    small, reads = AdapterStore(store.bank, host_bytes=1), []

    def read_again():
        reads.append("again")
        if len(reads) == 2:
            raise OSError("it is gone")
        return small.bank.read(adapter(1)), "read again"

    small.add("function", adapter(1), extra="first", read_again=read_again)
    assert small.get("function").extra == "first"
    small.add("folder", tmp_path, extra="tokenizer")
    assert in_memory(small) == ["folder"]
    assert serves(small, small.acquire("function"), 1)
    assert small.get("function").extra == "read again"
    assert in_memory(small) == ["function"]
    assert (small.get("folder").extra, reads) == ("tokenizer", ["again"])
    small.release("function")
    small.add("other", adapter(2), extra=3)  # which cannot be read again
    assert small.acquire("folder") != small.acquire("other")
    small.release("other")
    assert in_memory(small) == ["folder", "other"]
    with pytest.raises(OSError, match="it is gone"):
        small.acquire("function")


def test_what_is_replaced_while_it_is_read_again(store):
    small = AdapterStore(store.bank, host_bytes=1)

    def replace():
        small.add("a", adapter(1))
        raise ValueError("its folder has changed")

    small.add("a", adapter(0), read_again=replace)
    small.add("b", adapter(2), read_again=replace)
    assert in_memory(small) == ["b"]
    assert serves(small, small.acquire("a"), 1)


def test_a_folder_that_has_changed_is_refused_until_it_is_added_again(store, tmp_path):
    small, folder = small_store(store.bank, tmp_path, "ab"), tmp_path / "a"
    tensors = folder / "adapter_model.safetensors"
    before = tensors.stat()
    write(folder, 2)
    os.utime(tensors, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tensors.stat().st_size == before.st_size
    for _ in range(2):
        with pytest.raises(ValueError, match=f"folder {folder} has changed .* add it again"):
            small.acquire("a")
    write(folder, 0)  # The same adapter in other files.
    assert serves(small, small.acquire("a"), 0)
    write(folder, 2)
    small.add("a", folder)
    assert serves(small, small.acquire("a"), 2)


def test_errors_say_why_a_folder_is_read_again(store, tmp_path):
    small, folder = small_store(store.bank, tmp_path, "ab"), tmp_path / "a"
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError) as raised:
        small.acquire("a")
    (note,) = raised.value.__notes__
    assert f"Folder {folder} was added as 'a', and had to be read again" in note


def test_no_folder_is_read_where_no_slot_is_free(store, tmp_path, monkeypatch):
    small = small_store(store.bank, tmp_path, "abcd")
    small.acquire("a")
    small.acquire("b")
    reads = []
    read = AdapterBank.read
    monkeypatch.setattr(
        AdapterBank, "read", lambda *args, **names: reads.append(args[1]) or read(*args, **names)
    )
    with pytest.raises(SlotsBusy, match="all 2 slots"):
        small.acquire("c")
    assert not reads
    small.release("a")
    assert serves(small, small.acquire("c"), 2)
    assert sum(not isinstance(one, HostAdapter) for one in reads) == 1
    assert in_memory(small) == ["b", "c"]  # which are in slots


@pytest.mark.ci
def test_thousands_of_adapters_share_eight_slots(tmp_path):
    """Few of them are asked for most, and there is host memory for one of twenty."""
    bank, folders = AdapterBank(MODEL, 8, 4), [tmp_path / str(seed) for seed in range(16)]
    for seed, folder in enumerate(folders):
        write(folder, seed)
    expected = np.stack([merged(MODEL, bank, adapter(seed))(X)[0] for seed in range(16)])
    store = AdapterStore(bank, host_bytes=100 * bank.read(folders[0]).nbytes)
    for number in range(2000):
        store.add(str(number), folders[number % 16])
    answers = jax.jit(lambda bank, ids: with_bank(MODEL, bank, ids)(np.repeat(X, 8, axis=0)))
    rng, used = np.random.default_rng(0), []
    for number in np.minimum(rng.zipf(1.2, 400), 2000) - 1:
        used.append((str(number), store.acquire(str(number))))
        if len(used) == 8:
            seeds = [int(name) % 16 for name, _ in used]
            found = answers(store.bank, np.array([slot for _, slot in used], np.int32))
            np.testing.assert_allclose(found, expected[seeds], **CLOSE)
            store.release(*used.pop(rng.integers(8)))
        assert len(store._in_memory) == 100
        assert len(in_memory(store)) <= 108  # with those in slots
    assert len(store) == 2000
    assert store.loads == store.evictions + 8 > 100
