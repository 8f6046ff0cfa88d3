"""A decoder whose rows have PEFT's adapters: each as PEFT has it with that one alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_dora
import jax_dora.lm.models as decoder
from parity import tolerances
from tests.jax_dora.peft.peft_folders import peft_model

SETTINGS = [
    {"r": 5, "lora_alpha": 8, "target_modules": "all-linear", "use_dora": True},
    {"r": 16, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"r": 2, "lora_alpha": 4, "target_modules": ["down_proj"], "layers_to_transform": [1]},
]
IDS = np.array([2, -1, 0, 1, 0])
LENGTH = 9


@pytest.fixture(scope="module")
def made(make_folder, make_torch_model, tmp_path_factory):
    """The plain model, a bank of all adapters, tokens, and what PEFT makes of each row."""
    model = decoder.load_model(make_folder("llama"))
    bank = jax_dora.AdapterBank(model, 4, 16)
    tokens = np.random.default_rng(0).integers(0, 199, (len(IDS), LENGTH)).astype(np.int32)
    given = torch.tensor(tokens)
    with torch.no_grad():
        expected = make_torch_model("llama")(given).logits.numpy()
        for slot, setting in enumerate(SETTINGS):
            theirs = peft_model(make_torch_model("llama"), slot, **setting)
            folder = tmp_path_factory.mktemp("adapter")
            theirs.save_pretrained(folder)
            bank = bank.load(slot, folder)
            rows = slot == IDS
            alone = theirs(given[rows]).logits.numpy()
            # The adapter is not a small change that would hide in the tolerance.
            assert np.abs(expected[rows] - alone).max() > 0.01
            expected[rows] = alone
    return model, bank, tokens, expected


@pytest.mark.ci
def test_every_row_is_as_peft_has_it(made):
    model, bank, tokens, expected = made
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, bank, ids):
        return jax_dora.with_bank(nnx.merge(graphdef, state), bank, ids)(tokens)

    logits = run(state, bank, IDS)
    assert np.abs(logits - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS
    assert np.array_equal(run(state, bank, np.full_like(IDS, -1))[1], logits[1])


@pytest.mark.ci
def test_step_by_step_with_a_cache(made):
    """The prompt's tokens at once, the others one by one."""
    model, bank, tokens, expected = made
    graphdef, state = nnx.split(model)

    @jax.jit
    def extend(state, bank, ids, tokens, cache):
        adapted = jax_dora.with_bank(nnx.merge(graphdef, state), bank, ids)
        hidden, cache = adapted.extend(tokens, cache)
        return adapted.logits(hidden), cache

    cache, found = decoder.make_cache(model.config, len(IDS), LENGTH), []
    for part in (tokens[:, :7], tokens[:, 7:8], tokens[:, 8:]):
        logits, cache = extend(state, bank, jnp.asarray(IDS), part, cache)
        found.append(logits)
    together = np.concatenate(found, axis=1)
    assert np.abs(together - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS


@pytest.mark.ci
def test_the_bank_is_not_taken_apart(made):
    """No layer's part of the bank is an array of its own, as a scan over it would make."""
    model, bank, tokens, _ = made
    graphdef, state = nnx.split(model)

    def run(state, bank):
        return jax_dora.with_bank(nnx.merge(graphdef, state), bank, IDS)(tokens)

    text = str(jax.make_jaxpr(run)(state, bank))
    slots, rank = bank.slots, 16
    for width in (48, 80, 96):
        assert f"f32[3,{slots},{rank},{width}]" in text
        assert f"f32[{slots},{rank},{width}]" not in text


@pytest.mark.ci
def test_a_head_is_in_the_bank_where_it_is_named(made):
    model, _, _, _ = made
    assert "lm_head" not in jax_dora.AdapterBank(model, 1, 2).paths
    assert "lm_head" in jax_dora.AdapterBank(model, 1, 2, path=".*").paths


@pytest.mark.ci
def test_folders_that_replace_base_weights_are_refused(made, make_torch_model, tmp_path):
    _, bank, _, _ = made
    settings = [
        ({"modules_to_save": ["lm_head"]}, NotImplementedError, "lm_head.weight"),
        ({"target_modules": ["embed_tokens"]}, ValueError, "an nnx.Embed is no projection"),
    ]
    for number, (setting, error, message) in enumerate(settings):
        setting = {"r": 2, "target_modules": ["q_proj"], **setting}
        theirs = peft_model(make_torch_model("llama"), 0, **setting)
        theirs.save_pretrained(tmp_path / str(number), save_embedding_layers=False)
        with pytest.raises(error, match=message):
            bank.load(3, tmp_path / str(number))


def test_an_adapter_of_a_tied_head_is_refused(make_folder, make_torch_model, tmp_path):
    setting = {"r": 2, "target_modules": ["lm_head", "q_proj"]}
    theirs = peft_model(make_torch_model("qwen3-tied"), **setting)
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)
    model = decoder.load_model(make_folder("qwen3-tied"))
    with pytest.raises(ValueError, match=r"'lm_head', which.*: it is tied to the embedding"):
        jax_dora.AdapterBank(model, 1, 2).load(0, tmp_path)
