"""`merge_dora`: into weights and, by never having changed the model, out of them again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_dora import (
    DoRALinear,
    DoRARule,
    apply_dora,
    get_adapter,
    merge_dora,
    norms,
    quantize,
    set_adapter,
)
from parity import oracle, tolerances
from tests.jax_dora.small_models import (
    ALL,
    LAYERS,
    WIDTH,
    Block,
    Mixed,
    Stacked,
    call,
    identical,
    ids,
    train,
)
from tests.matrices import within


def linear(dtype=jnp.float32, seed=0, size=(24, 40), base=None):
    """(adapted, its kernel, lora_a, lora_b, magnitude in torch layout, scale)."""
    base = base or nnx.Linear(*size, param_dtype=dtype, rngs=nnx.Rngs(0))
    rule = DoRARule("", 4, 3.0, lora_b_init=nnx.initializers.normal(0.1))
    layer = train(apply_dora(base, rule, rngs=nnx.Rngs(seed)), seed)
    weights = oracle.from_flax(layer.kernel[...], layer.lora_a[...], layer.lora_b[...])
    return layer, (*weights, oracle.fp64(layer.magnitude[...]), layer.scale)


def close(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerances.caps.OPERATOR_FP32_MAX_ABS)


def bound_of(arguments, merged, dtype):
    """The error of W' in fp32: rule 2 on its terms, g's own error, and one rounding to `dtype`."""
    weight, lora_a, lora_b, magnitude, scale = arguments
    norm = oracle.norm(weight, lora_a, lora_b, scale)
    error = tolerances.norm(weight, lora_a, lora_b, scale)
    g_error = tolerances.magnitude_scale(magnitude, norm, dtype, error)[:, None]
    v = np.abs(weight) + scale * (np.abs(lora_b) @ np.abs(lora_a))
    arithmetic = tolerances.accumulation(lora_a.shape[0], 0.0, v) + 8 * 2.0**-24 * v
    return tolerances.rounding(merged, dtype) + g_error * v + 2 * arithmetic


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_merged_kernel_is_the_oracles_rounded_once(dtype):
    layer, arguments = linear(dtype)
    merged, report = merge_dora(layer, return_report=True)
    assert type(merged) is nnx.Linear
    assert merged.kernel.dtype == dtype
    exact = oracle.merged_weight(*arguments, dtype)
    within(merged.kernel[...].T, exact, bound_of(arguments, exact, dtype))

    (row,) = report.layers
    weight, off = arguments[0], oracle.fp64(merged.kernel[...].T) - exact
    change = np.linalg.norm(exact - weight)
    assert (row.path, row.dtype) == ("", jnp.dtype(dtype).name)
    np.testing.assert_allclose(row.change, change / np.linalg.norm(weight), rtol=1e-3)
    if dtype == jnp.float32:
        assert row.rounding < 2.0**-24
    else:
        np.testing.assert_allclose(
            row.rounding, np.linalg.norm(off / np.linalg.norm(exact)), rtol=1e-2
        )
        np.testing.assert_allclose(row.lost, np.linalg.norm(off) / change, rtol=1e-2)
        np.testing.assert_allclose(row.max_abs, np.abs(off).max(), rtol=1e-2)


@pytest.mark.ci
def test_every_kind_of_layer_computes_the_same_merged():
    adapted = train(apply_dora(Mixed(nnx.Rngs(0)), ALL, rngs=nnx.Rngs(1)))
    before = nnx.clone(adapted)
    merged, report = merge_dora(adapted, return_report=True)
    assert nnx.graphdef(merged) == nnx.graphdef(nnx.clone(Mixed(nnx.Rngs(0))))
    with jax.default_matmul_precision("highest"):
        expected = call(adapted, ids())
        close(call(merged, ids()), expected)
        assert not np.allclose(call(Mixed(nnx.Rngs(0)), ids()), expected, atol=1e-2)
    assert identical(adapted, before)
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", *(row.path for row in report.layers)]
    assert len(lines) == 1 + 9


def test_a_shared_layer_is_merged_whichever_of_its_paths_comes_first():
    layer = DoRALinear(WIDTH, WIDTH, rank=2, alpha=4, rngs=nnx.Rngs(0))
    model = nnx.Dict(z=layer, a=layer)
    train(model)
    x = jax.random.normal(jax.random.key(0), (3, WIDTH))
    merged = merge_dora(model)
    assert merged.a is merged.z
    close(call(merged.a, x), call(layer, x))


def test_a_stack_is_merged_layer_by_layer():
    adapted = train(apply_dora(Stacked(nnx.Rngs(0)), DoRARule("blocks/.*", 2, 4), rngs=nnx.Rngs(1)))
    merged = merge_dora(adapted)
    assert type(merged.blocks.linear) is nnx.Linear
    assert merged.blocks.linear.kernel.shape == (LAYERS, WIDTH, WIDTH)
    x = jax.random.normal(jax.random.key(2), (4, WIDTH))
    close(call(merged, x), call(adapted, x))
    merged = nnx.eval_shape(merge_dora, adapted)
    assert merged.blocks.heads.kernel.shape == (LAYERS, WIDTH, 2, WIDTH // 2)


class TestSeveral:
    """`adapters=`: in turn, each with its own norm over the base alone."""

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_each_scales_what_was_merged_before_it(self, dtype):
        layers, arguments = zip(*(linear(dtype, seed) for seed in (1, 2)), strict=True)
        for order in ((0, 1), (1, 0)):
            exact, bound = arguments[0][0], 0.0
            for one in (arguments[index] for index in order):
                weight, lora_a, lora_b, magnitude, scale = one
                g = (magnitude / oracle.norm(weight, lora_a, lora_b, scale))[:, None]
                exact = g * (exact + scale * lora_b @ lora_a)
                bound = g * bound + bound_of(one, exact, jnp.float32)
            merged = merge_dora(layers[0], adapters=[get_adapter(layers[index]) for index in order])
            bound = bound + tolerances.rounding(np.abs(exact) + bound, dtype)
            within(merged.kernel[...].T, exact, bound)

    def test_the_layers_of_a_stack(self):
        rule = DoRARule("blocks/heads", 2, 4)
        both = [
            train(apply_dora(Stacked(nnx.Rngs(0)), rule, rngs=nnx.Rngs(seed)), seed)
            for seed in (1, 2)
        ]
        merged = merge_dora(both[0], adapters=[get_adapter(one) for one in both])
        first, second = (merge_dora(one).blocks.heads.kernel[...] for one in both)
        g = both[1].blocks.heads.magnitude[...] / norms(both[1])["blocks/heads"]
        g = g.reshape(LAYERS, 1, *first.shape[2:])
        base = Stacked(nnx.Rngs(0)).blocks.heads.kernel[...]
        close(merged.blocks.heads.kernel[...], second + g * (first - base))

    def test_one_alone_is_itself_and_layers_may_differ(self):
        base = Block(nnx.Rngs(0))
        one = train(apply_dora(base, DoRARule("linear", 2, 4, dropout=0.5), rngs=nnx.Rngs(1)))
        other = train(apply_dora(base, DoRARule("heads", 3, 4), rngs=nnx.Rngs(2)))
        both = merge_dora(base, adapters=[get_adapter(one), get_adapter(other)])
        assert jnp.array_equal(both.linear.kernel[...], merge_dora(one).linear.kernel[...])
        assert jnp.array_equal(both.heads.kernel[...], merge_dora(other).heads.kernel[...])

    def test_one_on_top_of_another_takes_its_norm_over_the_merged_base(self):
        first, _ = linear(seed=1)
        second, _ = linear(seed=2)
        below = merge_dora(first)
        above = set_adapter(below, get_adapter(second))
        weights = oracle.from_flax(below.kernel[...], above.lora_a[...], above.lora_b[...])
        arguments = (*weights, oracle.fp64(above.magnitude[...]), above.scale)
        exact = oracle.merged_weight(*arguments, jnp.float32)
        found = merge_dora(above).kernel[...].T
        within(found, exact, bound_of(arguments, exact, jnp.float32))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("name", ["lora_a", "lora_b", "magnitude"])
def test_an_adapter_that_is_not_finite_is_not_merged(name, value):
    base = Block(nnx.Rngs(0))
    model = train(apply_dora(base, DoRARule("linear", 2, 4), rngs=nnx.Rngs(1)))
    array = getattr(model.linear, name)
    array[...] = array[...].at[0].set(value)
    message = rf"{name} of 'linear' holds NaN or infinity, in \d+ of .* use an earlier checkpoint$"
    with pytest.raises(ValueError, match=f"^{message}"):
        merge_dora(model)
    with pytest.raises(ValueError, match=rf"^adapters\[0\]: {message}"):
        merge_dora(base, adapters=[get_adapter(model)])


def test_weights_that_are_not_finite_or_zero_are_merged_as_they_are():
    base = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    base.kernel[...] = base.kernel[...].at[:, 1].set(jnp.nan).at[:, 2].set(0)
    model = apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(1))
    model.magnitude[...] = jnp.ones(4)
    merged = merge_dora(model).kernel[...]
    assert jnp.isfinite(merged).all(0).tolist() == [True, False, True, True]
    assert not merged[:, 2].any()


def test_nothing_to_merge():
    base = Block(nnx.Rngs(0))
    with pytest.raises(ValueError, match="model holds no adapter"):
        merge_dora(base)
    with pytest.raises(ValueError, match=r"adapters is \[\]"):
        merge_dora(base, adapters=[])
    with pytest.raises(TypeError, match="adapters is a dict; expected a list of Adapters"):
        merge_dora(base, adapters={})
    with pytest.raises(TypeError, match="model is a dict"):
        merge_dora({"model": base})


def test_the_report_of_a_layer_without_features():
    layer = apply_dora(nnx.Linear(4, 0, rngs=nnx.Rngs(0)), DoRARule("", 2, 4), rngs=nnx.Rngs(1))
    merged, report = merge_dora(layer, return_report=True)
    assert merged.kernel.shape == (4, 0)
    assert report.layers[0].change == report.layers[0].max_abs == 0


class Tied(nnx.Module):
    """Two layers that read one kernel, and a third reader that no rule matches."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.two = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.three = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.two.kernel = self.three.kernel = self.one.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.three(nnx.tanh(self.two(nnx.tanh(self.one(x)))))


