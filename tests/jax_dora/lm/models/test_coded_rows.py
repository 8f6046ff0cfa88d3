"""A decoder in FP8 on both sides: its norms and SwiGLU make the codes that its projections take."""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dora
from jax_dora import DoRARule
from jax_dora.layers.quantised_kernel import takes_codes
from jax_dora.lm.finetune.training import accumulate, accumulate_with
from jax_dora.lm.models import CausalLM
from jax_dora.lm.models.decoder import step_options
from jax_dora.lm.models.decoder_layer import RMSNorm
from jax_dora.ops import row_scaled
from tests.jax_dora.bank.adapters import drawn
from tests.jax_dora.lm.models.conftest import SMALL
from tests.jax_dora.meshes import automatic
from tests.jax_dora.programs import equations, gradient_of_logits
from tests.jax_dora.small_models import train
from tests.tables import ci, slow

FP8 = "float8_e4m3fn"
TOKENS = np.random.default_rng(0).integers(0, 97, (4, 9)).astype(np.int32)


@functools.cache
def base(act_qtype=FP8, bwd_qtype=None):
    model = CausalLM(SMALL, rngs=nnx.Rngs(0))
    # Larger weights than a fresh model's, whose layers change little.
    for layer in (model.model.layers.self_attn, model.model.layers.mlp):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            if hasattr(layer, name):
                getattr(layer, name).kernel[...] *= 8
    return jax_dora.quantize(model, FP8, path=".*_proj", act_qtype=act_qtype, bwd_qtype=bwd_qtype)


@functools.cache
def adapted(act_qtype=FP8):
    rule = DoRARule(".*_proj", 3, 4.0)
    return train(jax_dora.apply_dora(base(act_qtype), rule, rngs=nnx.Rngs(1)))


def test_a_step_in_fp8_alone_has_options():
    assert dict(step_options(base(FP8, "float8_e5m2"))) == {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 1,
        "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
        "xla_gpu_memory_limit_slop_factor": 200,
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    }
    assert step_options(base()) == ()
    assert accumulate_with(()) is accumulate


@functools.cache
def gradients_and_types(bwd_qtype):
    """The gradients of adapters, and the types in which the program holds a plain kernel."""
    rule = DoRARule(".*(q|v|up)_proj", 3, 4.0)
    model = train(jax_dora.apply_dora(base(FP8, bwd_qtype), rule, rngs=nnx.Rngs(1)))
    model = jax_dora.with_norms(model, jax_dora.norms(model))  # these read kernels in blocks
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    def gradient(trained, frozen):
        def loss(trained):
            logits = nnx.merge(graphdef, trained, frozen)(TOKENS)
            return jax.nn.logsumexp(logits, axis=-1).mean()

        return jax.grad(loss)(trained)

    lowered = gradient.lower(trained, frozen)
    shape = model.model.layers.mlp.up_proj.kernel.shape[1:]
    types = re.findall(rf"tensor<(?:\d+x)?{shape[0]}x{shape[1]}x(\w+)>", lowered.as_text())
    return jax.tree.leaves(lowered.compile()(trained, frozen)), set(types)


@pytest.mark.ci
@pytest.mark.parametrize("bwd_qtype", [ci(FP8), "float8_e5m2"])
def test_gradients_in_fp8(bwd_qtype):
    """Through adapted and plain layers: near those in 16 bits, and by no kernel in floats."""
    exact, types = gradients_and_types(None)
    rounded, types_in_fp8 = gradients_and_types(bwd_qtype)
    assert types_in_fp8 <= {"f8E4M3FN", "i8"}
    assert not types <= {"f8E4M3FN", "i8"}
    limit = {FP8: 0.08, "float8_e5m2": 0.16}[bwd_qtype]  # a few roundings to 4 and to 3 bits
    for one, other in zip(exact, rounded, strict=True):
        error = np.linalg.norm(other - one) / np.linalg.norm(one)
        assert 0 < error < limit


def logits_of(model, tokens=TOKENS):
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state: nnx.merge(graphdef, state)(tokens))(state)


def made_codes(model, change=lambda model: model):
    """Returns the operators that make codes, and their widths."""
    graphdef, state = nnx.split(model)
    found = equations(lambda state: change(nnx.merge(graphdef, state))(TOKENS), state)
    ops = [one for one in found if one.primitive.name == "dora"]
    return sorted(
        (one.params["op"].name, one.outvars[0].aval.shape[-1])
        for one in ops
        if "codes" in one.params["op"].name
    )


