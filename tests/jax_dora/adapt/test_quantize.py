"""`quantize`: models over quantised kernels, adapted before or after, merged, saved and refused."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import jax_dora
from benchmarks.collectives import collectives
from jax_dora import DoRARule, apply_dora, coverage, merge_dora, norms, quantize
from jax_dora.ops import quantised
from jax_dora.ops.rounding import round_to
from jax_dora.peft import load_adapter, save_adapter
from parity import oracle
from tests import quantised as kernels
from tests.jax_dora.meshes import automatic
from tests.jax_dora.small_models import Mixed, Stacked, call, identical, ids, train
from tests.matrices import within
from tests.tables import slow, thinned

PATH = "conv|attention/.*|blocks/.*|named/.*|pairs/.*"
RULES = [DoRARule("conv", 2, 4.0), DoRARule(".*", 3, 4.0, use_rslora=True)]
WITHOUT_EMBED = [DoRARule("conv", 2, 4.0), DoRARule(PATH, 3, 4.0, use_rslora=True)]


def dense(model):
    """`model` with float kernels, of what its quantised ones stand for."""
    copy = nnx.clone(model)
    for _, variable in nnx.iter_graph(copy):
        if isinstance(variable, nnx.Param) and quantised.is_quantised(variable.get_value()):
            meant = kernels.meant(variable.get_value())
            variable.set_value(jnp.asarray(meant, jnp.float32))
    return copy


def close(one, other, rtol=1e-5):
    leaves = jax.tree.leaves(other)
    # The gradient of a bias that softmax cancels is 0 but for rounding of what it is made of.
    rounding = 2.0**-21 * max(np.abs(leaf).max() for leaf in leaves)
    for a, b in zip(jax.tree.leaves(one), leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max() + rounding)


@pytest.mark.parametrize("qtype", quantised.FORMATS)
def test_rounding_is_qwixs(qtype):
    rng = np.random.default_rng(0)
    array = jnp.asarray(rng.normal(size=(32, 6)) * rng.random(6), jnp.float32).at[:8, 2].set(0)
    name = qtype if qtype == "nf4" else jnp.dtype(qtype)
    wanted = qwix.quantize(array, name, channelwise_axes=(1,), tiled_axes={0: 8})
    found = round_to(array, qtype, (8, 1), jnp.float32)
    assert found.qtype == wanted.qtype
    # The least element of a tile is half a step beyond the last integer: a tie but for rounding.
    is_tie = np.abs(np.asarray(array / jnp.repeat(found.scale, 8, 0)) % 1 - 0.5) < 1e-4
    differs = oracle.fp64(found.qvalue) != oracle.fp64(wanted.qvalue)
    assert not np.any(differs & ~(is_tie & qtype.startswith("int")))
    np.testing.assert_array_equal(found.scale, wanted.scale)


@pytest.mark.parametrize("qtype", ["int4", "int8"])
@pytest.mark.ci
def test_rounding_is_the_same_in_every_program(qtype):
    """Over several devices, and operation by operation."""
    array = jnp.asarray(np.random.default_rng(0).normal(size=(256, 64)), jnp.float32)
    mesh = automatic(rows=4)
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    for tile in ((64, 1), (256, 1)):
        found = round_to(array, qtype, tile, jnp.float32)
        sharded = round_to(jax.device_put(array, rows), qtype, tile, jnp.float32)
        with jax.disable_jit():
            eager = round_to(array, qtype, tile, jnp.float32)
        for other in (sharded, eager):
            jax.tree.map(np.testing.assert_array_equal, other, found)


@pytest.mark.parametrize("qtype", quantised.FORMATS)
def test_a_format_may_be_a_str_of_numpy(qtype):
    found, wanted = (
        nnx.state(quantize(nnx.Linear(64, 4, rngs=nnx.Rngs(0)), name, path=""))
        for name in (np.str_(qtype), qtype)
    )
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found, wanted))


def test_a_bf16_kernel_is_rounded_by_its_bf16_scales():
    rng = np.random.default_rng(0)
    array = jnp.asarray(rng.normal(size=(64, 8)), jnp.bfloat16)
    found = round_to(array, "int8", (64, 1), jnp.bfloat16)
    assert found.scale.dtype == jnp.bfloat16
    step = oracle.fp64(found.scale)
    assert np.all(np.abs(kernels.meant(found) - oracle.fp64(array)) <= 0.76 * step)


@pytest.mark.ci
def test_plain_layers_compute_with_quantised_kernels():
    model = quantize(Mixed(nnx.Rngs(0)), "nf4", path=PATH, tile_size=4)
    assert type(model.conv) is nnx.Conv
    assert quantised.is_quantised(model.attention.query.kernel[...])

    def both(model, ids):
        return model(ids), nnx.grad(lambda model: jnp.sin(model(ids)).sum(), argnums=SOME)(model)

    found, wanted = (nnx.jit(both)(one, ids()) for one in (model, dense(model)))
    close(found, wanted, 1e-4)


SOME = nnx.DiffState(0, lambda path, _: path[-1] in ("bias", "embedding"))


@pytest.mark.ci
@pytest.mark.parametrize("make", thinned([Mixed, Stacked], [Stacked]))
def test_either_order_makes_the_same_model_and_a_fresh_adapter_changes_nothing(make):
    model = make(nnx.Rngs(0))
    path, rules = (PATH, WITHOUT_EMBED) if make is Mixed else ("all-linear", RULES[1:])
    inputs = ids() if make is Mixed else jnp.ones((2, 8))
    base = quantize(model, "nf4", path=path, tile_size=4)
    first = apply_dora(base, rules, rngs=nnx.Rngs(1))
    then = quantize(apply_dora(model, rules, rngs=nnx.Rngs(1)), "nf4", path=path, tile_size=4)
    assert nnx.graphdef(first) == nnx.graphdef(then)
    for one, other in zip(*(jax.tree.leaves(nnx.state(m)) for m in (first, then)), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(call(first, inputs), call(base, inputs))
    assert identical(jax_dora.remove_dora(first), base)


@pytest.mark.ci
def test_trained_adapters_norms_and_gradients():
    model = quantize(Mixed(nnx.Rngs(0)), "int8", path=PATH, tile_size=4)
    model = train(apply_dora(model, WITHOUT_EMBED, rngs=nnx.Rngs(1)))

    def both(model, ids):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        return model(ids), nnx.grad(lambda m: jnp.sin(m(ids)).sum(), argnums=wrt)(model)

    found, wanted = (nnx.jit(both)(one, ids()) for one in (model, dense(model)))
    close(found, wanted, 1e-4)
    close(norms(model), norms(dense(model)))


EINSUMS = [("bd,fd->bf", (6, 8)), ("bd,nhd->bnh", (2, 3, 8))]


@pytest.mark.parametrize(("equation", "shape"), thinned(EINSUMS, EINSUMS[:1]))
@pytest.mark.parametrize("qtype", [slow("nf4"), "int8"])
@pytest.mark.ci
def test_an_einsum_whose_kernel_is_stored_the_other_way_round(equation, shape, qtype):
    base = nnx.Einsum(equation, shape, rngs=nnx.Rngs(0))
    base = quantize(base, qtype, path="", tile_size=4 if qtype == "nf4" else None)
    model = train(apply_dora(base, DoRARule("", 3, 4.0), rngs=nnx.Rngs(1)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 8)), jnp.float32)
    close([base(x), model(x)], [dense(base)(x), dense(model)(x)])
    bank = jax_dora.AdapterBank(base, 1, 3, path="").load(0, jax_dora.get_adapter(model))
    rows = jax_dora.with_bank(base, bank, jnp.array([0, -1, 0, -1, 0], jnp.int32))(x)
    close([rows[::2], rows[1::2]], [model(x)[::2], base(x)[1::2]])
    requantised, _ = merge_dora(model, requantize=True, return_report=True)
    assert requantised.kernel[...].scale.shape == base.kernel[...].scale.shape


@pytest.mark.ci
def test_a_frozen_norm_is_of_the_quantised_kernel():
    layer = adapted()
    x = jnp.ones((3, 128), jnp.bfloat16)
    frozen = jax_dora.freeze(layer)
    np.testing.assert_array_equal(frozen(x), layer(x))
    plain = apply_dora(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), RULES[1:], rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="it has a given norm"):
        quantize(jax_dora.freeze(plain), "int8", path="")


def adapted(qtype="nf4", dtype=jnp.bfloat16):
    base = nnx.Linear(128, 24, param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(0))
    base = quantize(base, qtype, path="")
    rule = DoRARule("", 4, 3.0, lora_b_init=nnx.initializers.normal(0.1))
    return train(apply_dora(base, rule, rngs=nnx.Rngs(1)))


def test_default_tiles():
    assert adapted("nf4").kernel[...].scale.shape == (2, 24)
    assert adapted("int8").kernel[...].scale.shape == (1, 24)


@pytest.mark.ci
def test_merging_makes_bf16_kernels():
    layer = adapted(dtype=jnp.float32)
    merged, report = merge_dora(layer, return_report=True)
    assert type(merged) is nnx.Linear
    assert merged.kernel.dtype == jnp.bfloat16
    assert merged.dot_general is jax.lax.dot_general
    weights = oracle.from_flax(
        kernels.meant(layer.kernel[...]), layer.lora_a[...], layer.lora_b[...]
    )
    exact = oracle.merged_weight(*weights, layer.magnitude[...], layer.scale)
    within(merged.kernel[...].T, exact, 2.0**-8 * np.abs(exact) + 1e-5)
    assert report.layers[0].dtype == "bfloat16"
    assert report.layers[0].lost < 0.1


def test_merging_requantises_only_with_a_report_of_what_is_lost():
    layer = adapted()
    with pytest.raises(ValueError, match="return_report False; expected both"):
        merge_dora(layer, requantize=True)
    merged, report = merge_dora(layer, requantize=True, return_report=True)
    kernel, (row,) = merged.kernel[...], report.layers
    assert (row.dtype, kernel.scale.shape) == ("nf4", layer.kernel[...].scale.shape)
    weights = oracle.from_flax(
        kernels.meant(layer.kernel[...]), layer.lora_a[...], layer.lora_b[...]
    )
    exact = oracle.merged_weight(*weights, layer.magnitude[...], layer.scale)
    off = np.linalg.norm(kernels.meant(kernel).T - exact)
    assert row.lost == pytest.approx(off / np.linalg.norm(exact - weights[0]), rel=1e-2)
    x = jnp.ones((3, 128), jnp.bfloat16)
    close(merged(x).astype(jnp.float32), np.ones((3, 128)) @ kernels.meant(kernel), 2e-2)


@pytest.mark.ci
def test_coverage_and_an_example():
    model = quantize(Mixed(nnx.Rngs(0)), "int8", path="blocks/.*")
    table = str(coverage(model, ids()))
    assert "int8, scales 1×8" in table
    model = apply_dora(model, DoRARule("blocks/0", 2, 4), rngs=nnx.Rngs(0), example=(ids(),))
    assert isinstance(model.blocks[0], jax_dora.DoRALinear)


@pytest.mark.ci
def test_the_peft_folder_is_that_of_a_float_base(tmp_path):
    plain = apply_dora(Stacked(nnx.Rngs(0)), RULES[1:], rngs=nnx.Rngs(1))
    model = train(quantize(plain, "nf4", tile_size=4))
    twin = jax_dora.set_adapter(plain, jax_dora.get_adapter(model))
    for name, one in (("quantised", model), ("float", twin)):
        save_adapter(one, tmp_path / name)
    tensors = (
        load_file(tmp_path / n / "adapter_model.safetensors") for n in ("quantised", "float")
    )
    for one, other in zip(*(sorted(each.items()) for each in tensors), strict=True):
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])
    base = quantize(Stacked(nnx.Rngs(0)), "nf4", tile_size=4)
    loaded = load_adapter(base, tmp_path / "quantised")
    close(loaded(jnp.ones((2, 8))), model(jnp.ones((2, 8))))


def not_finite():
    layer = nnx.Linear(64, 3, rngs=nnx.Rngs(0))
    layer.kernel.set_value(layer.kernel[...].at[3, 1].set(jnp.nan))
    return nnx.Dict(one=layer)


@pytest.mark.parametrize(
    ("make", "qtype", "options", "error", "message"),
    [
        (Mixed, "int3", {}, ValueError, "qtype is 'int3'; expected one of 'nf4', 'int4', 'int8'"),
        (Mixed, "float8_e5m2", {}, ValueError, "qtype is 'float8_e5m2'; expected one of 'nf4'"),
        (Mixed, "int8", {"path": "nowhere"}, ValueError, "'nowhere' matches no layer"),
        (Mixed, "int8", {"path": "embed|conv"}, TypeError, r"(?s)cannot be quantised.*embed \(nnx"),
        (Mixed, "int8", {"tile_size": -1}, ValueError, "tile_size is -1"),
        (Mixed, "int8", {"tile_size": 8.0}, ValueError, "tile_size is 8.0"),
        (
            lambda rngs: nnx.Dict(one=nnx.Linear(0, 3, rngs=rngs)),
            *("int8", {}, ValueError, r"'one' cannot .* has shape \(0, 3\), without elements"),
        ),
        (Mixed, "nf4", {}, ValueError, r"'again' cannot .* the tile size 64.* tile_size=8"),
        (lambda _: not_finite(), "int8", {"path": "one"}, ValueError, "'one' cannot .*not finite"),
        (
            lambda rngs: quantize(Mixed(rngs), "int8", path="blocks/0"),
            *("nf4", {"path": "blocks/0"}, ValueError, "quantised already"),
        ),
        (lambda _: 3, "int8", {}, TypeError, "expected an nnx.Module"),
    ],
)
def test_bad_input(make, qtype, options, error, message):
    with pytest.raises(error, match=message):
        quantize(make(nnx.Rngs(0)), qtype, **options)


def adapt(model):
    return apply_dora(model, RULES[1:], rngs=nnx.Rngs(1))


def make_bank(model):
    return jax_dora.AdapterBank(model, 1, 8)


def merge_and_requantise(model):
    return merge_dora(model, requantize=True, return_report=True)


# What reads a kernel, what an error says it cannot be, and whether it takes an adapted model.
READERS = [
    (adapt, "adapted", False),
    (make_bank, "given a place in a bank", False),
    (norms, "given a norm", True),
    (jax_dora.freeze, "given a norm", True),
    (merge_dora, "merged", True),
    (merge_and_requantise, "merged", True),
]


@functools.cache
def stacked_in_nf4(is_adapted):
    model = quantize(Stacked(nnx.Rngs(0)), "nf4", tile_size=4)
    return adapt(model) if is_adapted else model


@pytest.mark.parametrize(("read", "done", "takes_adapted"), READERS)
@pytest.mark.parametrize("value", [0, jnp.nan])
def test_scales_of_a_stack_are_checked(read, done, takes_adapted, value):
    """Each layer's norm is computed under a trace, which no longer knows the scales."""
    model = nnx.clone(stacked_in_nf4(takes_adapted))
    kernel = model.blocks.linear.kernel
    good = kernel.get_value()
    bad = qwix.QArray(good.qvalue, good.scale.at[1, 0, 3].set(value), None, good.qtype)
    kernel.set_value(bad)
    message = rf"'blocks/linear' cannot be {done}: its kernel .* nf4 with scales .*: give a tile"
    with pytest.raises(ValueError, match=message):
        read(model)


