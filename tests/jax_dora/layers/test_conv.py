"""DoRAConv: against the oracle, whose input rows are the windows that each position reads."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_dora import DoRAConv, DoRAConvTranspose, DoRARule, apply_dora, merge_dora
from jax_dora.ops import draw_seed
from jax_dora.ops.dropout import drop
from jax_dora.peft import save_adapter
from parity import oracle, tolerances
from tests.jax_dora.matrices import differentiate, trained
from tests.matrices import Problem, judge, within
from tests.tables import thinned

IN, OUT, ALPHA = 6, 8, 5.0

CASES = {
    "1d": ((3,), (11,), {}),
    "1d causal, dilated": ((2,), (9,), {"padding": "CAUSAL", "kernel_dilation": 2}),
    "2d, strided": ((3, 2), (7, 6), {"strides": (2, 1), "padding": "VALID"}),
    "2d circular": ((3, 3), (5, 4), {"padding": "CIRCULAR"}),
    "2d grouped": ((3, 3), (5, 4), {"feature_group_count": 2, "padding": 1}),
    "3d": ((2, 1, 2), (3, 4, 3), {"input_dilation": (1, 2, 1), "padding": 1}),
    "1x1": ((1, 1), (4, 3), {"use_bias": False}),
}


def make(window, settings, dtype=jnp.float32, rank=4, **options) -> DoRAConv:
    base = nnx.Conv(IN, OUT, window, param_dtype=dtype, rngs=nnx.Rngs(0), **settings)
    return DoRAConv(base, rank=rank, alpha=ALPHA, rngs=nnx.Rngs(1), **options)


def windows(x: jax.Array, window, settings) -> jax.Array:
    """[batch, *positions, *window, in], by the convolution whose kernel is an identity."""
    settings = {k: v for k, v in settings.items() if k not in ("feature_group_count", "use_bias")}
    features = x.shape[-1]
    size = int(np.prod(window)) * features
    conv = nnx.Conv(features, size, window, use_bias=False, rngs=nnx.Rngs(0), **settings)
    conv.kernel.set_value(jnp.eye(size, dtype=x.dtype).reshape(*window, features, size))
    return conv(x)


@pytest.mark.parametrize(
    ("case", "dtype"),
    thinned(
        [
            *((case, jnp.float32) for case in CASES if case != "1x1"),
            ("2d grouped", jnp.bfloat16),
            ("1x1", jnp.float16),
        ],
        # The others, fresh below, differ from these in one setting.
        [
            ("1d causal, dilated", jnp.float32),
            ("2d grouped", jnp.bfloat16),
        ],
    ),
)
def test_agrees_with_the_oracle(case, dtype):
    window, positions, settings = CASES[case]
    groups = settings.get("feature_group_count", 1)
    layer = trained(make(window, settings, dtype))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, *positions, IN)), dtype)
    y, dy, grads, dx = differentiate(layer, x)
    assert y.dtype == dtype

    def part(array, group, axis=-1):
        return np.split(oracle.fp64(array), groups, axis)[group]

    def column(array, group):
        block = part(array, group)
        return block.reshape(-1, block.shape[-1])

    unfold = jax.jit(lambda own: windows(own, window, settings))
    exact_dx, bound_dx = [], []
    for group in range(groups):
        with jax.enable_x64(True):
            own = jnp.asarray(part(x, group))
            rows, back = jax.vjp(unfold, own)
        rows = np.asarray(rows)
        problem = Problem(
            x=rows.reshape(-1, rows.shape[-1]),
            dy=column(dy, group),
            kernel=column(layer.kernel[...], group),
            lora_a=column(layer.lora_a[...], group),
            lora_b=column(layer.lora_b[...], group),
            magnitude=part(layer.magnitude[...], group),
            bias=None if layer.bias is None else part(layer.bias[...], group),
            y=column(y, group),
            d_lora_a=column(grads["lora_a"][...], group),
            d_lora_b=column(grads["lora_b"][...], group),
            d_magnitude=part(grads["magnitude"][...], group),
        )
        in_rows = judge(problem, layer.scale, dtype)
        for total, of_rows in zip((exact_dx, bound_dx), in_rows, strict=True):
            with jax.enable_x64(True):
                total.append(np.asarray(back(jnp.asarray(of_rows.reshape(rows.shape)))[0]))
    within(dx, np.concatenate(exact_dx, -1), np.concatenate(bound_dx, -1))


@pytest.mark.parametrize(
    ("case", "dtype"),
    thinned(
        [*itertools.product(CASES, [jnp.float32]), ("2d grouped", jnp.bfloat16)],
        [
            ("2d circular", jnp.float32),
            ("2d grouped", jnp.bfloat16),
        ],
    ),
)
@pytest.mark.ci
def test_a_fresh_adapter_changes_no_bit(case, dtype):
    window, positions, settings = CASES[case]
    layer = make(window, settings, dtype)
    base = nnx.Conv(IN, OUT, window, param_dtype=dtype, rngs=nnx.Rngs(0), **settings)
    x = jax.random.normal(jax.random.key(0), (2, *positions, IN), dtype)
    call = nnx.jit(lambda layer, x: (layer(x), layer(x[0])))
    for found, expected in zip(call(layer, x), call(base, x), strict=True):
        assert jnp.array_equal(found, expected)


@pytest.mark.ci
def test_dropout_by_both_conventions():
    """Both results, taken apart into what layers without dropout compute."""
    window, positions, settings = CASES["1d"]
    x = jax.random.normal(jax.random.key(0), (2, *positions, IN))
    plain = trained(make(window, settings | {"use_bias": False}))
    base = nnx.Conv(IN, OUT, window, use_bias=False, rngs=nnx.Rngs(0), **settings)
    assert jnp.array_equal(base.kernel[...], plain.kernel[...])
    g = (plain.magnitude[...] / plain.norm()).reshape(1, 1, OUT)
    key = jax.random.key(7)
    dropped = drop(x, draw_seed(key), 0.5)
    g_lora = plain(dropped) - g * base(dropped)
    for mode, read in (("adapter", x), ("input", dropped)):
        options = {"dropout": 0.5, "dropout_mode": mode}
        layer = trained(make(window, settings | {"use_bias": False}, **options))
        expected = base(x) + (g - 1) * base(read) + g_lora
        within(layer(x, rngs=key), oracle.fp64(expected), tolerances.caps.OPERATOR_FP32_MAX_ABS)
        layer.eval()
        assert jnp.array_equal(layer(x), plain(x))


def test_the_rank_is_shared_out_among_groups():
    with pytest.raises(ValueError, match="rank is 3 and the convolution has 2 groups"):
        make((3,), {"feature_group_count": 2}, rank=3)


def test_a_transposed_one_is_refused_in_a_peft_folder(tmp_path):
    model = nnx.Sequential(nnx.ConvTranspose(2, 3, (2,), rngs=nnx.Rngs(0)))
    model = apply_dora(model, DoRARule("layers/0", 2, 3), rngs=nnx.Rngs(1))
    with pytest.raises(NotImplementedError, match=r"layers/0: .*transposed convolutions"):
        save_adapter(model, tmp_path / "adapter")


def test_a_mask_is_refused():
    with pytest.raises(NotImplementedError, match=r"the layer's mask is an array of shape \(3, "):
        make((3,), {"mask": jnp.ones((3, IN, OUT))})


def test_another_layer_is_refused():
    with pytest.raises(TypeError, match=r"the layer is a Linear; expected an nnx\.Conv"):
        DoRAConv(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rank=1, alpha=1, rngs=nnx.Rngs(0))


@pytest.mark.ci
def test_depthwise():
    """Each channel is a group; a part of the rank for each is the least."""
    settings = {"feature_group_count": IN, "use_bias": False}
    base = nnx.Conv(IN, IN, 3, rngs=nnx.Rngs(0), **settings)
    layer = trained(DoRAConv(base, rank=IN, alpha=ALPHA, rngs=nnx.Rngs(1)))
    x = jax.random.normal(jax.random.key(0), (2, 7, IN))
    found, merged = layer(x), []
    for channel in range(IN):
        arrays = (layer.kernel[:, :, channel], layer.lora_a[:, :, channel])
        weights = oracle.from_flax(*arrays, layer.lora_b[:, channel : channel + 1])
        magnitude = layer.magnitude[channel : channel + 1]
        merged.append(oracle.merged_weight(*weights, magnitude, layer.scale).T)
    padded = np.pad(oracle.fp64(x), ((0, 0), (1, 1), (0, 0)))
    kernel = np.stack(merged, -1)[:, 0]
    exact = sum(padded[:, at : at + 7] * kernel[at] for at in range(3))
    within(found, exact, tolerances.caps.OPERATOR_FP32_MAX_ABS)


class TestTransposed:
    CASES = (
        ((3,), (5,), {"strides": 2}),
        ((2, 3), (4, 3), {"strides": (1, 2), "padding": "VALID", "use_bias": False}),
        ((3,), (5,), {"padding": "CIRCULAR", "kernel_dilation": 2}),
    )

    def make(self, window, settings, rank=3, **options) -> DoRAConvTranspose:
        base = nnx.ConvTranspose(IN, OUT, window, rngs=nnx.Rngs(0), **settings)
        return DoRAConvTranspose(base, rank=rank, alpha=ALPHA, rngs=nnx.Rngs(1), **options)

    @pytest.mark.parametrize(("window", "positions", "settings"), thinned(CASES, CASES[:1]))
    def test_it_is_the_base_layer_with_the_oracles_kernel(self, window, positions, settings):
        x = jax.random.normal(jax.random.key(0), (2, *positions, IN))
        fresh = self.make(window, settings)
        assert jnp.array_equal(
            nnx.jit(lambda m: m(x))(fresh), nnx.jit(lambda m: m(x))(fresh.base_layer())
        )
        layer = trained(fresh)
        columns = (layer.kernel[...].reshape(-1, OUT), layer.lora_a[...].reshape(-1, 3))
        arrays = oracle.from_flax(*columns, layer.lora_b[...])
        merged = oracle.merged_weight(*arrays, layer.magnitude[...], layer.scale).T
        with jax.enable_x64(True):
            kernel = merged.reshape(layer.kernel.shape)
            base = nnx.ConvTranspose(
                IN, OUT, window, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **settings
            )
            base.kernel.set_value(jnp.asarray(kernel))
            if base.bias is not None:
                base.bias.set_value(jnp.asarray(oracle.fp64(layer.bias[...])))
            exact = np.asarray(base(jnp.asarray(oracle.fp64(x))))
        within(layer(x), exact, 2 * tolerances.caps.OPERATOR_FP32_MAX_ABS * np.abs(exact).max())

    def test_in_a_model_it_is_merged_and_removed(self):
        model = nnx.Sequential(nnx.ConvTranspose(IN, OUT, (3,), strides=2, rngs=nnx.Rngs(0)))
        adapted = apply_dora(model, DoRARule(".*", 3, 4), rngs=nnx.Rngs(1))
        trained(adapted.layers[0])
        x = jax.random.normal(jax.random.key(0), (2, 5, IN))
        merged = merge_dora(adapted)
        assert type(merged.layers[0]) is nnx.ConvTranspose
        within(adapted(x), oracle.fp64(merged(x)), 4 * tolerances.caps.OPERATOR_FP32_MAX_ABS)
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        grads = nnx.grad(lambda model: jnp.sum(jnp.sin(model(x))), argnums=wrt)(adapted)
        assert all(bool(jnp.any(one != 0)) for one in jax.tree.leaves(grads))

    def test_a_kernel_of_the_other_direction_is_refused(self):
        with pytest.raises(NotImplementedError, match="transpose_kernel is True"):
            self.make((3,), {"transpose_kernel": True})