@pytest.mark.parametrize(
    ("memory", "products", "codes"),
    [(1.0, 7, 1), slow(None, 7 + 7, 2)],
    ids=["kept", "computed again"],
)
def test_what_the_backward_pass_computes_again(memory, products, codes):
    """No product whose result is kept, and SwiGLU without its codes. A kept result is one array of
    the stack, the copy."""
    model = base(FP8, "float8_e5m2")
    model = jax_dora.apply_dora(model, DoRARule(".*_proj", 3, 4.0), rngs=nnx.Rngs(1))
    config = dataclasses.replace(SMALL, memory=memory, remat=True)
    model.model.config = model.config = config
    gradient, trained = gradient_of_logits(model, TOKENS)
    found = list(equations(gradient, trained))
    names = [one.params["op"].name for one in found if one.primitive.name == "dora"]
    assert names.count("project") == products
    assert names.count("swiglu_codes") == codes  # which the last product reads
    forward = next(one for one in found if one.primitive.name == "scan")
    wide = (SMALL.num_hidden_layers, *TOKENS.shape, SMALL.intermediate_size)
    kept = [one for one in forward.outvars if one.aval.shape == wide]
    assert len(kept) == (2 if memory else 0)
    # Without a barrier, XLA would compute a kept z again for the stack.
    behind = {id(y) for one in found if "barrier" in one.primitive.name for y in one.outvars}
    named = [one for one in found if one.params.get("name") == "dora_z"]
    assert named
    assert all(id(one.invars[0]) in behind for one in named)


def test_the_gradient_of_swiglu_computes_its_result_again(monkeypatch):
    """Once for all gradients, which are those of a program with a pass of its own for the result,
    such as one for a projection that is not adapted."""
    model = base(FP8, "float8_e5m2")
    model = train(jax_dora.apply_dora(model, DoRARule(".*_proj", 3, 4.0), rngs=nnx.Rngs(1)))

    def gradients_and_settings():
        gradient, trained = gradient_of_logits(model, TOKENS)
        found = equations(gradient, trained)
        calls = [one.params for one in found if one.primitive.name == "dora"]
        settings = [one["settings"] for one in calls if one["op"].name == "swiglu_backward"]
        return jax.tree.leaves(jax.jit(gradient)(trained)), settings

    found, [settings] = gradients_and_settings()
    assert settings.want_result
    ops = importlib.import_module("jax_dora.ops.swiglu")  # also the name of a function
    with_codes = ops._with_codes
    monkeypatch.setattr(ops, "_with_codes", lambda *call: with_codes(*call)._replace(gated=None))
    wanted, [settings] = gradients_and_settings()
    assert not settings.want_result
    for one, other in zip(found, wanted, strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


def coded(norm, layers, x):
    """The norm of x as the layers take it."""
    return jax_dora.layer_inputs(layers, norm(x), lambda: norm.with_largest(x))


def test_codes_of_a_norm_are_those_of_its_result():
    """The scale is that of the largest number, up to its own rounding, so nothing overflows."""
    norm = RMSNorm(64, dataclasses.replace(SMALL, dtype=jnp.bfloat16))
    rng = np.random.default_rng(0)
    norm.scale[...] = jnp.asarray(rng.normal(size=64), jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(3, 50, 64)) * np.exp(rng.normal(size=(3, 50, 1)) * 4))
    x = x.astype(jnp.bfloat16).at[0, 0].set(0).at[0, 1, 5].set(jnp.nan)
    layers = [base().model.layers.mlp.up_proj]
    rows = jax.jit(functools.partial(coded, norm, layers))(x)
    np.testing.assert_array_equal(*(one.astype(jnp.float32) for one in (rows.x, jax.jit(norm)(x))))
    assert not np.any(np.asarray(rows.codes[0, 0], np.float32))
    assert np.all(np.isnan(np.asarray(rows.codes[0, 1], np.float32)))
    y, codes = (np.asarray(one, np.float64).reshape(-1, 64)[2:] for one in rows[:2])
    scales = np.asarray(rows.scales, np.float64).reshape(-1)[2:]
    np.testing.assert_allclose(scales, np.abs(y).max(-1) / 448, rtol=2.0**-7)
    # Half a unit of three bits, and of the smallest number.
    bound = np.maximum(2.0**-4 * np.abs(y), 2.0**-10 * scales[:, None]) * (1 + 2.0**-7)
    assert np.all(np.abs(codes * scales[:, None] - y) <= bound)


def test_codes_of_a_norm_in_small_numbers():
    """Where fp16 rounds by more than the codes' range allows, codes are the largest."""
    norm = RMSNorm(64, dataclasses.replace(SMALL, dtype=jnp.float16))
    norm.scale[...] = jnp.full(64, 1e-4, jnp.float16)
    x = (1e-6 * jax.random.normal(jax.random.key(1), (200, 64))).astype(jnp.float16)
    rows = coded(norm, [base().model.layers.mlp.up_proj], x)
    assert np.all(np.isfinite(np.asarray(rows.codes, np.float32)))
    largest = np.abs(np.asarray(rows.x, np.float32)).max(-1)
    assert np.any(np.asarray(rows.scales) * 464 < largest)


@pytest.mark.parametrize("make", [base, slow(adapted)])
def test_layers_take_the_codes_that_are_made_before(make):
    """Codes are made for o_proj, by SwiGLU for down_proj if it is fused, and by the norms."""
    in_swiglu = "row_codes" if make is base else "swiglu_codes"
    assert made_codes(make()) == sorted([("row_codes", 32), (in_swiglu, 56)])
    assert made_codes(make(None)) == []


