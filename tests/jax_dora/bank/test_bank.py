"""A bank's slots: what is loaded into them, what is refused, and at what cost."""

import copy
import dataclasses
import gc
import math
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_dora import AdapterBank, DoRARule, apply_dora, get_adapter, with_bank
from jax_dora.bank import projections
from jax_dora.bank.host import CachedG
from tests.jax_dora.bank.adapters import compilations, drawn
from tests.jax_dora.small_models import LAYERS, WIDTH, Block, Mixed, Stacked


def test_loading_and_evicting_compile_once_for_all_ranks():
    bank = AdapterBank(Block(nnx.Rngs(0)), 4, 64)
    ranks = [{"linear": 8, "heads": 8}, {"linear": 64, "heads": 1}, {"linear": 3}, {"heads": 17}]
    adapters = [drawn(bank, one) for one in ranks]
    bank = bank.load(0, adapters[0])
    with compilations() as found:
        bank = bank.load(1, adapters[1]).load(2, adapters[2]).evict(0).load(0, adapters[3])
    assert not found
    assert bank.arrays["linear"].rank.tolist() == [0, 64, 3, 0]
    assert bank.arrays["heads"].rank.tolist() == [17, 1, 0, 0]
    with compilations() as found:
        jax.jit(lambda x: 2 * x)(jnp.zeros(3))
    assert found


def test_a_bank_lies_on_the_device_that_its_model_is_put_on():
    """From the start, so that a second load compiles nothing."""
    device, model = jax.devices()[1], Block(nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), device))
    bank = AdapterBank(model, 2, 8)
    adapters = [bank.read(drawn(bank, {"linear": rank}, rank)) for rank in (2, 8)]
    bank = bank.load(0, adapters[0])
    with compilations() as found:
        bank = bank.load(1, adapters[1]).load(0, adapters[0]).evict(1).load(1, adapters[1])
    assert not found
    assert all(array.devices() == {device} for array in jax.tree.leaves(bank.arrays))


@pytest.mark.ci
def test_what_is_loaded_again_takes_no_norm():
    """Beside the same kernels; beside others it has another g."""
    model = Stacked(nnx.Rngs(0))
    bank = AdapterBank(model, 3, 16)
    read = bank.read(drawn(bank, {"blocks/linear": 11, "blocks/heads": 3}))
    bank = bank.load(0, read)
    with compilations() as found:
        bank = bank.load(1, read)
    assert not found
    for array in jax.tree.leaves(bank.arrays):
        assert jnp.array_equal(array[:, 0], array[:, 1])
    known = [scaling.is_dora.any() for scaling in read.scalings_for(bank.kernels()).values()]
    assert not any(known)

    kernel = model.blocks.linear.kernel
    kernel.set_value(2 * kernel.get_value())
    bank = bank.load(2, read)
    g = bank.arrays["blocks/linear"].g
    assert not np.isclose(g[:, 2], g[:, 0], rtol=0.1).all(axis=-1).any()
    again = AdapterBank(model, 1, 16).load(0, drawn(bank, {"blocks/linear": 11, "blocks/heads": 3}))
    for one, other in zip(jax.tree.leaves(bank.arrays), jax.tree.leaves(again.arrays), strict=True):
        assert jnp.array_equal(one[:, 2], other[:, 0])


@pytest.mark.ci
def test_groups_of_projections_are_loaded_as_all_at_once(monkeypatch):
    """The largest kernels first, and without compiling again."""
    model, found = Mixed(nnx.Rngs(0)), []
    ranks = [{"attention/query": 3, "attention/out": 6}, {"named/gate": 6, "blocks/0": 2}]
    for least in (projections.MIN_GROUP_SIZE, 1):
        monkeypatch.setattr(projections, "MIN_GROUP_SIZE", least)
        bank = AdapterBank(model, 3, 6)
        read = [bank.read(drawn(bank, one, seed)) for seed, one in enumerate(ranks)]
        bank = bank.load(0, read[0])
        with compilations() as compiled:
            bank = bank.load(1, read[1]).load(2, read[0])
        assert not compiled
        found.append(bank)
    for one, other in zip(*(jax.tree.leaves(bank.arrays) for bank in found), strict=True):
        assert jnp.array_equal(one, other, equal_nan=True)
    at_once, grouped = (bank._programs.groups for bank in found)
    assert (len(at_once), len(grouped)) == (1, projections.MAX_GROUPS)
    sizes = [math.prod(bank.projections[path].shape) for group in grouped for path in group.paths]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == len(bank.paths)


