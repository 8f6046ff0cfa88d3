"""Damaged folders, what PEFT makes of each, and what a reader has to make of it."""

import json
import math
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from safetensors.torch import load_file
from torch import nn

from tests.dora_common.peft.damage import CONFIG, TENSORS, damage
from tests.torch_dora.peft_folders import perturbed

IDS = np.arange(4)
TOLERANCE = 1e-5
REFUSALS = (ValueError, TypeError, NotImplementedError, FileNotFoundError)
FOLDERS: dict[str, dict[str, Any]] = {
    "modules": {"modules_to_save": ["last"]},
    "patterns": {
        "rank_pattern": {"first": 1},
        "alpha_pattern": {"middle": 5},
        "use_rslora": True,
        "bias": "all",
    },
    "lora": {"use_dora": False, "target_modules": "first|last", "lora_dropout": 0.1},
    "tokens": {
        "target_modules": ["first"],
        "trainable_token_indices": {"middle": [3, 1]},
        "modules_to_save": ["last"],
    },
}
_ATTRIBUTES = {
    "lora_A.weight": "lora_a",
    "lora_B.weight": "lora_b",
    "lora_magnitude_vector": "magnitude",
    "lora_embedding_A": "lora_a",
    "lora_embedding_B": "lora_b",
    "token_adapter.trainable_tokens_delta": "rows",
    "weight": "weight",
    "bias": "bias",
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 2)
        self.middle = nn.Embedding(4, 3)
        self.last = nn.Linear(2, 2)

    def forward(self, ids):
        return self.last(torch.tanh(self.first(self.middle(ids))))


def make_folder(parent: Path, name: str, **factors: float) -> Path:
    """Returns a folder of PEFT's, one of FOLDERS.

    Args:
      factors: what tensors are multiplied with, by a part of their keys.
    """
    folder = parent / name
    options = {"r": 2, "lora_alpha": 3, "use_dora": True, "target_modules": ["first", "middle"]}
    config = peft.LoraConfig(**options | FOLDERS[name])
    model = perturbed(peft.get_peft_model(Model(), config))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter *= math.prod(factor for part, factor in factors.items() if part in key)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def fuzz(
    parent: Path, count: int, seed: int, load: Callable[[int, Path, str], np.ndarray]
) -> dict[str, int]:
    """Damages `count` folders, and holds a reader to PEFT.

    Args:
      load: reads the folder into a model, which it holds to `stored`, and returns the model's
        output for IDS; or raises one of REFUSALS, with the model as it was. Its first argument
        counts, its last says what was damaged.

    Returns:
      how many folders were equal, refused, and refused although PEFT reads them.
    """
    wholes = [make_folder(parent, name) for name in FOLDERS]
    chance, found = random.Random(seed), {"equal": 0, "refused": 0, "refused, not by PEFT": 0}
    folder = parent / "damaged"
    for number in range(count):
        whole = wholes[number % len(wholes)]
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        told = f"mutation {number} of {whole.name}: {damage(folder, chance)}"
        named = False
        try:
            output = load(number, folder, told)
        except REFUSALS as error:
            output, named = None, str(folder) in str(error)
        assert output is not None or named, told
        theirs = _output(folder)
        if output is None:
            found["refused" if theirs is None else "refused, not by PEFT"] += 1
        else:
            if theirs is None:
                theirs = _output_without_what_says_nothing(folder, whole)
            assert theirs is not None, told
            np.testing.assert_allclose(output, theirs, TOLERANCE, TOLERANCE, err_msg=told)
            found["equal"] += 1
    return found


def stored(folder: Path) -> Iterator[tuple[str, str, slice | list[int], np.ndarray]]:
    """Yields each tensor of a folder as its module, its attribute as torch_dora calls it, the rows
    of that, and the tensor."""
    tokens = json.loads((folder / CONFIG).read_text()).get("trainable_token_indices")
    rows = next(iter(tokens.values())) if isinstance(tokens, dict) else tokens
    for key, tensor in load_file(folder / TENSORS).items():
        short = key.removeprefix("base_model.model.").replace(".default", "")
        for part in ("base_layer.", "modules_to_save."):
            short = short.replace(part, "")
        module, _, suffix = short.partition(".")
        attribute = _ATTRIBUTES[suffix]
        if attribute == "rows":
            yield module, "weight", rows, tensor.double().numpy()
        else:
            yield module, attribute, slice(None), tensor.double().numpy()


def _output(folder: Path) -> np.ndarray | None:
    """Returns what PEFT computes, or None where it raises whatever it does."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            model = peft.PeftModel.from_pretrained(Model(), folder)
            return model.eval()(torch.from_numpy(IDS)).numpy()
        except Exception:
            return None


def _output_without_what_says_nothing(folder: Path, whole: Path) -> np.ndarray | None:
    """Returns what PEFT computes with the fields of `whole` in place of those over which PEFT
    stumbles: that are empty, say what an adapter is for or began with, or name a module to save by
    a string, of which PEFT takes each letter for a name."""
    sound = json.loads((whole / CONFIG).read_text())
    fields = json.loads((folder / CONFIG).read_text())
    for name, value in fields.items():
        is_empty = value is False or value in (None, "", [], {}, [""])
        is_name = name == "modules_to_save" and [value] == sound.get(name)
        if is_empty or is_name or name in ("task_type", "eva_config"):
            fields[name] = sound.get(name)
    (folder / CONFIG).write_text(json.dumps(fields))
    return _output(folder)