def test_layers_that_share_a_parameter_are_merged_each_into_an_array_of_its_own():
    rules = [DoRARule("one", 2, 4.0), DoRARule("two", 2, 3.0)]
    model = Tied(nnx.Rngs(0))
    adapted = train(apply_dora(model, rules, rngs=nnx.Rngs(1)))
    x = jax.random.normal(jax.random.key(2), (5, WIDTH))
    merged = merge_dora(adapted)
    with jax.default_matmul_precision("highest"):
        close(call(merged, x), call(adapted, x))
    assert merged.three.kernel[...] is model.three.kernel[...]
    assert len({id(one.kernel) for one in (merged.one, merged.two, merged.three)}) == 3
    again = merge_dora(adapted, adapters=[get_adapter(adapted)])
    assert all(
        jnp.array_equal(a, b)
        for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (merged, again)), strict=True)
    )


class Doubled(nnx.Param):
    def get_value(self, **options):
        return jax.tree.map(lambda value: 2 * value, super().get_value(**options))


def test_a_kernel_that_is_read_otherwise_than_it_was_set_is_refused():
    layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    layer.kernel = Doubled(layer.kernel[...])
    match = r"'' cannot be {}: its kernel, a Doubled, returns another value than was set"
    with pytest.raises(NotImplementedError, match=match.format("merged")):
        merge_dora(linear(base=layer)[0])
    with pytest.raises(NotImplementedError, match=match.format("quantised")):
        quantize(layer, "int8", path="")


def test_a_parameter_that_a_module_refers_to_besides_stays_the_bases_there():
    class Reader(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.tables = nnx.data([self.layer.kernel])

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x) @ self.tables[0]

    adapted = train(apply_dora(Reader(nnx.Rngs(0)), DoRARule("layer", 2, 4), rngs=nnx.Rngs(1)))
    x = jax.random.normal(jax.random.key(2), (5, WIDTH))
    with jax.default_matmul_precision("highest"):
        close(call(merge_dora(adapted), x), call(adapted, x))