def test_a_load_sends_everything_before_it_launches_a_program(monkeypatch):
    bank = AdapterBank(Block(nnx.Rngs(0)), 2, 16)
    first, second = (bank.read(drawn(bank, {"linear": 11, "heads": 3}, seed)) for seed in (0, 1))
    bank, launched = bank.load(0, first), []
    clear, device_put = bank._programs.clear, jax.device_put

    def sent(*arguments):
        assert not launched
        return device_put(*arguments)

    monkeypatch.setattr(bank._programs, "clear", lambda *given: launched.append(0) or clear(*given))
    monkeypatch.setattr(jax, "device_put", sent)
    with jax.transfer_guard_host_to_device("disallow"):
        assert bank.load(0, second).arrays["linear"].rank.tolist() == [11, 0]
    assert launched


@pytest.mark.parametrize("is_first_dora", [False, True])
def test_norms_are_computed_for_adapters_with_magnitudes_alone(is_first_dora):
    """Whichever is loaded first, later loads of the other kind compile nothing."""
    bank = AdapterBank(Block(nnx.Rngs(0)), 3, 8)
    dora = bank.read(drawn(bank, {"linear": 8, "heads": 3}))
    scalings = {
        path: scaling._replace(
            numerator=np.ones_like(scaling.numerator), is_dora=np.zeros_like(scaling.is_dora)
        )
        for path, scaling in dora.scalings.items()
    }
    lora = dataclasses.replace(dora, scalings=scalings, cached_g=CachedG())
    bank, launched = bank.load(0, dora if is_first_dora else lora), []

    def recorded(finish):
        def run(*given):
            launched.append("computed" if given[3:] else "known")  # with kernels or without
            return finish(*given)

        return run

    groups = bank._programs.groups
    bank._programs.groups = [one._replace(finish=recorded(one.finish)) for one in groups]
    dora = dataclasses.replace(dora, cached_g=CachedG())
    with compilations() as compiled:
        bank = bank.load(1, lora).load(2, dora).load(2, dora)
    assert not compiled
    assert launched == ["known", "computed", "known"]
    for array in bank.arrays.values():
        assert (array.g[1] == 1).all()
        assert jnp.array_equal(array.g[0], array.g[2 if is_first_dora else 1])
    g = bank.arrays["linear"].g
    assert not np.isclose(g[1], g[2], rtol=1e-3).any()


def test_a_kernel_that_does_not_fit_is_refused_and_changes_nothing():
    model = nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(0))
    bank = AdapterBank(model, 2, 8)
    read = bank.read(drawn(bank, {"": 3}))
    bank = bank.load(0, read)
    before, kernel = jax.tree.map(np.asarray, bank.arrays), model.kernel.get_value()
    deleted = jnp.zeros_like(kernel)
    deleted.delete()
    for wrong, message in (
        (jnp.zeros((WIDTH, 4)), rf"kernel at '' has shape \({WIDTH}, 4\); expected \({WIDTH}, 3\)"),
        (deleted, "was deleted, perhaps donated .*: assign one to the model"),
    ):
        model.kernel.set_value(wrong)
        with pytest.raises(ValueError, match=message):
            bank.load(1, read)
    model.kernel.set_value(kernel)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(bank.arrays), strict=True):
        np.testing.assert_array_equal(one, other)
    assert bank.load(1, read).arrays[""].rank.tolist() == [3, 3]

    first, second = jax.devices()[:2]
    nnx.update(model, jax.device_put(nnx.state(model), first))
    bank = AdapterBank(model, 2, 8)
    model.kernel.set_value(jax.device_put(kernel, second))
    with pytest.raises(ValueError, match=r"is on \['\S+1'\]; expected \['\S+0'\]"):
        bank.load(1, read)


