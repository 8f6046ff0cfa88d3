"""Warns where transformers saves an adapted model whole, which it could not load again."""

import functools
import logging
from typing import Any

from torch import nn

from torch_dora.layers import DoRALayer

_LOG = logging.getLogger(__name__)


def warn_for_adapted(model: nn.Module) -> None:
    """Makes ``save_pretrained`` of those modules of ``model`` that contain DoRA layers warn; of the
    others it is their class's again."""
    for module in model.modules():
        if not callable(getattr(type(module), "save_pretrained", None)):
            continue
        own: Any = vars(module).get("save_pretrained")
        if any(isinstance(child, DoRALayer) for child in module.modules()):
            if own is None:
                vars(module)["save_pretrained"] = functools.partial(_save, module)
        elif isinstance(own, functools.partial) and own.func is _save:
            del vars(module)["save_pretrained"]


def _save(module: Any, *arguments: Any, **named: Any) -> Any:
    if any(isinstance(child, DoRALayer) for child in module.modules()):
        _LOG.warning(
            "save_pretrained saves the whole base model, and the adapter's tensors by names that "
            "from_pretrained does not load: it returns the plain base model. Save the adapter by "
            "torch_dora.peft.save_adapter, or what torch_dora.merge_dora(model) returns; with a "
            "Trainer, use torch_dora.peft.TrainerCallback"
        )
    return type(module).save_pretrained(module, *arguments, **named)
