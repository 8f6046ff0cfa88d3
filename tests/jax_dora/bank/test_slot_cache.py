"""The cache of slots: adapters that are transferred before they are pinned."""

import jax
import pytest
from flax import nnx

from jax_dora import AdapterBank
from jax_dora.bank.slot_cache import MOST_TRANSFERS, SlotCache
from tests.jax_dora.bank.adapters import drawn
from tests.jax_dora.small_models import Block

NAMES = ("french", "german", "latin")


@pytest.fixture
def cache():
    return SlotCache(AdapterBank(Block(nnx.Rngs(0)), 2, 4))


@pytest.fixture
def read(cache):
    return {name: cache.bank.read(drawn(cache.bank, {"linear": 4}, len(name))) for name in NAMES}


def settle(cache):
    jax.block_until_ready([one.pieces for one in cache._transfers.values()])


def test_a_transferred_adapter_is_pinned_without_its_host_arrays(cache, read):
    cache.has_arrived("french", read["french"])
    settle(cache)
    assert cache.has_arrived("french", read["french"])
    slot = cache.pin("french", None)
    assert cache.has_arrived("french", read["french"])
    assert not cache._transfers
    wanted = SlotCache(AdapterBank(Block(nnx.Rngs(0)), 2, 4))
    assert wanted.pin("french", read["french"]) == slot
    for one, other in zip(jax.tree.leaves(cache.bank), jax.tree.leaves(wanted.bank), strict=True):
        assert jax.numpy.array_equal(one, other, equal_nan=True)


def test_few_adapters_are_on_their_way_at_a_time(cache, read):
    for name in NAMES:
        cache.has_arrived(name, read[name])
        settle(cache)
    assert list(cache._transfers) == list(NAMES[:MOST_TRANSFERS])
    assert not cache.has_arrived(NAMES[-1], read[NAMES[-1]])
    cache.forget_transfers({"german"})
    assert list(cache._transfers) == ["german"]
    cache.has_arrived("latin", read["latin"])
    assert list(cache._transfers) == ["german", "latin"]