def test_a_bank_without_a_mesh_changes_while_one_is_set():
    bank = AdapterBank(Block(nnx.Rngs(0)), 2, 8)
    first, second = (bank.read(drawn(bank, {"linear": 8}, seed)) for seed in (0, 1))
    bank = bank.load(0, first)
    with jax.set_mesh(jax.make_mesh((2,), ("x",))), compilations() as compiled:
        bank = bank.load(1, second).evict(0).load(0, second)
    assert not compiled
    for array in jax.tree.leaves(bank.arrays):
        assert jnp.array_equal(array[0], array[1])


def test_g_that_two_models_share_a_cache_for():
    """Neither finds the other's, even if the other one stores its own while it reads."""
    cached, models = CachedG(), [nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    kernels = [{"": model.kernel.get_value()} for model in models]
    g = [{"": jnp.full(3, float(seed))} for seed in (0, 1)]

    def store_other():
        cached.store(kernels[1], g[1])
        return kernels[0][""]

    cached._entry = [store_other], g[0]
    assert cached.get(kernels[0])[""][0] == 0
    assert cached.get(kernels[1])[""][0] == 1

    class Slow(dict):
        def items(self):
            cached.store(kernels[1], g[1])
            return super().items()

    cached._entry = [weakref.ref(kernels[0][""])], Slow(g[0])
    assert cached.has_transferred()
    assert cached.get(kernels[0]) is None
    assert cached.get(kernels[1])[""][0] == 1


def test_under_x64():
    with jax.enable_x64(True):
        bank = AdapterBank(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), 2, 8)
        assert bank.load(1, drawn(bank, {"": 3})).arrays[""].rank.tolist() == [0, 3]


@pytest.mark.ci
def test_under_debug_nans():
    """Empty slots hold NaN on purpose."""
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    with jax.debug_nans(True):
        bank = AdapterBank(model, np.int64(2), 8)
        bank = bank.load(1, drawn(bank, {"": 3})).evict(1).load(1, drawn(bank, {"": 2}))
        assert bank.arrays[""].rank.tolist() == [0, 2]
        call = jax.jit(lambda bank, x: with_bank(model, bank, jnp.array([-1, 1]))(x))
        for time in (1, 3):
            x = jnp.ones((2, time, WIDTH))
            assert jnp.isfinite(call(bank, x)).all()
            assert jnp.isfinite(with_bank(model, bank, jnp.array([-1, 1]))(x)).all()
        with pytest.raises(FloatingPointError):
            jnp.log(-jnp.ones(2))


def test_arrays_change_in_place():
    bank = AdapterBank(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), 3, 8)
    before = bank.arrays[""].lora_a.unsafe_buffer_pointer()
    loaded = bank.load(1, drawn(bank, {"": 2}))
    assert loaded.arrays[""].lora_a.unsafe_buffer_pointer() == before
    assert bank.arrays[""].lora_a.is_deleted()
    assert loaded.evict(1).arrays[""].lora_a.unsafe_buffer_pointer() == before


def test_a_slot_forgets_what_it_held():
    bank = AdapterBank(Stacked(nnx.Rngs(0)), 3, 16)
    narrow = drawn(bank, {"blocks/linear": 2})
    bank = bank.load(0, drawn(bank, {"blocks/linear": 11, "blocks/heads": 3}, 1))
    bank = bank.load(0, narrow).load(1, narrow).evict(1).load(1, narrow).load(2, narrow).evict(2)
    for array in jax.tree.leaves(bank.arrays):
        assert array.shape[:2] == (LAYERS, 3)
        assert jnp.array_equal(array[:, 0], array[:, 1])
    for slots in bank.arrays.values():
        for name, array in slots._asdict().items():
            assert np.all(np.isnan(array[:, 2]) if name == "g" else array[:, 2] == 0)


def test_a_bank_is_a_pytree_of_its_arrays():
    model = Block(nnx.Rngs(0))
    bank = AdapterBank(model, 2, 3)
    assert len(jax.tree.leaves(bank)) == 2 * 5
    same = jax.jit(lambda bank: bank)(bank)
    assert isinstance(same, AdapterBank)
    assert (same.slots, same.max_rank, same.paths) == (2, 3, ("linear", "heads"))
    assert "slots=2" in repr(same)


