"""A step in FP8 on two devices, beside one device, and what travels between the two."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora.lm.models import CausalLM, DecoderSharding, next_token_loss
from jax_dora.ops import norm as norms
from jax_dora.ops.mosaic.norm import transposing_norm
from tests.jax_dora.lm.models.conftest import SMALL
from tests.jax_dora.small_models import train

FP8 = "float8_e4m3fn"
ROWS, TIME, VOCABULARY = 2, 67, 96
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, TIME + 1)).astype(np.int32)
CHOOSE = norms.choose.choose
RANK, TOKEN_AXES = 3, {TIME, ROWS * TIME}


@functools.cache
def step(axis, codes_by_norm=False):
    """Returns the loss and gradients of adapters on two devices by an axis of the mesh, or on one,
    and the compiled program. `codes_by_norm` is whether norms make transposed codes, as by their
    kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if codes_by_norm:
            patch.setattr(norms.choose, "choose", chosen)
        return made_step(axis)


def chosen(op, implementation, *candidates, optional=False):
    if optional and candidates[0][0] is transposing_norm:
        return True
    return CHOOSE(op, implementation, *candidates, optional=optional)


def made_step(axis):
    sharding = axis and DecoderSharding.over(**{axis: 2}, devices=jax.devices()[:2])
    config = dataclasses.replace(SMALL, vocab_size=VOCABULARY, sharding=sharding)
    model = CausalLM(config, rngs=nnx.Rngs(0))
    model = jax_dora.quantize(model, FP8, path=".*_proj", act_qtype=FP8, bwd_qtype="float8_e5m2")
    rule = jax_dora.DoRARule(".*_proj", RANK, 4.0)
    model = train(jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(1)))
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    tokens = jnp.asarray(TOKENS)
    if sharding:
        trained, frozen = (
            jax.tree_util.tree_map_with_path(functools.partial(placed, sharding), state)
            for state in (trained, frozen)
        )
        tokens = jax.device_put(tokens, sharding.rows)

    def loss(trained, frozen, tokens):
        model = nnx.merge(graphdef, trained, frozen)
        weights = jnp.ones((ROWS, TIME), jnp.float32)
        return next_token_loss(model, tokens[:, :-1], tokens[:, 1:], weights).total

    compiled = jax.jit(jax.value_and_grad(loss)).lower(trained, frozen, tokens).compile()
    value, gradients = compiled(trained, frozen, tokens)
    return value, jax.tree.leaves(gradients), compiled.as_text()


def placed(sharding, path, array):
    names = (getattr(key, "key", None) for key in path)
    name = "/".join(one for one in names if isinstance(one, str))
    return jax.device_put(array, sharding(name, array.shape))


def moved(text):
    """Returns (collective, dtype, shape) of every array that travels in the layers of a program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for line in text.splitlines():
        found = re.search(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", line)
        if found and "/while/body/" in line and "/cond/" not in line:  # that is the loss
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", found[1]):
                yield found[2], dtype, tuple(map(int, filter(None, shape.split(","))))


@pytest.mark.slow
@pytest.mark.parametrize("codes_by_norm", [False, True])
@pytest.mark.parametrize("axis", ["fsdp", "tp"])
def test_the_step_of_one_device(axis, codes_by_norm):
    """A row that devices share has one scale, so its codes are those of one device."""
    (value, found, _), (wanted_value, wanted, _) = step(axis, codes_by_norm), step(None)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-4)
    for one, other in zip(found, wanted, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.linalg.norm(one - other) <= 0.02 * np.linalg.norm(other)


@pytest.mark.slow
@pytest.mark.parametrize("codes_by_norm", [False, True])
def test_tensor_parallelism_gathers_nothing(codes_by_norm):
    """What LoRA moves travels: sums over features of activations and of their gradients."""
    arrays = list(moved(step("tp", codes_by_norm)[2]))
    assert {kind for kind, _, _ in arrays} == {"all-reduce"}
    with_tokens = [shape for _, _, shape in arrays if TOKEN_AXES & set(shape)]
    widths = {shape[-1] for shape in with_tokens} - TOKEN_AXES - {1}
    assert widths == {SMALL.hidden_size, RANK}


@pytest.mark.slow
@pytest.mark.parametrize("codes_by_norm", [False, True])
def test_fsdp_gathers_weights_only(codes_by_norm):
    """And no activation: each device computes whole rows."""
    arrays = list(moved(step("fsdp", codes_by_norm)[2]))
    gathered = [shape for kind, _, shape in arrays if kind == "all-gather"]
    assert gathered
    # Those of down's codes and, transposed, of gate's and up's, both of whose products are computed
    # twice: features that a product sums over.
    in_parts = (2, SMALL.intermediate_size, SMALL.hidden_size // 2)
    assert gathered.count(in_parts) == (5 if codes_by_norm else 1)
    assert not [one for one in arrays if TOKEN_AXES & set(one[2])]
