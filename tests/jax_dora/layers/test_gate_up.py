"""`jax_dora.swiglu`: what two layers compute one after the other, and nothing of it in memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dora
from jax_dora import DoRALinear, ops
from jax_dora.layers.gate_up import _can_fuse
from jax_dora.ops.projection_products import FORWARD
from parity import oracle, tolerances
from tests.jax_dora.meshes import mesh_of
from tests.jax_dora.programs import equations
from tests.tables import thinned

IN, OUT, RANK, ALPHA = 96, 80, 6, 9.0
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def make(seed: int, **options) -> DoRALinear:
    """A layer as training leaves it: lora_b away from zero, the magnitude from the norm."""
    options = {"rank": RANK, "alpha": ALPHA, "use_bias": False, **options}
    layer = DoRALinear(
        *(IN, OUT),
        lora_b_init=nnx.initializers.normal(0.1),
        bias_init=nnx.initializers.normal(0.5),
        rngs=nnx.Rngs(seed),
        **options,
    )
    layer.magnitude[...] *= 1 + 0.05 * jax.random.normal(jax.random.key(seed), (OUT,))
    return layer


def plain(gate, up, x, **options):
    return jax.nn.silu(gate(x, **options)) * up(x, **options)


def run(function, pair, x, dh):
    """The result, and its gradients with respect to x and all parameters."""
    graphdef, state = nnx.split(nnx.Dict(gate=pair[0], up=pair[1]))

    def call(state, x):
        model = nnx.merge(graphdef, state, copy=True)
        return function(model.gate, model.up, x)

    h, vjp = jax.vjp(call, state, x)
    return h, *vjp(dh)


def drawn(dtype, shape=(3, 5)):
    x = jax.random.normal(jax.random.key(1), (*shape, IN), dtype)
    return x, jax.random.normal(jax.random.key(2), (*shape, OUT), dtype)


def assert_near(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-12


@pytest.mark.parametrize(
    ("dtype", "use_bias"),
    thinned(itertools.product(DTYPES, [False, True]), [(jnp.float32, False), (jnp.bfloat16, True)]),
)
def test_agrees_with_fp64(dtype, use_bias):
    """No further from fp64, in the norm, than a few roundings of what the layers hand on."""
    pair = [make(seed, dtype=dtype, param_dtype=dtype, use_bias=use_bias) for seed in (3, 4)]
    x, dh = drawn(dtype)
    assert all(map(_can_fuse, pair))
    with jax.default_matmul_precision("highest"):
        h, d_state, d_x = run(jax_dora.swiglu, pair, x, dh)
    assert (h.dtype, d_x.dtype) == (dtype, dtype)

    layers = []
    for layer in pair:
        weight = oracle.from_flax(layer.kernel[...], layer.lora_a[...], layer.lora_b[...])
        layers.append((*weight, oracle.fp64(layer.magnitude[...]), layer.scale))
    biases = [0.0 if layer.bias is None else oracle.fp64(layer.bias[...]) for layer in pair]
    y = [
        oracle.dora_linear(x, *layer, bias=bias, dtype=dtype)
        for layer, bias in zip(layers, biases, strict=True)
    ]
    one = np.ones(OUT)
    # In fp32 the order of sums of a hundred products decides.
    u = max(tolerances.unit_roundoff(dtype), 2.0**-21)
    assert_near(h, oracle.swiglu(*y, one, one), 4 * u)
    d_y = oracle.swiglu_grads(dh, *y, one, one)[:2]
    d_x_exact = 0.0
    for name, layer, dy in zip(("gate", "up"), layers, d_y, strict=True):
        want = oracle.dora_linear_grads(dy, x, *layer, dtype=dtype)
        d_x_exact = d_x_exact + want.d_x
        got = d_state[name]
        assert_near(got["lora_a"][...].T, want.d_lora_a, 8 * u)
        assert_near(got["lora_b"][...].T, want.d_lora_b, 8 * u)
        assert_near(got["magnitude"][...], want.d_magnitude, 8 * u)
        if use_bias:
            assert_near(got["bias"][...], dy.reshape(-1, OUT).sum(0), 8 * u)
    assert_near(d_x, d_x_exact, 8 * u)


class Own(DoRALinear):
    """Computes something else."""

    def __call__(self, inputs, *args, **options):
        return 2 * super().__call__(inputs, *args, **options)


@pytest.mark.parametrize(
    "pair",
    [
        (lambda: Own(IN, OUT, rank=2, alpha=2, rngs=nnx.Rngs(0)), lambda: make(1)),
        (lambda: nnx.Linear(IN, OUT, rngs=nnx.Rngs(0)), lambda: make(1)),
        (lambda: make(0, implementation="xla"), lambda: make(1)),
        (lambda: make(0, dropout=0.5, dropout_mode="input"), lambda: make(1)),
        (lambda: make(0, dtype=jnp.bfloat16), lambda: make(1)),
    ],
)
def test_other_layers_are_called_as_they_are(pair, monkeypatch):
    monkeypatch.setattr(jax_dora.ops, "swiglu", lambda *_, **__: pytest.fail("fused"))
    gate, up = (one() for one in pair)
    for layer in (gate, up):
        layer.eval()
    x, _ = drawn(jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(jax_dora.swiglu(gate, up, x), plain(gate, up, x))


ALIKE = {
    "gate's bias alone": ({"use_bias": True}, {}),
    "up's bias alone": ({}, {"use_bias": True}),
    "kernels of two dtypes": ({"param_dtype": jnp.bfloat16, "dtype": jnp.float32}, {}),
}


@pytest.mark.parametrize("options", ALIKE.values(), ids=list(ALIKE))
@pytest.mark.ci
def test_layers_with_results_of_one_dtype_are_fused(options, monkeypatch):
    pair = [make(seed, **given) for seed, given in enumerate(options)]
    x, dh = drawn(jnp.float32)
    wanted = run(plain, pair, x, dh)
    monkeypatch.setattr(DoRALinear, "__call__", lambda *_, **__: pytest.fail("called"))
    found = run(jax_dora.swiglu, pair, x, dh)
    assert found[0].dtype == wanted[0].dtype
    assert_near(found, wanted, 2.0**-7 if "param_dtype" in options[0] else 1e-5)


@pytest.mark.parametrize("adapted", [False, True])
def test_layers_of_other_widths_are_refused(adapted):
    layers = [nnx.Linear(IN, OUT, rngs=nnx.Rngs(0)), nnx.Linear(IN, 1, rngs=nnx.Rngs(0))]
    if adapted:
        layers = [DoRALinear.from_linear(one, rank=2, alpha=4, rngs=nnx.Rngs(0)) for one in layers]
    x, _ = drawn(jnp.float32)
    with pytest.raises(ValueError, match=r"shape \(3, 5, 1\); expected gate's, \(3, 5, 80\)"):
        jax_dora.swiglu(*layers, x)


def test_plain_callables_take_no_options():
    x, _ = drawn(jnp.float32)
    h = jax_dora.swiglu(lambda x: x, lambda x: 2 * x, x)
    np.testing.assert_array_equal(h, jax.nn.silu(x) * (2 * x))


def test_options_go_to_the_layers_that_take_them():
    x, _ = drawn(jnp.float32)
    linear = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0))
    want = plain(linear, linear, x)
    np.testing.assert_array_equal(
        jax_dora.swiglu(linear, linear, x, deterministic=True, rngs=nnx.Rngs(0)), want
    )
    adapted = make(1, dropout=0.5)
    half = jax_dora.swiglu(adapted, linear, x, deterministic=True)
    want = jax.nn.silu(adapted(x, deterministic=True)) * linear(x)
    np.testing.assert_array_equal(half, want)
    with pytest.raises(TypeError, match="out_sharding"):
        jax_dora.swiglu(lambda x: x, lambda x: x, x, out_sharding=P(None))
    seen = []
    jax_dora.swiglu(*[lambda x, **o: seen.append(o) or x] * 2, x, deterministic=True)
    assert seen == [{"deterministic": True}] * 2


@pytest.mark.ci
def test_dropout_drops_what_the_layers_would():
    x, dh = drawn(jnp.float32)

    def pair():
        return [make(seed, dropout=0.5) for seed in (3, 4)]

    assert all(map(_can_fuse, pair()))
    found, wanted = (run(one, pair(), x, dh) for one in (jax_dora.swiglu, plain))
    # Counts of the dropout streams have gradients of no kind.
    assert_near(found[0], wanted[0], 1e-5)
    assert_near(found[2], wanted[2], 1e-5)
    gate, up = pair()
    still = jax_dora.swiglu(gate, up, x, deterministic=True)
    np.testing.assert_allclose(still, plain(*pair(), x, deterministic=True), rtol=1e-5, atol=1e-6)
    key = jax.random.key(9)
    given = [
        one(*pair(), x, rngs=nnx.Rngs(dropout=key), deterministic=False)
        for one in (jax_dora.swiglu, plain)
    ]
    np.testing.assert_allclose(*given, rtol=1e-5, atol=1e-6)


def test_given_and_frozen_norms_change_no_bit():
    x, _ = drawn(jnp.float32)
    model = nnx.Dict(gate=make(3), up=make(4))
    h = jax_dora.swiglu(model.gate, model.up, x)
    for one in (jax_dora.freeze(model), jax_dora.with_norms(model, jax_dora.norms(model))):
        np.testing.assert_array_equal(jax_dora.swiglu(one.gate, one.up, x), h)


def test_the_layers_results_are_not_kept(capsys):
    x, _ = drawn(jnp.bfloat16, (64,))
    pair = [make(seed, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16) for seed in (3, 4)]
    graphdef, state = nnx.split(nnx.Dict(gate=pair[0], up=pair[1]))

    def kept(function):
        def call(state, x):
            model = nnx.merge(graphdef, state)
            return function(model.gate, model.up, x).astype(jnp.float32).sum()

        print_saved_residuals(call, state, x)
        return capsys.readouterr().out.count(f"[64,{OUT}]")

    assert kept(jax_dora.swiglu) == 2
    assert kept(plain) >= 4


def test_inner_can_be_kept():
    x, dh = drawn(jnp.float32, (7,))

    def products(keep_inner):
        pair = [make(seed, keep_inner=keep_inner) for seed in (3, 4)]
        graphdef, state = nnx.split(nnx.Dict(gate=pair[0], up=pair[1]))

        def block(state, x):
            model = nnx.merge(graphdef, state)
            return jax_dora.swiglu(model.gate, model.up, x)

        remat = jax.checkpoint(block, policy=jax_dora.remat_policy())
        grad = jax.grad(lambda state: jnp.vdot(remat(state, x), dh))
        found = [one.params.get("op") for one in equations(grad, state)]
        return found.count(FORWARD), grad(state)

    (without, first), (kept, second) = products(keep_inner=False), products(keep_inner=True)
    assert without - kept == 2  # one of either layer
    assert_near(second, first, 1e-5)


@pytest.mark.parametrize("kind", thinned([AxisType.Auto, AxisType.Explicit], [AxisType.Explicit]))
def test_on_a_mesh(kind):
    mesh = mesh_of(kind, data=2, model=4)
    pair = [make(seed) for seed in (3, 4)]
    x, _ = drawn(jnp.float32, (8,))
    want = plain(*pair, x)

    with jax.set_mesh(mesh):

        def put(array, *spec):
            return jax.device_put(array, NamedSharding(mesh, P(*spec)))

        for layer in pair:
            for name, spec in (
                ("kernel", (None, "model")),
                ("lora_a", (None, None)),
                ("lora_b", (None, "model")),
                ("magnitude", ("model",)),
            ):
                parameter = getattr(layer, name)
                parameter.set_value(put(parameter[...], *spec))
        x = put(x, "data", None)
        h = nnx.jit(jax_dora.swiglu)(*pair, x)
        assert tuple(h.sharding.spec) == ("data", "model")
        np.testing.assert_allclose(h, want, rtol=1e-5, atol=1e-6)
        if kind is AxisType.Explicit:
            wanted = P("data", "model")
            h = nnx.jit(lambda gate, up, x: jax_dora.swiglu(gate, up, x, wanted))(*pair, x)
            assert h.sharding.spec == wanted
            np.testing.assert_allclose(h, want, rtol=1e-5, atol=1e-6)


def test_lora_linear_is_inner():
    layer, (x, dy) = make(3), drawn(jnp.float32)
    operands = (x, layer.kernel[...], layer.lora_a[...], layer.lora_b[...])

    def dense(x, kernel, lora_a, lora_b):
        return x @ (kernel + layer.scale * lora_a @ lora_b)

    with jax.default_matmul_precision("highest"):
        y, vjp = jax.vjp(functools.partial(ops.lora_linear, scale=layer.scale), *operands)
        want, want_vjp = jax.vjp(dense, *operands)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    for a, b in zip(vjp(dy), want_vjp(dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    seed = ops.draw_seed(jax.random.key(0))
    with pytest.raises(NotImplementedError, match="dropout has mode 'input'"):
        ops.lora_linear(*operands, layer.scale, dropout=ops.Dropout(seed, 0.5, "input"))
    still = ops.lora_linear(*operands, layer.scale, dropout=ops.Dropout(seed, 0.0, "input"))
    np.testing.assert_array_equal(still, ops.lora_linear(*operands, layer.scale))
    narrow = (x, *(jnp.ones(s) for s in ((IN, 15), (IN, 2), (2, 15))))
    with pytest.raises(NotImplementedError, match="lora_linear: implementation 'mosaic'"):
        ops.lora_linear(*narrow, 1.0, implementation="mosaic")
    with pytest.raises(ValueError, match="its last axis must have kernel's 96"):
        ops.lora_linear(x[..., 1:], *operands[1:], layer.scale)