@pytest.mark.ci
@pytest.mark.parametrize("remake", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy])
def test_a_copied_or_unpickled_bank_loads_and_evicts(remake):
    model = Stacked(nnx.Rngs(0))
    bank = AdapterBank(model, 3, 4, path="blocks/(linear|other)")
    read = bank.read(drawn(bank, {"blocks/linear": 2}))
    bank = bank.load(0, read)
    other, read = remake((bank, read))
    assert (other.slots, other.max_rank, other.paths) == (3, 4, ("blocks/linear",))
    assert other._base_model().model is not model
    for change in (lambda one: one, lambda one: one.load(2, read), lambda one: one.evict(0)):
        bank, other = change(bank), change(other)
        for array, same in zip(jax.tree.leaves(bank), jax.tree.leaves(other), strict=True):
            assert jnp.array_equal(array, same, equal_nan=True)
    x = jnp.ones((2, WIDTH))
    y = [with_bank(model, one, np.array([-1, 2]))(x) for one in (bank, other)]
    assert jnp.array_equal(*y)


def test_what_is_read_once_is_loaded_often():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    bank = AdapterBank(model, 2, 8)
    read = bank.read(drawn(bank, {"": 3}))
    assert read.rank == 3
    bank = bank.load(0, drawn(bank, {"": 3})).load(1, read)
    for array in jax.tree.leaves(bank.arrays):
        assert jnp.array_equal(array[0], array[1])
    with pytest.raises(ValueError, match="another model"):
        AdapterBank(nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0)), 2, 8).load(0, read)


def test_the_size_of_what_is_read_counts_everything_that_the_host_holds():
    """Also for the projections that the adapter leaves out, and g before the first load."""
    bank = AdapterBank(Block(nnx.Rngs(0)), 2, 16)
    read = bank.read(drawn(bank, {"linear": 11}))
    nbytes = read.nbytes
    bank = bank.load(0, read)
    held = (read.rank_blocks, read.scalings, read.cached_g.get(bank.kernels()))
    assert nbytes == sum(array.nbytes for array in jax.tree.leaves(held))


def changed(adapter, name, value):
    ((path, arrays),) = adapter.arrays.items()
    return dataclasses.replace(
        adapter, arrays={path: {**arrays, name: value(np.array(arrays[name]))}}
    )


def put(value):
    def change(array):
        array.flat[1] = value
        return array

    return change


MODEL = Mixed(nnx.Rngs(0))