@pytest.mark.parametrize("make", [base, slow(adapted)])
@pytest.mark.ci
def test_near_the_model_whose_activations_are_not_quantised(make):
    found, wanted = (np.asarray(logits_of(make(one)), np.float32) for one in (FP8, None))
    off = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 1e-3 < off < 0.1


@pytest.mark.ci
def test_gradients_are_near_those_without_codes():
    def gradients(model):
        graphdef, params, rest = nnx.split(model, jax_dora.DoRAParam, ...)

        def loss(params):
            logits = nnx.merge(graphdef, params, rest)(TOKENS).astype(jnp.float32)
            return (logits * jnp.sin(jnp.arange(logits.size).reshape(logits.shape))).mean()

        return jax.jit(jax.grad(loss))(params)

    found, wanted = (
        np.concatenate([np.ravel(one) for one in jax.tree.leaves(gradients(adapted(kind)))])
        for kind in (FP8, None)
    )
    off = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 1e-3 < off < 0.2


@pytest.mark.ci
def test_rows_of_the_base_in_a_bank_are_the_base_s():
    """A bank's layers take the codes that the base's layers take."""
    model = base()
    bank = jax_dora.AdapterBank(model, 2, 4)
    bank = bank.load(0, drawn(bank, dict.fromkeys(bank.projections, 4)))
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, bank, ids):
        return jax_dora.with_bank(nnx.merge(graphdef, state), bank, ids)(TOKENS)

    found, wanted = run(state, bank, np.array([-1, 0, -1, 0])), logits_of(model)
    np.testing.assert_array_equal(found[::2], wanted[::2])
    ids = np.zeros(4, np.int32)
    assert made_codes(model, lambda one: jax_dora.with_bank(one, bank, ids)) == made_codes(model)
    assert np.all(np.any(found[1::2] != wanted[1::2], axis=(1, 2)))


@pytest.mark.ci
@pytest.mark.parametrize("axis", ["rows", "features"])
def test_on_two_devices(axis):
    """Rows on two devices have their own codes; a row that two devices share has one scale."""
    mesh, model = automatic(x=2), adapted()
    graphdef, state = nnx.split(model)

    def placed(path, one):
        by_rows = {"o_proj", "down_proj"} & {str(getattr(key, "key", "")) for key in path}
        spec = P()
        if axis == "features" and one.ndim == 3 and "kernel" in str(path):
            spec = P(None, *(("x", None) if by_rows else (None, "x")))
            spec = P(*(a if n > 1 else None for a, n in zip(spec, one.shape, strict=True)))
        return jax.device_put(one, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        tokens = jax.device_put(
            TOKENS, NamedSharding(mesh, P("x" if axis == "rows" else None, None))
        )
        sharded = jax.tree_util.tree_map_with_path(placed, state)
        found = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))(sharded, tokens)
    found, wanted = np.asarray(found), np.asarray(logits_of(model))
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


def test_a_table_of_the_model():
    assert "mlp/down_proj" in nnx.tabulate(base(), TOKENS, console_kwargs={"width": 400})


def test_an_empty_batch():
    assert logits_of(adapted(), TOKENS[:0]).shape == (0, 9, 97)


def test_a_layer_takes_codes_or_says_that_it_does_not():
    layers = base().model.layers
    assert takes_codes(layers.mlp.up_proj)
    assert takes_codes(adapted().model.layers.mlp.up_proj)
    assert not takes_codes(base(None).model.layers.mlp.up_proj)
    assert not takes_codes(base().lm_head)

    class Other(jax_dora.DoRALinear):
        pass

    other = Other(4, 4, rank=2, alpha=2.0, rngs=nnx.Rngs(0))
    other = jax_dora.quantize(nnx.Dict(one=other), FP8, act_qtype=FP8).one
    assert not takes_codes(other)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.ci
def test_a_layer_computes_the_same_with_codes(is_adapted, use_bias):
    layer = nnx.Linear(16, 24, use_bias=use_bias, rngs=nnx.Rngs(0))
    model = jax_dora.quantize(nnx.Dict(one=layer), FP8, act_qtype=FP8)
    if is_adapted:
        model = train(jax_dora.apply_dora(model, DoRARule("one", 3, 4.0), rngs=nnx.Rngs(1)))
    layer = model.one
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 16)), jnp.float32)

    def both(make, x):
        y, pull = jax.vjp(lambda x: layer(make(x)), x)
        return y, pull(jnp.sin(y))

    found = jax.jit(functools.partial(both, row_scaled.coded))(x)
    wanted = jax.jit(functools.partial(both, lambda x: x))(x)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    # The layer reads these codes and makes none of its own.
    rows = row_scaled.coded(x)
    doubled = rows._replace(scales=2 * rows.scales)
    assert np.all(np.any(layer(doubled) != layer(rows), axis=-1))
    # Codes of another dtype's rows are made again.
    halves = x.astype(jnp.float16)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(layer(row_scaled.coded(halves)), layer(halves))