@pytest.mark.parametrize("part", ["codes", "zero points"])
def test_codes_that_are_not_numbers_are_refused(part):
    model = nnx.Dict(one=nnx.Linear(8, 6, rngs=nnx.Rngs(0)))
    good = quantize(model, "float8_e4m3fn").one.kernel.get_value()
    codes, zeros = good.qvalue, jnp.zeros((1, 6))
    if part == "codes":
        codes = codes.at[3, 2].set(jnp.nan)
    else:
        zeros = zeros.at[0, 2].set(jnp.nan)
    model = quantize(model, "float8_e4m3fn")
    model.one.kernel.set_value(qwix.QArray(codes, good.scale, zeros, good.qtype))
    with pytest.raises(ValueError, match=r"'one' cannot be adapted: .* NaN; .* quantise it again"):
        adapt(model)
    model.one.kernel.set_value(
        qwix.QArray(good.qvalue, good.scale, zeros.astype(jnp.complex64), good.qtype)
    )
    with pytest.raises(TypeError, match="zero points of complex64; expected integers or real"):
        adapt(model)


def test_a_merge_that_is_not_finite_is_reported_or_refused():
    model = adapt(quantize(nnx.Dict(one=nnx.Linear(128, 32, rngs=nnx.Rngs(0))), "int8"))
    for factor in (model.one.lora_a, model.one.lora_b):  # Their product overflows.
        factor.set_value(jnp.full_like(factor[...], 1e25))
    (row,) = merge_dora(model, return_report=True)[1].layers
    assert np.isnan([row.change, row.max_abs]).all()
    with pytest.raises(ValueError, match=r"'one' cannot be merged: .* kernel .* not finite"):
        merge_and_requantise(model)


