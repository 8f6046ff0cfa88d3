"""What of a PEFT folder can be served in vLLM; the rest is refused by name.

This module knows vLLM's dictionaries and tensors, and does not import vLLM.
"""

import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dora_common.hyperparameters import adapter_scale
from dora_common.peft.config import AdapterConfig
from dora_common.peft.keys import PREFIX
from dora_common.peft.keys import parse as parse_key
from dora_common.rules import listing

_LOG = logging.getLogger(__name__)
_MERGE = "merge the adapter into its model, and serve that as a model of its own"
# The keys are the same in each adapter of a model, and are asked for several times.
parse = functools.lru_cache(2**14)(parse_key)
# Fields of AdapterConfig that ask for more than A, B and m in linear layers.
_REFUSED = {
    "modules_to_save": "it replaces whole modules of the base model",
    "trainable_token_indices": "it replaces rows of the embedding",
    "target_parameters": "it adapts packed experts",
}


class FolderError(ValueError):
    """An adapter that cannot be served."""


@dataclass(frozen=True)
class Layer:
    """The adapter of one module of the base model.

    Attributes:
      module: the module's name, as in the folder's keys.
      magnitude: f32[out].
      rank, scale: as PEFT computes them, with the folder's patterns.
    """

    module: str
    magnitude: Tensor
    rank: int
    scale: float


def read_config(fields: Mapping[str, Any]) -> AdapterConfig:
    """Reads the fields of adapter_config.json of a DoRA adapter.

    Args:
      fields: as vLLM has read them. Fields whose names begin with "vllm_" are vLLM's own.

    Raises:
      FolderError: a field is malformed, or asks for something that is not served.
    """
    own = {name: value for name, value in fields.items() if not name.startswith("vllm_")}
    try:
        config = AdapterConfig.from_json(json.dumps(own))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise FolderError(f"adapter_config.json: {error}") from error
    for name, reason in _REFUSED.items():
        if value := getattr(config, name):
            raise FolderError(
                f"adapter_config.json: {name} is {value!r}; expected null: {reason}, which all "
                f"adapters share. {_MERGE.capitalize()}"
            )
    if config.bias != "none":
        raise FolderError(
            f"adapter_config.json: bias is {config.bias!r}; expected 'none': all adapters share "
            f"the base model's biases. {_MERGE.capitalize()}"
        )
    return config


def is_magnitude(key: str) -> bool:
    """Returns whether a key of adapter_model.safetensors is that of a magnitude."""
    return parse(key).role == "magnitude"


def as_lora_b(key: str) -> str:
    """Returns the key of lora_B of the same module as this key of a magnitude."""
    prefix = PREFIX if key.startswith(PREFIX) else ""
    return f"{prefix}{parse(key).module}.lora_B.weight"


def refuse_magnitudes(keys: Mapping[str, Tensor]) -> None:
    """Raises FolderError if a folder without use_dora has magnitudes."""
    if found := [key for key in keys if is_magnitude(key)]:
        raise FolderError(
            "adapter_config.json has no use_dora, but the folder has magnitudes; expected use_dora "
            f"= true, or no magnitudes:{listing(found)}"
        )


def read_layers(
    config: AdapterConfig,
    tensors: Mapping[str, Tensor],
    is_skipped: Callable[[str], bool] = lambda key: False,
) -> dict[str, Layer]:
    """Checks that the tensors are those of a DoRA adapter.

    Args:
      config: the adapter's configuration.
      tensors: the folder's tensors, by key.
      is_skipped: whether the model has no use for a tensor, such as one of a drafting head.

    Returns:
      the layers by the key of their lora_B.

    Raises:
      FolderError: a tensor is missing, is not part of an adapter of a linear layer, or has a wrong
        shape.
    """
    found: dict[str, dict[str, str]] = {}
    problems = []
    for key in tensors:
        if is_skipped(key):
            continue
        parsed = parse(key)
        if parsed.role not in ("lora_a", "lora_b", "magnitude"):
            problems.append(f"{key}: expected only lora_A, lora_B and magnitudes of linear layers")
        elif (other := found.setdefault(parsed.module, {}).setdefault(parsed.role, key)) != key:
            problems.append(f"{key} and {other} are the same tensor; expected one of them")
    layers = {}
    for module, keys in sorted(found.items()):
        if missing := [role for role in ("lora_a", "lora_b", "magnitude") if role not in keys]:
            problems.append(f"{module} has no {', '.join(missing)}; expected all three")
            continue
        lora_a, lora_b, magnitude = (tensors[keys[r]] for r in ("lora_a", "lora_b", "magnitude"))
        rank = config.rank_of(module)
        if lora_a.ndim != 2 or lora_a.shape[0] != rank:
            problems.append(f"{keys['lora_a']} is {_shape(lora_a)}; expected [{rank}, in]")
        elif lora_b.ndim != 2 or lora_b.shape[1] != rank:
            problems.append(f"{keys['lora_b']} is {_shape(lora_b)}; expected [out, {rank}]")
        elif magnitude.squeeze().shape != lora_b[:, 0].squeeze().shape:
            problems.append(
                f"{keys['magnitude']} is {_shape(magnitude)}; expected [{lora_b.shape[0]}], one "
                "number for each row of lora_B"
            )
        else:
            scale = adapter_scale(rank, config.alpha_of(module), config.use_rslora)
            values = magnitude.reshape(-1).to(torch.float32)
            layers[as_lora_b(keys["magnitude"])] = Layer(module, values, rank, scale)
    if problems or not layers:
        problems = problems or ["it has no layer"]
        raise FolderError(f"not a DoRA adapter that can be served:{listing(problems)}")
    for problem in config.unused_patterns(found):
        _LOG.warning("adapter_config.json: %s", problem)
    return layers


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
