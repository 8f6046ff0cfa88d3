"""`DoRADense`: beside `DoRALinear` and `nn.Dense`, under linen's transforms, in an optax step."""

import itertools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jax_dora
from jax_dora.linen import DoRADense, adapter_labels, join_adapters, split_adapters
from tests.tables import thinned

IN, OUT, RANK, ALPHA = 72, 56, 5, 8.0
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
nonzero = nn.initializers.normal(0.1)
ADAPTER = {"lora_a", "lora_b", "magnitude"}


def inputs(dtype=jnp.float32, shape=(3, 5)) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*shape, IN), dtype)


def make(x: jax.Array, **options) -> tuple[DoRADense, dict]:
    """A layer and its params as training leaves them: the magnitude away from the norm."""
    options = {
        "rank": RANK,
        "alpha": ALPHA,
        "lora_b_init": nonzero,
        "bias_init": nn.initializers.normal(0.5),
        **options,
    }
    layer = DoRADense(OUT, **options)
    params = layer.init(jax.random.key(0), x)["params"]
    params["magnitude"] *= 1 + 0.02 * jax.random.normal(jax.random.key(5), (OUT,))
    return layer, params


@pytest.mark.parametrize(
    ("mode", "dtype", "use_rslora"),
    thinned(
        itertools.product([None, "adapter", "input"], DTYPES, [False, True]),
        [(None, jnp.bfloat16, True), ("adapter", jnp.float32, False), ("input", jnp.float16, True)],
    ),
)
@pytest.mark.ci
def test_computes_what_the_nnx_layer_does_bit_for_bit(mode, dtype, use_rslora):
    """Which is held to the oracle; gradients too."""
    x, options = inputs(dtype), {"param_dtype": dtype, "use_rslora": use_rslora}
    if mode is not None:
        options |= {"dropout": 0.25, "dropout_mode": mode}
    layer, params = make(x, **options, deterministic=True)
    layer = layer.copy(deterministic=False)
    adapters, base = split_adapters(params)
    rngs = {"dropout": jax.random.key(7)}

    def apply(adapters):
        variables = {"params": join_adapters(adapters, base)}
        return layer.apply(variables, x, rngs=rngs)

    key = layer.apply({"params": params}, rngs=rngs, method=lambda one: one.make_rng("dropout"))
    twin = jax_dora.DoRALinear(
        *(IN, OUT),
        **{"rank": RANK, "alpha": ALPHA, "rngs": nnx.Rngs(0), **options},
        arrays={name: params[name] for name in ADAPTER},
        kernel_init=lambda *_: params["kernel"],
        bias_init=lambda *_: params["bias"],
    )
    y = apply(adapters)
    assert y.dtype == dtype
    chex.assert_trees_all_equal(y, twin(x, deterministic=False, rngs=key))
    found = jax.grad(lambda one: jnp.sum(jnp.sin(apply(one))))(adapters)
    expected = nnx.grad(
        lambda one: jnp.sum(jnp.sin(one(x, deterministic=False, rngs=key))),
        argnums=nnx.DiffState(0, nnx.LoRAParam),
    )(twin)
    chex.assert_trees_all_equal(found, nnx.to_pure_dict(expected))


@pytest.mark.parametrize(
    ("dtype", "use_bias"),
    thinned(
        itertools.product(DTYPES, [True, False]),
        [(jnp.float32, True), (jnp.bfloat16, True), (jnp.bfloat16, False)],
    ),
)
@pytest.mark.ci
def test_adapting_a_pretrained_dense_is_the_identity(dtype, use_bias):
    x = inputs(dtype)
    dense = nn.Dense(
        OUT, use_bias=use_bias, param_dtype=dtype, bias_init=nn.initializers.normal(0.5)
    )
    pretrained = dense.init(jax.random.key(0), x)["params"]
    layer = DoRADense(OUT, RANK, ALPHA, use_bias=use_bias, param_dtype=dtype)
    y, adapted = layer.apply(
        {"params": pretrained}, x, rngs={"params": jax.random.key(3)}, mutable=["params"]
    )
    params = adapted["params"]
    assert params.keys() == pretrained.keys() | ADAPTER
    chex.assert_trees_all_equal({name: params[name] for name in pretrained}, pretrained)
    expected = dense.apply({"params": pretrained}, x)
    chex.assert_trees_all_equal(y, layer.apply({"params": params}, x), expected)
    chex.assert_trees_all_equal(
        jax.jit(layer.apply)({"params": params}, x), jax.jit(dense.apply)({"params": pretrained}, x)
    )


def test_params_have_their_names_shapes_and_dtypes():
    x = inputs(jnp.bfloat16)
    layer, params = make(x, param_dtype=jnp.bfloat16, adapter_dtype=jnp.bfloat16)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in params.items()} == {
        "kernel": ((IN, OUT), jnp.bfloat16),
        "bias": ((OUT,), jnp.bfloat16),
        "lora_a": ((IN, RANK), jnp.bfloat16),
        "lora_b": ((RANK, OUT), jnp.bfloat16),
        "magnitude": ((OUT,), jnp.float32),
    }
    assert layer.apply({"params": params}, x).dtype == jnp.bfloat16
    assert make(x, adapter_dtype=jnp.float32, param_dtype=jnp.bfloat16)[1]["lora_a"].dtype == (
        jnp.float32
    )


def test_result_has_the_dtype_that_dense_returns():
    with jax.numpy_dtype_promotion("standard"):
        for param_dtype in DTYPES:
            for dtype in (None, jnp.bfloat16, jnp.float32):
                for x in (inputs(jnp.bfloat16), inputs(), jnp.ones((2, IN), jnp.int32)):
                    options = {"param_dtype": param_dtype, "dtype": dtype}
                    ours = DoRADense(OUT, 2, 1, **options)
                    results = [
                        jax.eval_shape(module.init_with_output, jax.random.key(0), x)[0].dtype
                        for module in (ours, nn.Dense(OUT, **options))
                    ]
                    assert results[0] == results[1]


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(DoRADense(OUT, RANK, ALPHA, name="up")(x))
        return nn.Dense(1, name="down")(x)


def target() -> jax.Array:
    return jax.random.normal(jax.random.key(3), (32, 1))


def changed(before: dict, after: dict) -> set[str]:
    different = jax.tree.map(lambda old, new: bool((old != new).any()), before, after)
    return {
        "/".join(key.key for key in path)
        for path, differs in jax.tree.leaves_with_path(different)
        if differs
    }


@pytest.mark.slow
def test_multi_transform_trains_the_adapter_alone():
    x = inputs(shape=(32,))
    network = Network()
    before = params = network.init(jax.random.key(0), x)["params"]
    tx = optax.multi_transform(
        {"adapter": optax.adam(1e-2), "frozen": optax.set_to_zero()}, adapter_labels
    )
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        def loss_fn(params):
            return jnp.mean((network.apply({"params": params}, x) - target()) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    # optax.adam counts its steps in int32 and multiplies the count by floats.
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(20):
            params, state, loss = step(params, state)
            losses.append(loss)
    assert losses[-1] < 0.7 * losses[0]
    assert changed(before, params) == {"up/lora_a", "up/lora_b", "up/magnitude"}


def test_split_and_join_are_inverse_and_disjoint():
    params = Network().init(jax.random.key(0), inputs())["params"]
    adapters, base = split_adapters(params)
    assert adapters["up"].keys() == ADAPTER
    assert adapters.keys() == {"up"}
    chex.assert_trees_all_equal(join_adapters(adapters, base), params)
    with pytest.raises(ValueError, match="adapters and base both hold up/lora_a, up/lora_b"):
        join_adapters(adapters, params)


@pytest.mark.slow
def test_remat_and_scan():
    depth, x = 2, inputs(shape=(5,))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            layer = DoRADense(IN, RANK, ALPHA, lora_b_init=nonzero, name="layer")
            return x + jnp.tanh(layer(x)), None

    def stacked(block):
        return nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=depth
        )()

    plain = stacked(Block)
    rematerialised = stacked(nn.remat(Block, policy=jax_dora.remat_policy(), prevent_cse=False))
    variables = jax.jit(plain.init)(jax.random.key(0), x, None)
    chex.assert_shape(variables["params"]["layer"]["magnitude"], (depth, IN))

    def loss(model, variables):
        return jnp.sum(jnp.sin(model.apply(variables, x, None)[0]))

    def unrolled(variables):
        y = x
        for index in range(depth):
            one = jax.tree.map(lambda leaf, i=index: leaf[i], variables)
            y = Block().apply(one, y, None)[0]
        return jnp.sum(jnp.sin(y))

    expected = jax.jit(jax.grad(unrolled))(variables)
    for model in (plain, rematerialised):
        grads = jax.jit(jax.grad(lambda v, m=model: loss(m, v)))(variables)
        chex.assert_trees_all_close(grads, expected, rtol=1e-4, atol=1e-4)


def test_dropout_asks_to_be_told_whether_it_is_on():
    x = inputs()
    layer, params = make(x, dropout=0.25, deterministic=True)
    variables = {"params": params}
    chex.assert_trees_all_equal(layer.apply(variables, x), make(x)[0].apply(variables, x))
    with pytest.raises(Exception, match="deterministic"):
        layer.copy(deterministic=None).apply(variables, x, rngs={"dropout": jax.random.key(7)})


def test_partitioned_kernel_names_the_adapter():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in_axis", "out_axis"))
    own = nn.with_partitioning(nn.initializers.zeros_init(), ("rank_axis", "out_axis"))
    layer = DoRADense(OUT, RANK, ALPHA, kernel_init=init)
    boxed = layer.init(jax.random.key(0), inputs())["params"]
    names = {name: getattr(leaf, "names", None) for name, leaf in boxed.items()}
    assert names == {
        "kernel": ("in_axis", "out_axis"),
        "lora_a": ("in_axis", None),
        "lora_b": (None, "out_axis"),
        "magnitude": ("out_axis",),
        "bias": None,
    }
    unboxed = nn.meta.unbox(boxed)
    chex.assert_trees_all_equal(
        layer.apply({"params": boxed}, inputs()), layer.apply({"params": unboxed}, inputs())
    )
    layer = DoRADense(OUT, RANK, ALPHA, kernel_init=init, lora_b_init=own)
    boxed = layer.init(jax.random.key(0), inputs())["params"]
    assert boxed["lora_b"].names == ("rank_axis", "out_axis")


def test_refuses_bad_hyperparameters():
    with pytest.raises(ValueError, match=r"dropout is 1; expected a probability in \[0, 1\)"):
        make(inputs(), dropout=1)