def test_a_numpy_number_is_a_tile_size():
    kernel = quantize(nnx.Linear(64, 3, rngs=nnx.Rngs(0)), "nf4", tile_size=np.int64(32)).kernel
    assert kernel.get_value().scale.shape == (2, 3)


LAYERS = [
    (lambda: nnx.Linear(8, 6, rngs=nnx.Rngs(0)), (8, 1)),
    (lambda: nnx.LinearGeneral(8, (2, 3), rngs=nnx.Rngs(0)), (8, 1, 1)),
    (lambda: nnx.Einsum("bd,nhd->bnh", (2, 3, 8), rngs=nnx.Rngs(0)), (1, 1, 8)),
    (lambda: Stacked(nnx.Rngs(0)).blocks.linear, (3, 8, 1)),
]


@pytest.mark.parametrize(("read", "done", "takes_adapted"), READERS)
@pytest.mark.parametrize(("make", "tiles"), thinned(LAYERS, LAYERS[1:2]))
def test_a_kernel_quantised_along_the_wrong_axis(make, tiles, read, done, takes_adapted):
    model = quantize(nnx.Dict(one=make()), "int8")
    model = adapt(model) if takes_adapted else model
    codes = model.one.kernel[...].qvalue
    model.one.kernel.set_value(qwix.QArray(codes, jnp.ones(tiles), None, "int8"))
    message = (
        rf"'one' cannot be {done}: (its )?kernel is quantised as int8 along its output axis: .*: "
        "quantise the transpose"
    )
    with pytest.raises(ValueError, match=message):
        read(model)