@pytest.mark.ci
def test_rows_of_an_adapter_whose_norm_overflows_are_not_finite():
    """Its g would be 0, and so would all that the projection computes."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    bank = AdapterBank(model, 2, 4)
    adapter = drawn(bank, {"": 2})
    arrays = {name: array.copy() for name, array in adapter.arrays[""].items()}
    arrays["lora_a"] *= 1e12
    arrays["lora_b"] *= 1e12
    bank = bank.load(0, adapter).load(1, dataclasses.replace(adapter, arrays={"": arrays}))
    y = with_bank(model, bank, np.array([0, 1, -1]))(jnp.ones((3, 8)))
    assert np.isfinite(y[::2]).all()
    assert not np.isfinite(y[1]).any()
    # A fresh adapter over a kernel whose norm overflows has g = 1.
    model.kernel[...] *= 1e25
    fresh = get_adapter(apply_dora(model, DoRARule("", 2, 4.0), rngs=nnx.Rngs(1)))
    bank = AdapterBank(model, 1, 4).load(0, fresh)
    x = 1e-20 * jnp.ones((2, 8))
    y = with_bank(model, bank, np.array([0, -1]))(x)
    np.testing.assert_allclose(y[0], y[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "rank", "change", "message"),
    [
        ("blocks/0", 9, None, "rank 9 for 'blocks/0'; expected at most 4"),
        ("embed", 2, None, "'embed', which the bank has no room for: an nnx.Embed is no proj"),
        ("conv", 2, None, "'conv', which the bank has no room for: an nnx.Conv is no projection"),
        ("blocks/0", 2, ("magnitude", put(np.nan)), "NaN or infinity in magnitude"),
        ("blocks/0", 2, ("lora_a", put(np.inf)), "NaN or infinity in lora_a"),
        ("blocks/0", 2, ("lora_b", lambda b: b[:, :-1]), r"lora_b \(2, 7\) for 'again'; expec"),
        ("blocks/0", 2, ("lora_a", lambda a: a[:, :-1]), r"lora_a \(8, 1\) for 'again'"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(path, rank, change, message):
    rule = DoRARule(path, rank, 4.0)
    adapter = get_adapter(apply_dora(MODEL, rule, rngs=nnx.Rngs(1)))
    if change is not None:
        adapter = changed(adapter, *change)
    bank = AdapterBank(MODEL, 2, 4)
    before = jax.tree.map(np.asarray, bank.arrays)
    with pytest.raises(ValueError, match=message):
        bank.load(0, adapter)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), before, bank.arrays)
    assert all(jax.tree.leaves(same))


def test_other_things_that_are_refused():
    model = Block(nnx.Rngs(0))
    bank = AdapterBank(model, 2, 4)
    adapter = drawn(bank, {"linear": 2})
    for slot in (-1, 2):
        with pytest.raises(ValueError, match=f"slot is {slot}; expected 0 to 1"):
            bank.load(slot, adapter)
    with pytest.raises(TypeError, match="slot is True"):
        bank.evict(True)
    with pytest.raises(TypeError, match="adapter is a dict; expected an Adapter"):
        bank.load(0, {})
    other = drawn(AdapterBank(MODEL, 1, 4), {"blocks/0": 2})
    with pytest.raises(ValueError, match="'blocks/0', which the bank has no room for: the model"):
        bank.load(0, other)
    with pytest.raises(ValueError, match="holds an adapter already"):
        AdapterBank(apply_dora(model, DoRARule("linear", 2, 4.0), rngs=nnx.Rngs(1)), 2, 4)
    with pytest.raises(ValueError, match="slots is 0"):
        AdapterBank(model, 0, 4)
    with pytest.raises(TypeError, match=r"slots is 2\.0"):
        AdapterBank(model, 2.0, 4)
    with pytest.raises(ValueError, match="max_rank is 0; expected at least 1"):
        AdapterBank(model, 2, 0)
    with pytest.raises(ValueError, match=r"an nnx\.Embed is no projection"):
        AdapterBank(MODEL, 2, 4, path="embed")


def test_loading_under_jit_is_refused_and_leaves_the_bank_as_it_was():
    model = Block(nnx.Rngs(0))
    bank = AdapterBank(model, 2, 4)
    adapter = drawn(bank, {"linear": 2})
    for load in (lambda bank: bank.load(0, adapter), lambda _: bank.load(0, adapter)):
        with pytest.raises(TypeError, match="load is called in a function that JAX traces"):
            jax.jit(load)(bank)
    bank = bank.load(0, adapter)
    assert bank.arrays["linear"].rank.tolist() == [2, 0]
    evicted = jax.jit(lambda bank: bank.evict(0))(bank)
    assert np.isnan(evicted.arrays["linear"].g).all()


def test_a_bank_may_be_of_some_projections():
    model = Block(nnx.Rngs(0))
    bank = AdapterBank(model, 2, 4, path="linear")
    assert bank.paths == ("linear",)
    with pytest.raises(ValueError, match="'heads', which the bank has no room for: the bank was"):
        bank.load(0, drawn(AdapterBank(model, 1, 4), {"heads": 2}))


def test_a_compiled_function_keeps_no_weights():
    """JAX keeps what it compiled, and what it compiled for, when model, bank and function are
    gone."""
    model = Block(nnx.Rngs(0))
    kernel = weakref.ref(model.linear.kernel.get_value())
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, bank, x):
        return with_bank(nnx.merge(graphdef, state), bank, np.array([-1])).linear(x), bank

    bank = AdapterBank(model, 1, 4)
    _, bank = run(state, bank, jnp.ones((1, WIDTH)))
    bank = bank.load(0, drawn(bank, {"linear": 2}))
    leaves, structure = jax.tree.flatten(bank)
    del model, state, bank, run
    gc.collect()
    assert kernel() is None
    with pytest.raises(ValueError, match="make a new AdapterBank"):
        structure.unflatten(leaves).load(0, "folder")
