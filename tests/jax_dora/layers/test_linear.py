"""`DoRALinear`: against the oracle, under every transform, and in the hands of an optimizer."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_dora
from jax_dora import DoRALinear, DoRAParam, ops
from jax_dora.ops import draw_seed
from jax_dora.ops.dropout import drop
from parity import oracle, tolerances
from tests.jax_dora.meshes import automatic
from tests.matrices import within
from tests.tables import thinned

IN, OUT, RANK, ALPHA = 96, 80, 6, 9.0
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
nonzero = nnx.initializers.normal(0.1)


def make(**options) -> DoRALinear:
    """A layer as training leaves it: lora_b away from zero, the magnitude from the norm."""
    options = {"rank": RANK, "alpha": ALPHA, "lora_b_init": nonzero, **options}
    layer = DoRALinear(IN, OUT, bias_init=nnx.initializers.normal(0.5), rngs=nnx.Rngs(0), **options)
    layer.magnitude[...] *= 1 + 0.02 * jax.random.normal(jax.random.key(5), (OUT,))
    return layer


def inputs(dtype=jnp.float32, shape=(3, 5)) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*shape, IN), dtype)


def torch_layout(layer: DoRALinear) -> tuple[np.ndarray, ...]:
    weights = oracle.from_flax(layer.kernel[...], layer.lora_a[...], layer.lora_b[...])
    return (*weights, oracle.fp64(layer.magnitude[...]))


def adapter_grads(layer: DoRALinear, x: jax.Array, dy: jax.Array, **options) -> nnx.State:
    def objective(layer, x):
        return jnp.vdot(layer(x, **options).astype(jnp.float32), dy.astype(jnp.float32))

    return nnx.jit(nnx.grad(objective, argnums=nnx.DiffState(0, nnx.LoRAParam)))(layer, x)


@pytest.mark.parametrize(
    ("dtype", "use_rslora"),
    thinned(
        [*itertools.product(DTYPES, [False]), (jnp.float32, True)],
        [(jnp.float32, True), (jnp.bfloat16, False)],
    ),
)
def test_agrees_with_the_oracle(dtype, use_rslora):
    layer = make(param_dtype=dtype, use_rslora=use_rslora)
    assert layer.scale == ALPHA / (math.sqrt(RANK) if use_rslora else RANK)
    x = inputs(dtype)
    dy = jax.random.normal(jax.random.key(2), (3, 5, OUT), dtype)
    y = layer(x)
    chex.assert_shape(y, (3, 5, OUT))
    assert y.dtype == dtype

    args = (x, *torch_layout(layer), layer.scale)
    bias = layer.bias[...]
    bounds = tolerances.dora_linear(dy, *args, dtype, bias=bias)
    expected = oracle.dora_linear(*args, bias=bias, dtype=dtype)
    within(y.reshape(-1, OUT), expected.reshape(-1, OUT), bounds.y)

    grads = adapter_grads(layer, x, dy)
    expected = oracle.dora_linear_grads(dy, *args, dtype=dtype)
    within(grads["lora_a"][...].T, expected.d_lora_a, bounds.d_lora_a)
    within(grads["lora_b"][...].T, expected.d_lora_b, bounds.d_lora_b)
    within(grads["magnitude"][...], expected.d_magnitude, bounds.d_magnitude)
    for name, grad in grads.items():
        assert grad[...].dtype == jnp.float32, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_adapter_is_the_identity(dtype):
    linear = nnx.Linear(
        IN, OUT, param_dtype=dtype, bias_init=nnx.initializers.normal(0.5), rngs=nnx.Rngs(0)
    )
    layer = DoRALinear.from_linear(linear, rank=RANK, alpha=ALPHA, rngs=nnx.Rngs(1))
    x = inputs(dtype)
    chex.assert_trees_all_equal(layer(x), linear(x))
    chex.assert_trees_all_equal(
        nnx.jit(lambda layer, x: layer(x))(layer, x),
        nnx.jit(lambda linear, x: linear(x))(linear, x),
    )


@pytest.mark.parametrize(
    ("dtype", "param_dtype"),
    thinned(
        itertools.product([None, jnp.float32, jnp.bfloat16], [jnp.float32, jnp.bfloat16]),
        [(None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)],
    ),
)
def test_fresh_adapter_is_the_identity_whatever_a_columns_norm(dtype, param_dtype):
    """Of columns whose norm lies below eps, or whose squares underflow or overflow."""
    columns = jnp.asarray([[1, 0, 1e-7, 1e-13, 1e-30, 1e25]], param_dtype)
    linear = nnx.Linear(
        IN,
        6,
        dtype=dtype,
        param_dtype=param_dtype,
        use_bias=False,
        kernel_init=lambda key, shape, dtype: columns * jax.random.normal(key, shape, dtype),
        rngs=nnx.Rngs(0),
    )
    layer = jax_dora.apply_dora(linear, jax_dora.DoRARule("", RANK, ALPHA), rngs=nnx.Rngs(1))
    with jax.numpy_dtype_promotion("standard"):
        for x in (inputs(), inputs(jnp.bfloat16)):
            chex.assert_trees_all_equal(layer(x), linear(x))
    values = jax_dora.norms(layer)
    x = inputs(param_dtype)
    chex.assert_trees_all_equal(jax_dora.with_norms(layer, values)(x), layer(x))
    merged = jax_dora.merge_dora(layer)
    chex.assert_trees_all_equal(merged.kernel[...], linear.kernel[...])


@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "rank"),
    [
        *thinned(
            itertools.product(DTYPES, [jnp.float32, jnp.bfloat16], [RANK]),
            [(jnp.float16, jnp.bfloat16, RANK)],
        ),
        (jnp.float32, jnp.float32, 1),
        (jnp.bfloat16, jnp.float32, 200),
    ],
)
def test_fresh_adapter_has_unit_scale_for_any_lora_b(dtype, adapter_dtype, rank):
    layer = DoRALinear(
        IN,
        OUT,
        rank=rank,
        alpha=ALPHA,
        param_dtype=dtype,
        adapter_dtype=adapter_dtype,
        lora_b_init=nonzero,
        rngs=nnx.Rngs(0),
    )

    def g(layer):
        return ops.magnitude_scale(layer.magnitude[...], layer.norm(), dtype)

    chex.assert_trees_all_equal(g(layer), jnp.ones(OUT), nnx.jit(g)(layer))


def test_result_has_the_dtype_that_linear_returns():
    def results(dtype, param_dtype, x):
        options = {"param_dtype": param_dtype, "dtype": dtype, "rngs": nnx.Rngs(0)}
        layer = DoRALinear(IN, OUT, rank=2, alpha=1, **options)
        return layer(x), nnx.Linear(IN, OUT, **options)(x)

    with jax.numpy_dtype_promotion("standard"):
        for param_dtype in DTYPES:
            for dtype in (None, *DTYPES):
                for x in (inputs(jnp.bfloat16), inputs(), jnp.ones((2, IN), jnp.int32)):
                    call = functools.partial(results, dtype, param_dtype)
                    ours, theirs = nnx.eval_shape(call, x)
                    assert ours.dtype == theirs.dtype


def test_norm_is_of_the_parameters_whatever_the_computation():
    layer = make(dtype=jnp.bfloat16)
    reference = make()
    args = (inputs(jnp.bfloat16), *torch_layout(layer), layer.scale)
    expected = oracle.dora_linear(*args, bias=layer.bias[...], dtype=jnp.bfloat16)
    bound = 4 * tolerances.unit_roundoff(jnp.bfloat16) * np.abs(expected).max()
    within(layer(inputs(jnp.bfloat16)), expected, bound)
    chex.assert_trees_all_equal(layer.norm(), reference.norm())


def test_from_linear_shares_the_base_and_keeps_its_ways():
    linear = nnx.Linear(
        IN,
        OUT,
        use_bias=False,
        param_dtype=jnp.bfloat16,
        precision="highest",
        kernel_metadata={"owner": "base"},
        rngs=nnx.Rngs(0),
    )
    layer = DoRALinear.from_linear(linear, rank=RANK, alpha=ALPHA, rngs=nnx.Rngs(1))
    assert layer.kernel is linear.kernel
    assert layer.kernel.get_metadata("owner") == "base"
    assert layer.bias is None
    assert (layer.dtype, layer.param_dtype) == (linear.dtype, jnp.bfloat16)
    assert layer.precision == "highest"
    chex.assert_trees_all_equal(layer(inputs(jnp.bfloat16)), linear(inputs(jnp.bfloat16)))

    linear = nnx.Linear(IN, OUT, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer = DoRALinear.from_linear(linear, rank=RANK, alpha=ALPHA, rngs=nnx.Rngs(1))
    assert layer.bias is linear.bias
    assert layer(inputs()).dtype == jnp.bfloat16


def test_filters_find_the_adapter():
    layer = make()
    adapter = nnx.to_flat_state(nnx.state(layer, nnx.LoRAParam))
    assert {path: type(leaf) for path, leaf in adapter} == {
        ("lora_a",): nnx.LoRAParam,
        ("lora_b",): nnx.LoRAParam,
        ("magnitude",): DoRAParam,
    }
    assert [path for path, _ in nnx.to_flat_state(nnx.state(layer, DoRAParam))] == [("magnitude",)]
    assert type(layer.kernel) is nnx.Param


@pytest.mark.parametrize(
    ("mode", "dtype"),
    thinned(
        itertools.product(["adapter", "input"], DTYPES),
        [("adapter", jnp.float32), ("input", jnp.bfloat16)],
    ),
)
def test_dropout_follows_its_convention(mode, dtype):
    layer = make(dropout=0.25, dropout_mode=mode, param_dtype=dtype)
    x, key = inputs(dtype), jax.random.key(7)
    y = layer(x, rngs=key)
    dropped = drop(x, draw_seed(key), 0.25)
    assert 0.15 < jnp.mean(dropped == 0) < 0.35
    chex.assert_trees_all_equal(y, layer(x, rngs=key))

    weight, lora_a, lora_b, magnitude = torch_layout(layer)
    g = (magnitude / oracle.norm(weight, lora_a, lora_b, layer.scale))[None]
    corrected = oracle.fp64(x if mode == "adapter" else dropped)
    expected = (
        oracle.fp64(x) @ weight.T
        + (g - 1) * (corrected @ weight.T)
        + g * layer.scale * (oracle.fp64(dropped) @ lora_a.T @ lora_b.T)
        + oracle.fp64(layer.bias[...])
    )
    bounds = tolerances.dora_linear(
        jnp.zeros_like(y), dropped, *torch_layout(layer), layer.scale, dtype, bias=layer.bias[...]
    )
    # The base product of x itself comes on top of those of what was dropped.
    undropped = tolerances.dora_linear(
        jnp.zeros_like(y), x, *torch_layout(layer), layer.scale, dtype, bias=layer.bias[...]
    )
    within(y.reshape(-1, OUT), expected.reshape(-1, OUT), bounds.y + undropped.y)


@pytest.mark.parametrize("mode", [None, "adapter", "input"])
def test_precision_reaches_every_product_with_the_input(mode):
    options = {"dropout": 0.5, "dropout_mode": mode} if mode else {}
    options |= {"precision": lax.Precision.HIGH, "implementation": "xla"}
    graphdef, state = nnx.split(make(**options))

    def apply(state, x):
        return nnx.merge(graphdef, state)(x, rngs=jax.random.key(0))

    program = str(jax.make_jaxpr(apply)(state, inputs()))
    products = {None: 3, "adapter": 3, "input": 4}[mode]
    assert program.count("precision=(Precision.HIGH, Precision.HIGH)") == products


def test_train_and_eval_switch_dropout():
    layer = make(dropout=0.5)
    reference = make()
    x = inputs()
    layer.eval()
    chex.assert_trees_all_equal(layer(x), reference(x))
    layer.train()
    assert (layer(x) != reference(x)).any()
    assert (layer(x) != layer(x)).any()
    chex.assert_trees_all_equal(layer(x, deterministic=True), reference(x))
    assert reference.dropout is None


@pytest.mark.slow
def test_sharding_follows_the_kernel():
    mesh = automatic(data=2, model=4)
    with jax.set_mesh(mesh):
        own = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, "data"))
        layer = make(kernel_metadata={"out_sharding": (None, "model")}, lora_b_init=own)
        assert layer.lora_b.get_metadata("out_sharding") == (None, "data")
        assert layer.lora_a.get_metadata("out_sharding") == (None, None)
        assert layer.magnitude[...].sharding.spec == P("model")
        adapted = DoRALinear.from_linear(
            nnx.Linear(IN, OUT, kernel_metadata={"out_sharding": ("model",)}, rngs=nnx.Rngs(0)),
            rank=2,
            alpha=1,
            rngs=nnx.Rngs(0),
        )
        assert adapted.lora_a.get_metadata("out_sharding") == ("model", None)
        assert adapted.magnitude.get_metadata("out_sharding") == (None,)


@pytest.mark.slow
def test_out_sharding_over_an_axis_that_is_not_explicit():
    mesh = automatic(data=2, model=4)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"expected explicit axes.*model"):
        make()(inputs(), out_sharding=P(None, "model"))
    with pytest.raises(ValueError, match="expected explicit axes"):
        make()(inputs(), P("data"))


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("rank", 0, ValueError, "rank is 0; expected at least 1"),
        ("dropout", 1.0, ValueError, r"dropout is 1\.0; expected a probability in \[0, 1\)"),
        ("adapter_dtype", jnp.int32, TypeError, "adapter_dtype is .*int32"),
        ("implementation", "fast", ValueError, "implementation is 'fast'"),
        ("adapt_attend", True, ValueError, r"adapt_attend is True for an nnx\.Linear"),
    ],
)
def test_refuses_bad_hyperparameters(option, value, error, message):
    with pytest.raises(error, match=message):
        make(**{option: value})


def test_from_linear_refuses_what_it_cannot_honour():
    class Doubling(nnx.Linear):
        def __call__(self, inputs, out_sharding=None):
            return 2 * super().__call__(inputs)

    adapt = functools.partial(DoRALinear.from_linear, rank=RANK, alpha=ALPHA, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"the layer is a Conv; expected an nnx\.Linear"):
        adapt(nnx.Conv(3, 3, kernel_size=(1,), rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="the layer is a Doubling"):
        adapt(Doubling(3, 3, rngs=nnx.Rngs(0)))

    def own_dot(*args, **kwargs):
        return lax.dot_general(*args, **kwargs)

    own = {
        "dot_general": own_dot,
        "promote_dtype": lambda args, dtype: args,
        "preferred_element_type": jnp.float32,
    }
    for name, value in own.items():
        with pytest.raises(NotImplementedError, match=rf"the layer's {name} is"):
            adapt(nnx.Linear(3, 3, rngs=nnx.Rngs(0), **{name: value}))


@pytest.mark.parametrize("name", ["magnitude", "bias"])
def test_parameters_that_would_broadcast_are_refused(name):
    layer = make()
    getattr(layer, name).set_value(jnp.ones((1,)))
    with pytest.raises(ValueError, match=rf"{name} has shape \(1,\); expected \({OUT}\)"):
        layer(jnp.ones((2, IN)))


def test_a_layer_is_one_of_flax_and_a_dora_layer():
    layer = make()
    assert isinstance(layer, nnx.Linear)
    assert isinstance(layer, jax_dora.DoRALayer)
    with pytest.raises(TypeError, match="the layer is a DoRALinear, which computes something else"):
        DoRALinear.from_linear(layer, rank=2, alpha=2, rngs=nnx.Rngs(0))
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(
        TypeError,
        match=r"\['use_bias'\] are options of the base layer or unknown; .* some of \('rank",
    ):
        DoRALinear.from_linear(linear, rank=2, alpha=2, use_bias=False, rngs=nnx.Rngs(0))


def test_arrays_of_another_rank_are_refused():
    """A restored state can have them: its scale would be that of the layer's own rank."""
    layer, other = (DoRALinear(8, 4, rank=rank, alpha=16, rngs=nnx.Rngs(0)) for rank in (2, 3))
    nnx.update(layer, nnx.state(other, nnx.LoRAParam))
    for call in (layer, jax_dora.freeze, jax_dora.merge_dora):
        with pytest.raises(ValueError, match=r"rank 3; expected 2.*set_adapter"):
            call(jnp.ones((1, 8))) if call is layer else call(layer)


def test_the_scale_follows_alpha():
    layer = DoRALinear(8, 4, rank=2, alpha=16, rngs=nnx.Rngs(0))
    layer.lora_b[...] = jax.random.normal(jax.random.key(1), (2, 4))
    layer.alpha = 4
    assert layer.scale == layer.rule().scale == 2
    expected = layer.kernel[...] + 2 * layer.lora_a[...] @ layer.lora_b[...]
    chex.assert_trees_all_close(layer.norm(), jnp.linalg.norm(expected, axis=0), rtol=1e-5)
    with pytest.raises(AttributeError):
        layer.scale = 3.0
