"""Dropout inside `dora_linear`; the layers' tests check the modes against LoRA and PEFT."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora import ops
from jax_dora.ops.dropout import Dropout, draw_seed, drop, keep_mask, kept_share
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import thinned

ROWS, IN, OUT, RANK, SCALE = 7, 40, 24, 3, 1.7
MODES = ["adapter", "input"]


def draws(seed):
    """Returns a function that draws normal numbers of a shape."""
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))


def operands() -> dict[str, jax.Array]:
    normal = draws(0)
    found = {
        "x": normal(ROWS, IN),
        "kernel": normal(IN, OUT),
        "lora_a": normal(IN, RANK),
        "lora_b": normal(RANK, OUT),
        "bias": normal(OUT),
    }
    norm = ops.factored_norm(found["kernel"], found["lora_a"], found["lora_b"], SCALE)
    return found | {"norm": norm, "magnitude": norm * (1 + 0.02 * normal(OUT))}


def seed(number=1):
    return draw_seed(jax.random.key(number))


def plain(x, dropped, kernel, lora_a, lora_b, magnitude, norm, bias, mode):
    g = (magnitude / norm)[None]
    base = x @ kernel
    corrected = dropped @ kernel if mode == "input" else base
    return base + (g - 1) * corrected + g * (SCALE * (dropped @ lora_a @ lora_b)) + bias[None]


@pytest.mark.parametrize("implementation", thinned(["xla", None], [None]))
@pytest.mark.parametrize("mode", MODES)
def test_result_and_gradients_are_those_of_an_explicit_mask(mode, implementation):
    arrays = operands()
    fixed = {name: arrays.pop(name) for name in ("norm",)}
    dropout = Dropout(seed(), 0.3, mode)
    mask = keep_mask(dropout.seed, (ROWS, IN), 0.3).astype(jnp.float32) / kept_share(0.3)

    def ours(arrays):
        return ops.dora_linear(
            **arrays, **fixed, scale=SCALE, dropout=dropout, implementation=implementation
        )

    def explicit(arrays):
        return plain(**arrays, **fixed, dropped=arrays["x"] * mask, mode=mode)

    def both(call, arrays, dy):
        y, pull = jax.vjp(call, arrays)
        return y, pull(dy)

    dy = draws(9)(ROWS, OUT)
    both = jax.jit(both, static_argnums=0)
    (y, found), (expected, wanted) = (both(call, arrays, dy) for call in (ours, explicit))
    chex.assert_trees_all_close(y, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_equals_dora_linear_at_rate_zero(mode):
    arrays = operands()
    y = ops.dora_linear(**arrays, scale=SCALE, dropout=Dropout(seed(), 0.0, mode))
    chex.assert_trees_all_equal(y, ops.dora_linear(**arrays, scale=SCALE))


@pytest.mark.ci
def test_in_the_fused_kernels(on_mosaic):
    rng = np.random.default_rng(0)

    def normal(*shape, deviation=1.0):
        return jnp.asarray(deviation * rng.normal(size=shape), jnp.bfloat16)

    arrays = {
        "x": normal(40, 64),
        "kernel": normal(64, 128, deviation=0.1),
        "lora_a": normal(64, 8, deviation=0.1),
        "lora_b": normal(8, 128, deviation=0.3),
    }
    norm = ops.factored_norm(arrays["kernel"], arrays["lora_a"], arrays["lora_b"], SCALE)
    arrays["magnitude"] = norm * 1.01
    dropout = Dropout(seed(), 0.5)

    def run(arrays, implementation):
        def call(arrays):
            return ops.dora_linear(
                **arrays, scale=SCALE, norm=norm, dropout=dropout, implementation=implementation
            )

        y, pull = jax.vjp(call, arrays)
        return y, pull(jnp.ones_like(y))[0]

    run = jax.jit(run, static_argnums=1)
    with on_mosaic():
        fused = jax.block_until_ready(run(arrays, "mosaic"))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    chex.assert_trees_all_close(
        jax.tree.map(lambda a: a.astype(jnp.float32), fused), run(wide, "xla"), rtol=0.05, atol=0.1
    )


@pytest.mark.ci
def test_a_named_mosaic_draws_the_mask_in_the_kernels_that_read_x():
    avals = {
        "x": aval(256, 128),
        "kernel": aval(128, 192),
        "lora_a": aval(128, 8),
        "lora_b": aval(8, 192),
        "magnitude": aval(192, dtype=jnp.float32),
        "norm": aval(192, dtype=jnp.float32),
    }

    def gradient(arrays, seed):
        def loss(lora_a):
            y = ops.dora_linear(
                **(arrays | {"lora_a": lora_a}),
                scale=SCALE,
                dropout=Dropout(seed, 0.1),
                implementation="mosaic",
            )
            return jnp.sum(y.astype(jnp.float32))

        return jax.value_and_grad(loss)(arrays["lora_a"])

    text = for_cuda(gradient, avals, aval(2, dtype=jnp.uint32))
    # Both begin so, forward and back.
    assert text.count("dora_dropout_shrink") >= 2
    assert "dora_dropout_shrink_back" in text
    assert "256x128xi1" not in text


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_keeps_the_wanted_share_everywhere(rate):
    mask = np.asarray(keep_mask(seed(), (512, 768), rate), np.float64)
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(mask.mean() - (1 - rate)) < 5 * deviation / np.sqrt(mask.size)
    for axis in (0, 1):
        share = mask.mean(axis)
        assert np.all(abs(share - (1 - rate)) < 6 * deviation / np.sqrt(mask.shape[axis]))
        # The masks differ as much as independent draws: there is no pattern along the other axis.
        expected = deviation / np.sqrt(mask.shape[axis])
        assert 0.85 < share.std() / expected < 1.15
    centred = (mask - (1 - rate)) / deviation
    for shift in (1, 2, 8, 32, 64):
        for axis in (0, 1):
            correlation = (centred * np.roll(centred, shift, axis)).mean()
            assert abs(correlation) < 5 / np.sqrt(mask.size)


@pytest.mark.parametrize(("rate", "kept"), [(1e-6, 65536), (0.1, 58982), (0.999, 66), (0.99999, 1)])
def test_the_mean_stays_what_it_is_at_every_rate(rate, kept):
    """`kept` of 2¹⁶ equally likely values are kept, and scaled by the inverse of this share."""
    dropped = drop(jnp.ones((2048, 1024)), seed(), rate)
    values = np.unique(np.asarray(dropped))
    np.testing.assert_allclose(values[-1], 65536 / kept, rtol=1e-6)
    assert set(values[:-1]) <= {0.0}
    share = kept / 65536
    deviation = np.sqrt((1 - share) / share / dropped.size)
    assert abs(float(dropped.mean(dtype=jnp.float32)) - 1) <= 5 * deviation + 1e-5


def test_masks_of_two_keys_are_unrelated():
    first, second = (np.asarray(keep_mask(seed(n), (512, 768), 0.5)) for n in (1, 2))
    assert abs((first == second).mean() - 0.5) < 5 * 0.5 / np.sqrt(first.size)


@pytest.mark.ci
def test_leading_axes_count_as_rows():
    flat = keep_mask(seed(), (6, IN), 0.5)
    chex.assert_trees_all_equal(keep_mask(seed(), (2, 3, IN), 0.5), flat.reshape(2, 3, IN))


@pytest.mark.parametrize("mode", MODES)
def test_no_mask_is_saved_for_the_gradient(mode):
    arrays = operands()
    dropout = Dropout(seed(), 0.5, mode)
    trained = ("x", "lora_a", "lora_b", "magnitude")

    def call(some):
        return ops.dora_linear(**(arrays | some), scale=SCALE, dropout=dropout)

    _, pull = jax.vjp(call, {name: arrays[name] for name in trained})
    like_x = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape == (ROWS, IN)]
    assert len(like_x) == 1  # x, or the dropped x
    assert like_x[0].dtype == jnp.float32


@pytest.mark.usefixtures("optimized")
def test_compiled_gradient_has_no_array_of_the_mask():
    arrays = operands()
    dropout = Dropout(seed(), 0.5)

    @jax.jit
    def gradient(lora_a, lora_b):
        def loss(some):
            return ops.dora_linear(**(arrays | some), scale=SCALE, dropout=dropout).sum()

        return jax.grad(loss)({"lora_a": lora_a, "lora_b": lora_b})

    program = gradient.lower(arrays["lora_a"], arrays["lora_b"]).compile().as_text()
    entry = program[program.index("ENTRY") :]
    assert f"f32[{ROWS},{IN}]" in entry
    for dtype in ("pred", "u32", "s32"):
        assert f"{dtype}[{ROWS},{IN}]" not in entry


def test_drop_is_linear_and_its_own_gradient():
    x = operands()["x"]
    y, pull = jax.vjp(lambda x: drop(x, seed(), 0.25), x)
    mask = keep_mask(seed(), x.shape, 0.25)
    chex.assert_trees_all_close(y, jnp.where(mask, x / 0.75, 0.0), rtol=1e-6)
    chex.assert_trees_all_close(pull(x)[0], y, rtol=1e-6)


@pytest.mark.parametrize(
    ("dropout", "error", "message"),
    [
        (0.1, TypeError, r"dropout is 0.1; expected a jax_dora.ops.Dropout"),
        (Dropout(seed(), 1.0), ValueError, r"dropout.rate is 1.0; expected a number in \[0, 1\)"),
        (Dropout(seed(), 0.1, "both"), ValueError, "dropout.mode is 'both'; expected 'adapter'"),
        (Dropout(jnp.zeros(3, jnp.uint32), 0.1), ValueError, r"expected uint32\[2\]"),
    ],
)
def test_bad_dropout(dropout, error, message):
    with pytest.raises(error, match=message):
        ops.dora_linear(**operands(), scale=SCALE, dropout=dropout)