@pytest.mark.parametrize(("read", "done", "takes_adapted"), READERS)
def test_an_unsupported_format(read, done, takes_adapted):
    model = quantize(nnx.Dict(one=nnx.Linear(8, 6, rngs=nnx.Rngs(0))), "int8")
    model = adapt(model) if takes_adapted else model
    kernel = model.one.kernel[...]
    e5m2 = jnp.dtype(jnp.float8_e5m2)
    model.one.kernel.set_value(qwix.QArray(kernel.qvalue.astype(e5m2), kernel.scale, None, e5m2))
    message = rf"'one' cannot be {done}: its kernel .* float8_e5m2; expected one of nf4, int4, .*:"
    with pytest.raises(TypeError, match=message):
        read(model)


def quantised_by_hand(make, qtype=jnp.int8, **how):
    """A model whose plain layer `one` does not know that its kernel is quantised."""
    model = nnx.Dict(one=make())
    kernel = model.one.kernel
    kernel.set_value(qwix.quantize(kernel.get_value(), qtype, **how))
    return model


BY_HAND = [
    (lambda: nnx.Linear(8, 6, rngs=nnx.Rngs(0)), (1,), (5, 8)),
    (lambda: nnx.LinearGeneral(8, (2, 3), rngs=nnx.Rngs(0)), (1, 2), (5, 8)),
    (lambda: nnx.Einsum("bd,nhd->bnh", (2, 3, 8), rngs=nnx.Rngs(0)), (0, 1), (5, 8)),
    (lambda: nnx.Conv(4, 6, (3,), rngs=nnx.Rngs(0)), (2,), (5, 7, 4)),
]


