"""Small models: one of our own, and one of each family, made by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jax_dora.lm.models import DecoderConfig

SMALL = DecoderConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    dtype=np.dtype("float32"),
)
SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Each differs from the others in what the decoder must do, not in size alone.
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-biases-llama3": lambda: transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3
    ),
    "llama-linear": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    # The texts of the tests, of 37 tokens, are longer than these lengths and windows.
    "llama-yarn": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
            "original_max_position_embeddings": 16,
        },
    ),
    "llama-dynamic": lambda: transformers.LlamaConfig(
        **SIZES | {"max_position_embeddings": 16},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    ),
    "mistral-sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=9),
    "qwen3-sliding": lambda: transformers.Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=0
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=256),
    "qwen2": lambda: transformers.Qwen2Config(
        **{name: size for name, size in SIZES.items() if name != "head_dim"}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "qwen3-tied": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
}


def torch_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of random weights, of which no norm's is one and no bias zero."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def make_torch_model():
    return torch_model


# What these do, others do too, and more.
CONTAINED = ("llama", "mistral", "qwen3")


@pytest.fixture(
    params=[pytest.param(one, marks=[pytest.mark.slow] * (one in CONTAINED)) for one in FAMILIES]
)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory) -> Callable[..., Path]:
    """A folder as transformers writes it, in several files unless told otherwise."""

    def make(family: str, *, dtype: torch.dtype = torch.float32, max_shard_size="60KB") -> Path:
        folder = tmp_path_factory.mktemp(family)
        torch_model(family, dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return make


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 37)).astype(np.int32)
