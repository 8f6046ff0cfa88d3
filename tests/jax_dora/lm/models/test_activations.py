"""What is kept of a layer fits the budget, and changes no gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
import jax_dora.lm.models as decoder
from jax_dora.lm.models import activations, layer_stack
from jax_dora.lm.models.activations import GIB, Activation
from tests.jax_dora.drawn import drawn
from tests.jax_dora.lm.models.conftest import SMALL
from tests.jax_dora.programs import equations, gradient_of_logits
from tests.tables import thinned

CONFIG = dataclasses.replace(SMALL, hidden_size=24, intermediate_size=40)
DORA = functools.partial(jax_dora.DoRALinear, rank=3, alpha=4)
TOKENS = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, 17), dtype=np.int32)


def gradient_of(config):
    """Returns a function of the adapters, and adapters."""
    model = drawn(lambda: decoder.CausalLM(config, linear=DORA, rngs=nnx.Rngs(0)))
    graphdef, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(adapters):
        model = nnx.merge(graphdef, adapters, rest)
        return decoder.last_tokens_loss(model, jnp.asarray(TOKENS), 9).total

    return jax.grad(loss), adapters


def readings(function, *arguments):
    """Returns the shapes of the second operands, which of products are kernels, of all of the
    library's operators that the function computes."""
    found = (one for one in equations(function, *arguments) if one.primitive.name == "dora")
    return [tuple(one.invars[1].aval.shape) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True])
def test_what_is_kept_changes_no_gradient(unroll):
    expected, adapters = gradient_of(CONFIG)
    found, _ = gradient_of(dataclasses.replace(CONFIG, memory=1.0, unroll=unroll))
    for a, b in zip(
        jax.tree.leaves(jax.jit(found)(adapters)),
        jax.tree.leaves(jax.jit(expected)(adapters)),
        strict=True,
    ):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize("bias", thinned([False, True], [True]))
def test_a_kept_result_is_not_computed_again(bias):
    """A projection reads its kernel in the forward pass and, for x's gradient, in the backward
    pass."""
    counts = {}
    biases = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}
    for memory in (None, 1.0):
        function, adapters = gradient_of(dataclasses.replace(CONFIG, memory=memory, **biases))
        shapes = readings(function, adapters)
        counts[memory] = [shapes.count(shape) for shape in ((24, 40), (40, 24), (32, 24))]
    assert counts[None] == [6, 3, 3]
    assert counts[1.0] == [4, 2, 2]


def test_the_last_result_is_kept_before_any_other():
    """It takes the fewest bytes for what it saves, and alone does not keep z of a large rank."""
    size = 2 * 17 * CONFIG.num_hidden_layers * 4 * CONFIG.hidden_size
    config = dataclasses.replace(CONFIG, memory=size / GIB)
    assert [one.name for one in activations.plan(config, 2, 17)] == [activations.LAST]
    shapes = readings(*gradient_of(config))
    assert [shapes.count(shape) for shape in ((24, 40), (40, 24), (32, 24))] == [6, 2, 3]


@pytest.mark.parametrize(("most", "expected"), [(3, [10, 2, 2]), (2, [15, 3, 3])])
def test_z_is_kept_with_others_up_to_a_rank(most, expected, monkeypatch):
    """z of rank 3 is computed once or, for lora_b's gradient, again. The norm reads lora_a too."""
    monkeypatch.setattr(activations, "MOST_Z_FEATURES", most)
    activations.policy.cache_clear()  # JAX keeps by policies what it has found to be kept.
    shapes = readings(*gradient_of(dataclasses.replace(CONFIG, memory=1.0)))
    assert [shapes.count(shape) for shape in ((24, 3), (40, 3), (32, 3))] == expected


CHOICES = [
    Activation(name, 0, size, work)
    for name, size, work in (("a", 4, 40.0), ("b", 3, 33.0), ("c", 3, 32.0), ("d", 1, 1.0))
]


@pytest.mark.parametrize(
    ("budget", "expected"), [(0, ""), (10, "d"), (40, "a"), (60, "bc"), (70, "ab"), (1000, "abcd")]
)
def test_the_best_set_within_the_budget(budget, expected):
    kept = activations.best(CHOICES, 10, budget)
    assert "".join(one.name for one in kept) == expected