@pytest.mark.ci
@pytest.mark.parametrize(("make", "axes", "shape"), BY_HAND)
def test_a_kernel_that_quantize_did_not_set(make, axes, shape):
    model = quantised_by_hand(make, channelwise_axes=axes)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    assert coverage(model).count("adaptable") == 1
    adapted = train(apply_dora(model, DoRARule("one", 3, 4.0), rngs=nnx.Rngs(1)))
    close(adapted.one(x), dense(adapted).one(x))
    again = jax_dora.set_adapter(model, jax_dora.get_adapter(adapted))
    np.testing.assert_array_equal(again.one(x), adapted.one(x))
    with jax.numpy_dtype_promotion("standard"):
        merged = merge_dora(adapted).one(x)
    close(merged, adapted.one(x), 2e-2)
    if isinstance(model.one, nnx.Conv):
        return
    bank = jax_dora.AdapterBank(model, 1, 3).load(0, jax_dora.get_adapter(adapted))
    rows = jax_dora.with_bank(model, bank, jnp.array([0, -1, 0, -1, 0], jnp.int32)).one(x)
    close([rows[::2], rows[1::2]], [adapted.one(x)[::2], dense(model).one(x)[1::2]])


def test_a_layer_that_quantises_activations_still_does_after_adapting():
    base = quantize(
        nnx.Linear(16, 6, rngs=nnx.Rngs(0)), "float8_e4m3fn", path="", act_qtype="float8_e4m3fn"
    )
    adapted = apply_dora(base, DoRARule("", 3, 4.0), rngs=nnx.Rngs(1))
    assert adapted.dot_general is base.dot_general


