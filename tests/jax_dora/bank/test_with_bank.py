"""Rows that choose their adapters: each is as the model with that adapter alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding

import jax_dora
from jax_dora import AdapterBank, DoRARule, apply_dora, with_bank
from parity import oracle, tolerances
from tests.jax_dora.bank.adapters import compilations, drawn, merged
from tests.jax_dora.meshes import mesh_of
from tests.jax_dora.small_models import VOCABULARY, WIDTH, Block, Mixed, Stacked, call
from tests.matrices import within
from tests.tables import thinned

IN, OUT = 13, 10
RANKS = (1, 16, 5)
IDS = np.array([2, -1, 0, 1, 1, -1, 0])


def linear(dtype=jnp.float32, slots=4, sizes=(IN, OUT)):
    """A base layer, three adapters of it, and a bank with them."""
    base = nnx.Linear(*sizes, param_dtype=dtype, rngs=nnx.Rngs(0))
    base.bias.set_value(jax.random.normal(jax.random.key(5), sizes[1:], dtype))
    bank = AdapterBank(base, slots, 16)
    adapters = [
        drawn(bank, {"": rank}, seed, use_rslora=rank == 5) for seed, rank in enumerate(RANKS)
    ]
    for slot, adapter in enumerate(adapters):
        bank = bank.load(slot, adapter)
    return base, bank, adapters


@pytest.mark.parametrize(
    ("time", "dtype"),
    thinned(
        itertools.product([(), (4,)], [jnp.float32, jnp.bfloat16]),
        [((), jnp.bfloat16), ((4,), jnp.float32)],
    ),
)
@pytest.mark.ci
def test_every_row_is_within_its_bound_of_the_oracle(dtype, time):
    base, bank, adapters = linear(dtype)
    x = jax.random.normal(jax.random.key(1), (len(IDS), *time, IN), dtype)
    y = with_bank(base, bank, IDS)(x)
    assert y.dtype == dtype
    assert y.shape == (len(IDS), *time, OUT)
    check_rows(base, adapters, x, y, IDS)


@pytest.mark.ci
@pytest.mark.parametrize("rows", [7, 70])
def test_the_kernels_read_adapters_where_loads_put_them(rows):
    """Covers slots that held an adapter of a larger rank."""
    base, bank, adapters = linear(jnp.bfloat16, 4, (64, 64))
    for slot, kept in ((1, 2), (3, 0)):
        bank = bank.load(slot, adapters[1]).load(slot, adapters[kept])
    ids = np.resize([2, -1, 0, 1, 3, -1, 0], rows)
    x = jax.random.normal(jax.random.key(1), (rows, 64), jnp.bfloat16)
    model = with_bank(base, bank, ids, implementation="mosaic")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        y = jax.block_until_ready(model(x))
    check_rows(base, [adapters[0], adapters[2], adapters[2], adapters[0]], x, y, ids)


def check_rows(base, adapters, x, y, ids):
    """Checks every row against the oracle."""
    dtype, plain = y.dtype, base(x)
    for row, slot in enumerate(ids):
        if slot < 0:
            assert jnp.array_equal(y[row], plain[row])
            continue
        arrays = adapters[slot].arrays[""]
        weights = oracle.from_flax(base.kernel[...], arrays["lora_a"], arrays["lora_b"])
        scale = adapters[slot].rules[0].scale
        arguments = (np.asarray(x[row], np.float64), *weights, arrays["magnitude"], scale)
        exact = oracle.dora_linear(*arguments, bias=base.bias[...], dtype=dtype)
        bounds = tolerances.dora_linear(
            np.zeros_like(exact), *arguments, dtype, bias=base.bias[...]
        )
        within(y[row], exact, bounds.y.reshape(exact.shape))


@pytest.mark.ci
def test_many_rows_of_one_token_are_sorted():
    base, bank, adapters = linear(slots=3)
    alone = [merged(base, bank, one) for one in adapters]
    ids = np.random.default_rng(0).integers(-1, 3, 101)
    x = jax.random.normal(jax.random.key(1), (len(ids), IN))
    y = jax.jit(lambda bank, ids: with_bank(base, bank, ids)(x))(bank, ids)
    for slot in range(-1, 3):
        expected = (base if slot < 0 else alone[slot])(x[ids == slot])
        assert jnp.allclose(y[ids == slot], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "dtype", "is_planned"),
    [
        (None, jnp.bfloat16, False),
        ("mosaic", jnp.bfloat16, True),
        ("mosaic", jnp.float32, False),
        ("triton", jnp.bfloat16, True),
    ],
)
@pytest.mark.ci
def test_a_step_is_planned_only_for_a_kernel(implementation, dtype, is_planned):
    base = nnx.Linear(64, 64, param_dtype=dtype, rngs=nnx.Rngs(0))
    bank = AdapterBank(base, 4, 16)
    model = with_bank(base, bank, np.full(3, -1), implementation=implementation)
    assert (model.bank_step.get_value() is not None) == is_planned


def test_ids_are_ordinary_arrays_under_jit():
    base, bank, adapters = linear()
    graphdef, state = nnx.split(base)

    @jax.jit
    def run(state, bank, ids, x):
        return with_bank(nnx.merge(graphdef, state), bank, ids)(x)

    x = jax.random.normal(jax.random.key(1), (len(IDS), IN))
    y = run(state, bank, IDS, x)
    assert jnp.allclose(y, with_bank(base, bank, IDS)(x), rtol=1e-6, atol=1e-6)
    bank = bank.load(0, adapters[1])
    ids = jnp.array([0, 1, -1, 4, 3, -2, 2**31 - 1])
    with compilations() as found:
        y = run(state, bank, ids, x)
    assert not found
    assert jnp.allclose(y[:2], merged(base, bank, adapters[1])(x[:2]), rtol=1e-5, atol=1e-5)
    assert jnp.array_equal(y[2], jax.jit(base)(x)[2])
    # Of no slot, and of one that holds no adapter.
    assert np.isnan(np.asarray(y[3:])).all()


@pytest.mark.parametrize(("dtype", "wrong"), [("int8", -3), ("uint8", 255), ("uint32", 2**32 - 1)])
def test_an_id_of_another_dtype_is_never_another_adapter(dtype, wrong):
    base, bank, adapters = linear()
    x = jnp.ones((2, IN))
    ids = np.array([1, wrong], dtype)
    y = jax.jit(lambda ids: with_bank(base, bank, ids)(x))(ids)
    assert jnp.allclose(y[0], merged(base, bank, adapters[1])(x)[0], rtol=1e-5, atol=1e-5)
    assert np.isnan(np.asarray(y[1])).all()
    with pytest.raises(ValueError, match=f"adapter_ids has .{wrong}"):
        with_bank(base, bank, ids)


@pytest.mark.ci
def test_ids_and_models_that_are_refused():
    base, bank, _ = linear()
    bank = bank.evict(1)
    for ids, error, message in [
        ([0, 4], ValueError, r"\[4\]; expected slots from 0 to 3"),
        ([-2, 0], ValueError, r"\[-2\]; expected slots"),
        ([0, 1], ValueError, r"\[1\], whose slots hold no adapter"),
        ([0.0], TypeError, "dtype float64; expected integers"),
        ([True], TypeError, "dtype bool"),
        ([[0]], ValueError, r"shape \(1, 1\); expected \(batch,\)"),
    ]:
        with pytest.raises(error, match=message):
            with_bank(base, bank, ids)
    with pytest.raises(TypeError, match="bank is a dict"):
        with_bank(base, {}, [0])
    with pytest.raises(ValueError, match="model holds an adapter"):
        with_bank(apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(0)), bank, [0])
    with pytest.raises(ValueError, match=r"no Linear \(13, 10\)"):
        with_bank(nnx.Linear(IN, OUT + 1, rngs=nnx.Rngs(0)), bank, [0])
    with pytest.raises(ValueError, match=r"x has shape \(3, 13\), and adapter_ids has 2 rows"):
        with_bank(base, bank, [0, -1])(jnp.zeros((3, IN)))
    assert with_bank(base, bank, [0, -1])(jnp.zeros((2, IN))).shape == (2, OUT)
    assert with_bank(base, bank, [])(jnp.zeros((0, IN))).shape == (0, OUT)


def test_a_model_with_a_bank_is_not_adapted():
    base, bank, adapters = linear()
    rows, x = with_bank(base, bank, [0, -1]), jnp.zeros((2, IN))
    for example in ((), (x,)):
        [row] = jax_dora.coverage(rows, *example).weights
        assert row.status == "not adaptable"
        assert row.how.endswith("than nnx.Linear: take the model that with_bank was given")
    with pytest.raises(TypeError, match=r"BankLinear, .*; take the model that with_bank was given"):
        jax_dora.set_adapter(rows, adapters[0])


@pytest.mark.ci
def test_every_kind_of_projection_and_different_targets():
    model = Mixed(nnx.Rngs(0))
    bank = AdapterBank(model, 3, 6)
    ranks = [
        {"attention/query": 3, "attention/key": 3, "attention/value": 2, "blocks/0": 3},
        {"named/gate": 6, "attention/out": 1},
        {"pairs/0/one": 2, "attention/query": 2},
    ]
    adapters = [drawn(bank, one, seed) for seed, one in enumerate(ranks)]
    alone = [model, *(merged(model, bank, one) for one in adapters)]
    for slot, one in enumerate(adapters):
        bank = bank.load(slot, one)
    tokens = jax.random.randint(jax.random.key(3), (5, 4), 0, VOCABULARY)
    ids = [1, 0, -1, 2, 0]
    y = call(with_bank(model, bank, ids), tokens)
    for row, slot in enumerate(ids):
        expected = call(alone[slot + 1], tokens)[row]
        assert jnp.allclose(y[row], expected, rtol=1e-5, atol=1e-5)


def test_stacked_layers():
    model = Stacked(nnx.Rngs(0))
    bank = AdapterBank(model, 3, 16)
    adapters = [
        drawn(bank, {"blocks/linear": 2}),
        drawn(bank, {"blocks/linear": 9, "blocks/heads": 2}, 1, use_rslora=True),
    ]
    alone = [model, *(merged(model, bank, one) for one in adapters)]
    bank = bank.load(0, adapters[0]).load(1, adapters[1])
    x = jax.random.normal(jax.random.key(3), (4, WIDTH))
    ids = np.array([1, -1, 0, 1])
    y = jax.jit(lambda ids: with_bank(model, bank, ids)(x))(ids)
    for row, slot in enumerate(ids):
        assert jnp.allclose(y[row], call(alone[slot + 1], x)[row], rtol=1e-5, atol=1e-5)
    y = jax.jit(lambda ids: with_bank(model, bank, ids)(x))(np.array([1, 7, 2, -1]))
    assert np.isnan(np.asarray(y)).all(axis=1).tolist() == [False, True, True, False]


@pytest.mark.ci
@pytest.mark.parametrize("time", [(), (3,)])
def test_under_vmap(time):
    model = Block(nnx.Rngs(0))
    bank = AdapterBank(model, 2, 8)
    bank = bank.load(0, drawn(bank, {"linear": 2})).load(1, drawn(bank, {"heads": 7}))
    x = jax.random.normal(jax.random.key(3), (3, 2, *time, WIDTH))
    ids = jnp.array([[0, 1], [-1, 0], [1, 1]])
    y = jax.vmap(lambda ids, x: with_bank(model, bank, ids)(x))(ids, x)
    flat = with_bank(model, bank, ids.reshape(-1))(x.reshape(-1, *x.shape[2:]))
    assert jnp.allclose(y.reshape(flat.shape), flat, rtol=1e-6, atol=1e-6)


def test_slots_change_on_a_mesh_of_which_one_axis_is_explicit():
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=kinds, devices=jax.devices()[:4])
    model = nnx.Linear(12, 8, rngs=nnx.Rngs(0))
    sharding = NamedSharding(mesh, jax.P(None, "m"))
    model.kernel.set_value(jax.device_put(model.kernel[...], sharding))
    with jax.set_mesh(mesh):
        bank = AdapterBank(model, 2, 8)
        bank = bank.load(1, drawn(bank, {"": 3}, 0))
        assert bank.arrays[""].rank.tolist() == [0, 3]
        bank = bank.evict(1)
    assert bank.arrays[""].rank.tolist() == [0, 0]
    assert bank.arrays[""].lora_b.sharding.spec[2] == "m"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("spec", "axis_type", "time"),
    thinned(
        itertools.product(
            [(None, "m"), ("m", None)], [AxisType.Auto, AxisType.Explicit], [(), (3,)]
        ),
        [((None, "m"), AxisType.Explicit, ()), (("m", None), AxisType.Auto, (3,))],
    ),
)
def test_on_a_mesh(axis_type, spec, time):
    """The bank is sharded as the kernel is."""
    mesh = mesh_of(axis_type, d=2, m=2)
    plain = nnx.Linear(12, 8, rngs=nnx.Rngs(0))
    adapters = [drawn(AdapterBank(plain, 2, 8), {"": rank}, rank) for rank in (2, 7)]
    ids = np.array([1, 0, -1, 1])
    x = jax.random.normal(jax.random.key(1), (4, *time, 12))
    bank = AdapterBank(plain, 2, 8).load(0, adapters[0]).load(1, adapters[1])
    expected = with_bank(plain, bank, ids)(x)

    model = nnx.clone(plain)
    model.kernel.set_value(jax.device_put(plain.kernel[...], NamedSharding(mesh, jax.P(*spec))))
    model.bias.set_value(jax.device_put(plain.bias[...], NamedSharding(mesh, jax.P(spec[1]))))
    with jax.set_mesh(mesh):
        bank = AdapterBank(model, 2, 8).load(0, adapters[0]).load(1, adapters[1])
        assert tuple(bank.arrays[""].lora_a.sharding.spec)[2:] in ((spec[0],), ())
        assert tuple(bank.arrays[""].lora_b.sharding.spec)[2:] in ((spec[1],), ())
        rows = jax.device_put(x, NamedSharding(mesh, jax.P("d")))

        def run(bank, ids, x):
            out = (
                jax.P("d", *(None for _ in time), spec[1])
                if axis_type is AxisType.Explicit
                else None
            )
            return with_bank(model, bank, ids)(x, out_sharding=out)

        results = run(bank, ids, rows), jax.jit(run)(bank, ids, rows)
    for y in results:
        assert jnp.allclose(np.asarray(y), np.asarray(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.ci
def test_a_quantised_base():
    """The norm is of what the quantised kernel stands for, and so is the base's product."""
    base = jax_dora.quantize(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), "int8", path=".*")
    bank = AdapterBank(base, 2, 8)
    adapter = drawn(bank, {"": 3})
    x = jax.random.normal(jax.random.key(1), (2, 64))
    y = with_bank(base, bank.load(1, adapter), [1, -1])(x)
    arrays = adapter.arrays[""]
    kernel = base.kernel.get_value()
    weight = np.asarray(kernel.qvalue, np.float64) * np.asarray(kernel.scale, np.float64)
    merged = oracle.merged_weight(
        weight.T, arrays["lora_a"].T, arrays["lora_b"].T, arrays["magnitude"], 1.0
    )
    exact = oracle.fp64(x[0]) @ merged.T + oracle.fp64(base.bias[...])
    assert np.abs(y[0] - exact).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS
    assert jnp.array_equal(y[1], base(x)[1])