def test_sizes_are_those_of_the_arrays():
    """In bytes a token and layer, of Llama 3 8B's widths: 11 projections' worth of 1024 features
    and 2 × 14 in bf16."""
    config = dataclasses.replace(
        CONFIG,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        dtype=jnp.bfloat16,
        attention="cudnn",
    )
    sizes = {(one.name, one.width): one.size for one in activations.activations(config, 4096)}
    assert sizes == {
        ("last", 0): 4096 * 2,
        ("dora_result", 4096): 2 * 4096 * 2,
        ("dora_result", 1024): 2 * 1024 * 2,
        ("dora_result", 14336): 2 * 14336 * 2,
        ("attention", 0): 4096 * 2 + 32 * 4,
    }
    unrolled = activations.activations(dataclasses.replace(config, unroll=True), 4096)
    sizes |= {("normed", 0): 2 * 4096 * 2, ("gated", 0): 14336 * 2}
    assert {(one.name, one.width): one.size for one in unrolled} == sizes
    kept = activations.plan(
        dataclasses.replace(config, memory=21 / 16, num_hidden_layers=1), 2, 4096
    )
    assert 8192 * sum(one.size for one in kept) <= 21 / 16 * GIB


def test_a_bias_keeps_inner_beside_the_result():
    """Of q, k and v; of what has no bias, the result is all."""
    plain, biased = (
        {one.width: one.size for one in activations.activations(config, 8) if one.width}
        for config in (CONFIG, dataclasses.replace(CONFIG, qkv_bias=True))
    )
    assert biased == {
        width: size + {32: 32, 16: 2 * 16}.get(width, 0) * 4 for width, size in plain.items()
    }


def test_what_is_in_use_is_not_planned_with(monkeypatch):
    """\"auto\" keeps what a budget would that is as large as what is free, less a working set."""
    config = dataclasses.replace(CONFIG, memory="auto")
    choices = activations.activations(config, 8)
    everything = 1024 * 8 * config.num_hidden_layers * sum(one.size for one in choices)
    monkeypatch.setattr(activations, "free_memory", lambda: float(everything))
    assert len(activations.plan(config, 1024, 8)) < len(choices)
    monkeypatch.setattr(activations, "free_memory", lambda: 100.0 * everything)
    assert len(activations.plan(config, 1024, 8)) == len(choices)


def test_negative_budget():
    with pytest.raises(ValueError, match="memory is -1; expected at least 0 GiB, or 'auto'"):
        activations.plan(dataclasses.replace(CONFIG, memory=-1), 1, 8)


def test_a_device_that_does_not_tell_keeps_nothing():
    assert activations.plan(dataclasses.replace(CONFIG, memory="auto"), 1, 8) == ()


LLAMA_70B = dataclasses.replace(
    CONFIG,
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    num_hidden_layers=80,
    dtype=jnp.bfloat16,
    attention="cudnn",
)


def test_the_first_layers_keep_more_in_what_is_left():
    config = dataclasses.replace(LLAMA_70B, memory=44.0)
    (first, more), (others, kept) = activations.parts(config, 1, 4096, in_fp8=True)
    assert kept == activations.plan(config, 1, 4096, in_fp8=True)
    assert {one.name for one in set(more) - set(kept)} == {activations.ATTENTION}
    sizes = [sum(one.size for one in part) for part in (more, kept)]
    used = 4096 * (first * sizes[0] + others * sizes[1])
    assert first + others == 80
    assert 0 <= 44 * GIB - used < 4096 * (sizes[0] - sizes[1])
    # In 16 bits, a byte of a product's result saves more time than one of attention's.
    (_, more), (_, kept) = activations.parts(config, 1, 4096)
    assert {one.width for one in set(more) - set(kept)} == {8192}
    whole = dataclasses.replace(LLAMA_70B, memory=58.0)
    assert [count for count, _ in activations.parts(whole, 1, 4096, in_fp8=True)] == [80]


def test_a_decoder_with_two_parts(monkeypatch):
    """Its gradients are those of one, and only some layers compute their projections again."""
    config = dataclasses.replace(SMALL, remat=True, num_hidden_layers=3, memory=0.0)
    model = decoder.CausalLM(config, rngs=nnx.Rngs(0))
    model = jax_dora.quantize(model, "float8_e4m3fn", path=".*_proj", act_qtype="float8_e4m3fn")
    model = jax_dora.apply_dora(model, jax_dora.DoRARule(".*_proj", 1, 1.0), rngs=nnx.Rngs(1))
    monkeypatch.setattr(layer_stack, "_has_little_but_codes", lambda _: True)  # It is so small.
    gradient, trained = gradient_of_logits(model, np.arange(18).reshape(2, 9) % 97)

    found, names = {}, {}
    everything = tuple(activations.activations(config, 9, in_fp8=True))
    for name, parts in {"one": [(3, ())], "two": [(1, everything), (2, ())]}.items():
        monkeypatch.setattr(activations, "parts", lambda *_, parts=parts: parts)
        found[name] = jax.tree.leaves(jax.jit(lambda x: gradient(x))(trained))
        program = equations(lambda x: gradient(x), trained)
        names[name] = [str(one.params.get("op")) for one in program].count("project")
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6 * float(abs(other).max()))
    # Seven forward and seven or none again, in a loop each.
    assert names == {"one": 14, "two": 7 + 14}
