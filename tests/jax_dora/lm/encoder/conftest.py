"""Small DeBERTas, made by transformers: v2 as it was published at xlarge, v3, and unusual ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "num_labels": 3,
}
RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
V3 = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
# Each differs from the others in what the encoder must do.
FAMILIES: dict[str, dict[str, Any]] = {
    "v3": RELATIVE | V3,
    "v2-xlarge": RELATIVE
    | V3
    | {
        **{"conv_kernel_size": 3, "conv_act": "gelu", "attention_head_size": 12},
        **{"pooler_hidden_act": "tanh", "hidden_act": "gelu_new"},
    },
    "own-projections": RELATIVE | {"position_buckets": 16, "type_vocab_size": 2},
    "every-distance": RELATIVE | {"max_relative_positions": 20, "share_att_key": True},
    # Heads of 16 features, which the kernels know.
    "wide-heads": RELATIVE | V3 | {"hidden_size": 64},
    "c2p": RELATIVE | {"pos_att_type": ["c2p"], "position_buckets": 8},
    "p2c": RELATIVE | {"pos_att_type": ["p2c"], "norm_rel_ebd": "none", "conv_kernel_size": 5},
    "bert": {"embedding_size": 32, "type_vocab_size": 2},
}


def torch_model(family: str) -> Any:
    """A model of random weights in fp32, of which no norm's is one and no bias zero."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.DebertaV2Config(**SIZES | FAMILIES[family])
    model = transformers.DebertaV2ForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory) -> Callable[[str], Path]:
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        torch_model(family).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def texts() -> dict[str, np.ndarray]:
    """Three texts of up to 37 tokens, two of them padded, with types and labels."""
    rng = np.random.default_rng(0)
    shape = 3, 37
    return {
        "tokens": rng.integers(1, SIZES["vocab_size"], shape).astype(np.int32),
        "mask": np.arange(shape[1])[None] < np.array([37, 21, 5])[:, None],
        "types": rng.integers(0, 2, shape).astype(np.int32),
        "labels": np.array([2, 0, 1], np.int32),
    }