def quantised_embed():
    model = nnx.Dict(one=nnx.Embed(8, 6, rngs=nnx.Rngs(0)))
    table = model.one.embedding
    table.set_value(qwix.quantize(table.get_value(), jnp.int8, channelwise_axes=(0,)))
    return model


def of_qwix(rngs):
    """A model with `WithAux` values in place of parameters."""
    provider = qwix.PtqProvider([qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8)])
    return qwix.quantize_model(
        nnx.Sequential(nnx.Linear(8, 6, rngs=rngs)), provider, jnp.ones((2, 8))
    )


# qwix uses methods of nnx that are deprecated.
ignore_qwix = pytest.mark.filterwarnings("ignore::DeprecationWarning")
READ_OF_QWIX = [
    adapt,
    make_bank,
    lambda model: quantize(model, "int8"),
    lambda model: apply_dora(model, RULES[1:], rngs=nnx.Rngs(1), example=(jnp.ones((2, 8)),)),
]


@ignore_qwix
@pytest.mark.parametrize("read", READ_OF_QWIX)
def test_a_model_that_qwix_quantised(read):
    message = (
        r"(?s)cannot be .*layers/0 .*WithAux; expected an nnx.Param: .* with jax_dora.quantize"
    )
    with pytest.raises(TypeError, match=message):
        read(of_qwix(nnx.Rngs(0)))


@ignore_qwix
@pytest.mark.parametrize("example", [(), (jnp.ones((2, 8)),)])
def test_coverage_of_a_model_that_qwix_quantised(example):
    (row,) = coverage(of_qwix(nnx.Rngs(0)), *example).weights
    assert row.status == "not adaptable"
    assert "its kernel is a WithAux" in row.how


def in_dtype(dtype):
    model = nnx.Dict(one=nnx.Linear(8, 6, rngs=nnx.Rngs(0)))
    model.one.kernel.set_value(model.one.kernel.get_value().astype(dtype))
    return model


