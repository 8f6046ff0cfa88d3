"""Folders that transformers writes of models that bitsandbytes has quantised to NF4."""

import functools

import bitsandbytes.functional
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jax_dora.lm.models import load_model
from jax_dora.ops import quantised
from parity import tolerances
from tests.jax_dora.lm.models.test_model import cosine, run, torch_logits
from tests.tables import ci

# The MLP's kernels are not square, and have 640 scales: two groups of 256 and half a group.
CONFIG = {
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def float_folder(tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.state_dict()["model.layers.0.mlp.up_proj.weight"][0, :64] = 0
    folder = tmp_path_factory.mktemp("float")
    model.save_pretrained(folder)
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("twice", [ci(False), True])
def test_a_folder_of_bitsandbytes(float_folder, tmp_path, twice):
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        float_folder,
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=twice,
            bnb_4bit_compute_dtype=torch.float32,
        ),
        dtype=torch.float32,
        device_map="cpu",
    )
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, attention="xla")
    count = 0
    for name, weight in theirs.named_parameters():
        if not name.endswith("_proj.weight"):
            continue
        assert weight.quant_state.nested is twice
        wanted = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).numpy()
        _, _, layer, *path, _ = name.split(".")
        stack = functools.reduce(getattr, path, ours.model.layers).kernel[...]
        found = quantised.dequantise(stack, jnp.float32)[int(layer)].T
        np.testing.assert_array_equal(found, wanted)
        count += 1
    assert count == 14
    tokens = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (2, 37))
    # In evaluation, bitsandbytes' product on a CPU rounds its operands to bf16.
    expected = torch_logits(theirs.train(), tokens)
    logits = run(ours, tokens)
    assert cosine(logits, expected) >= tolerances.caps.COSINE["float32"]
    assert np.abs(logits - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS
