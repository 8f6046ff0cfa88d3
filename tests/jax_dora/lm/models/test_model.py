"""The decoder computes what transformers' models compute."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_dora
import jax_dora.lm.models as decoder
from parity import tolerances
from tests.jax_dora.drawn import drawn
from tests.jax_dora.lm.models.conftest import SMALL

CONFIG = dataclasses.replace(SMALL, num_hidden_layers=3, qk_norm=True)
DORA = functools.partial(jax_dora.DoRALinear, rank=4, alpha=6)


run = nnx.jit(lambda model, *inputs: model(*map(jnp.asarray, inputs)))


def cosine(a, b):
    a, b = np.float64(a).ravel(), np.float64(b).ravel()
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.double().numpy()


@pytest.mark.ci
def test_logits_fp32(family, make_folder, make_torch_model, tokens):
    model = decoder.load_model(make_folder(family))
    expected = torch_logits(make_torch_model(family), tokens)
    logits = run(model, tokens)
    assert logits.dtype == jnp.float32
    assert cosine(logits, expected) >= tolerances.caps.COSINE["float32"]
    assert np.abs(logits - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("llama", "bfloat16", marks=pytest.mark.slow),
        pytest.param("qwen3", "bfloat16", marks=pytest.mark.slow),
        ("qwen3", "float16"),
    ],
)
def test_logits_of_16_bits(name, dtype, make_folder, make_torch_model, tokens):
    """As near to fp64 as transformers in that dtype, by flash-attention's rule."""
    exact = torch_logits(make_torch_model(name, getattr(torch, dtype)).double(), tokens)
    theirs = torch_logits(make_torch_model(name, getattr(torch, dtype)), tokens)
    model = decoder.load_model(make_folder(name, dtype=getattr(torch, dtype)))
    with jax.numpy_dtype_promotion("standard"):  # jax.nn.dot_product_attention's own need
        logits = run(model, tokens)
    assert logits.dtype == dtype
    bound = tolerances.flash_rule(np.abs(theirs - exact).max(), np.abs(exact).max(), dtype)
    assert np.abs(np.float64(logits) - exact).max() <= bound
    assert cosine(logits, exact) >= tolerances.caps.LOGITS_COSINE


@pytest.mark.slow
def test_packed_rows_are_separate_texts(tokens):
    model = drawn(lambda: decoder.CausalLM(CONFIG, rngs=nnx.Rngs(0)))
    tokens = tokens[:1] % CONFIG.vocab_size
    lengths = (13, 11, 13)
    segments = np.repeat([2, 3, 1], lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    packed = run(model, tokens, positions, segments)
    apart = [run(model, part) for part in np.split(tokens, np.cumsum(lengths)[:-1], axis=1)]
    np.testing.assert_allclose(
        packed, np.concatenate(apart, axis=1), rtol=0, atol=tolerances.caps.OPERATOR_FP32_MAX_ABS
    )


@pytest.mark.slow
def test_defined_with_adapters():
    """`linear` makes the seven projections of every layer, and nothing else."""
    model = decoder.make_model(CONFIG, linear=DORA)
    paths = {path for path, _ in nnx.to_flat_state(nnx.state(model, jax_dora.DoRAParam))}
    assert {path[:-1] for path in paths} == {
        ("model", "layers", block, name)
        for block, names in {
            "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
            "mlp": ("gate_proj", "up_proj", "down_proj"),
        }.items()
        for name in names
    }
    assert model.model.layers.mlp.down_proj.lora_a.shape == (3, 56, 4)
    layer = model.model.layers.mlp.down_proj
    # Every layer of the stack draws its own.
    assert not np.array_equal(layer.kernel[0], layer.kernel[1])
    assert not np.array_equal(layer.lora_a[0], layer.lora_a[1])
    np.testing.assert_allclose(
        layer.magnitude[...], np.linalg.norm(layer.kernel[...], axis=1), rtol=1e-6
    )


def gradients(model, tokens):
    @nnx.jit
    def compute(model, tokens):
        def loss(model):
            loss = decoder.last_tokens_loss(model, tokens, 20)
            return loss.total / loss.weight

        return nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)

    return compute(model, jnp.asarray(tokens % CONFIG.vocab_size))


@pytest.mark.slow
def test_remat_changes_no_gradient_and_saves_the_norm(tokens):
    """Recomputing a layer is exact, and computes no norm a second time."""
    linear = functools.partial(DORA, lora_b_init=nnx.initializers.normal(0.1))
    with_remat = decoder.make_model(CONFIG, linear=linear)
    graphdef, state = nnx.split(with_remat)
    without = decoder.make_model(dataclasses.replace(CONFIG, remat=False), linear=linear)
    nnx.update(without, state)
    for a, b in zip(
        jax.tree.leaves(gradients(with_remat, tokens)),
        jax.tree.leaves(gradients(without, tokens)),
        strict=True,
    ):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)

    def loss(adapters, rest):
        model = nnx.merge(graphdef, adapters, rest)
        loss = decoder.last_tokens_loss(model, jnp.asarray(tokens % CONFIG.vocab_size), 20)
        return loss.total

    adapters, rest = nnx.split_state(state, nnx.LoRAParam, ...)
    text = str(jax.make_jaxpr(jax.grad(loss))(adapters, rest))
    assert text.count("name[name=dora_norm]") == 7


@pytest.mark.slow
def test_dropout_draws_new_masks(tokens):
    linear = functools.partial(DORA, dropout=0.5)
    model = drawn(lambda: decoder.CausalLM(CONFIG, linear=linear, rngs=nnx.Rngs(0)))
    tokens = tokens % CONFIG.vocab_size
    first, second = run(model, tokens), run(model, tokens)
    assert not np.array_equal(first, second)
    model.eval()
    np.testing.assert_array_equal(run(model, tokens), run(model, tokens))


def test_qwen3_8b_dimensions():
    sizes = (151_936, 4096, 12_288, 36, 32, 8, 128)
    config = decoder.DecoderConfig(*sizes, qk_norm=True)
    model = nnx.eval_shape(lambda: decoder.CausalLM(config, rngs=nnx.Rngs(0)))
    arrays = jax.tree.leaves(nnx.state(model))
    assert {array.dtype for array in arrays} == {jnp.dtype(jnp.bfloat16)}
    assert sum(array.size for array in arrays) == 8_190_735_360