REFUSED = [
    (lambda: in_dtype(jnp.float8_e5m2), "kernel has dtype float8_e5m2; expected float16"),
    (lambda: in_dtype(jnp.int8), "kernel has dtype int8; expected float16"),
    (
        lambda: quantised_by_hand(BY_HAND[0][0], jnp.float8_e5m2, channelwise_axes=(1,)),
        "its kernel is quantised as float8_e5m2; expected one of nf4",
    ),
    (
        lambda: quantised_by_hand(BY_HAND[0][0], channelwise_axes=(0,)),
        "its kernel is quantised as int8 along its output axis",
    ),
    (quantised_embed, "its embedding is quantised as int8, scales 8×1, with which no nnx.Embed"),
    (
        lambda: nnx.Dict(one=nnx.Linear(8, 6, dot_general=jnp.dot, rngs=nnx.Rngs(0))),
        "the layer's dot_general is ",
    ),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_coverage_gives_the_reason_for_which_apply_dora_refuses(make, reason):
    model = make()
    (row,) = coverage(model).weights
    assert row.status == "not adaptable"
    assert row.how.startswith(reason)
    errors = (TypeError, ValueError, NotImplementedError)
    with pytest.raises(errors, match=f"'one' cannot be adapted: {reason}"):
        apply_dora(model, DoRARule("one", 3, 4.0), rngs=nnx.Rngs(1))


def test_a_bank_refuses_a_kernel_of_another_dtype():
    message = "'one' cannot be given a place in a bank: kernel has dtype float8_e5m2"
    with pytest.raises(TypeError, match=message):
        make_bank(in_dtype(jnp.float8_e5m2))


def test_peft_folders_store_no_quantised_layer(tmp_path):
    plain = nnx.Dict(up=nnx.Linear(8, 6, rngs=nnx.Rngs(0)), down=nnx.Linear(6, 8, rngs=nnx.Rngs(1)))
    base = quantize(plain, "int8", path="up")
    model, of_floats = (
        apply_dora(one, DoRARule("down", 2, 4.0), rngs=nnx.Rngs(2)) for one in (base, plain)
    )
    message = "modules_to_save .* has up.weight, whose layer 'up' is quantised as int8, scales 1×6;"
    with pytest.raises(ValueError, match=message):
        save_adapter(model, tmp_path / "refused", modules_to_save=["up"])
    assert not (tmp_path / "refused").exists()
    save_adapter(of_floats, tmp_path / "floats", modules_to_save=["up"])
    with pytest.raises(ValueError, match=message):
        load_adapter(base, tmp_path / "floats")
    model.up.bias.set_value(jnp.arange(6.0))
    save_adapter(model, tmp_path / "biases", bias="all")
    loaded = load_adapter(base, tmp_path / "biases")
    np.testing.assert_array_equal(loaded.up.bias[...], model.up.bias[...])


@pytest.mark.ci
def test_tiles_are_split_so_that_they_divide_over_devices(optimized):
    """6 tiles over 4 devices; otherwise XLA would send the kernel to every device."""
    layers = [nnx.Linear(24, 16, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2)]
    mesh = automatic(x=2, y=2)
    on_mesh = NamedSharding(mesh, PartitionSpec(("x", "y"), None))
    layers[0].kernel.set_value(jax.device_put(layers[0].kernel[...], on_mesh))
    found, wanted = (
        quantize(nnx.Dict(one=layer), "nf4", tile_size=4).one.kernel[...] for layer in layers
    )
    assert (found.scale.shape, wanted.scale.shape) == ((12, 16), (6, 16))
    assert found.scale.sharding.spec == on_mesh.spec
    np.testing.assert_array_equal(qwix.dequantize(found), qwix.dequantize(wanted))
    lora_a = jax.device_put(jnp.ones((24, 2)), on_mesh)
    lora_b = jax.device_put(jnp.ones((2, 16)), NamedSharding(mesh, PartitionSpec()))
    text = jax.jit(jax_dora.ops.factored_norm).lower(found, lora_a, lora_b, 1.0).compile().as_text()
    # The squares, summed in parts that are then gathered.
    assert [one.bytes for one in collectives(text)] == [4 * 16, 4 * 16]


def test_nan_is_refused_in_optimized_programs(optimized):
    layer = nnx.Linear(128, 64, rngs=nnx.Rngs(0))
    layer.kernel.set_value(layer.kernel[...].at[3, 1].set(jnp.nan))
    with pytest.raises(ValueError, match=r"'one' cannot be quantised: .* not finite, in 1 of"):
        quantize(nnx.Dict(one=layer), "nf4")


def test_without_qwix(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax-dora\[quantised\]'"):
        quantize(Mixed(nnx.Rngs(0)), "int8")


@pytest.mark.ci
def test_nothing_imports_qwix_unasked():
    code = "import sys, jax_dora; assert 'qwix' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_that_all_linear_leaves_out_are_named(caplog):
    class Own(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((16, 8)))
            self.dense = nnx.Linear(8, 16, rngs=nnx.Rngs(0))

    model = jax_dora.quantize(Own(), "int8")
    assert isinstance(model.dense.kernel.get_value(), qwix.QArray)
    assert "leaves out weights" in caplog.text
    assert caplog.text.rstrip().endswith("w [16, 8]")
    caplog.clear()
    jax_dora.quantize(Own(), "int8", path="dense")
    assert not caplog.text


def test_norms_of_stacked_layers_are_no_weights_left_out(caplog):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(8))
            self.norm = nnx.RMSNorm(8, rngs=rngs)
            self.dense = nnx.Linear(8, 16, rngs=rngs)

    blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block))(nnx.Rngs(0))
    model = jax_dora.quantize(nnx.List([blocks]), "int8")
    assert isinstance(model[0].dense.kernel.get_value(), qwix.QArray)
    assert not caplog.text
