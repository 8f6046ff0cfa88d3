"""Loads Hugging Face PEFT adapter folders into torch models, and saves them.

model = torch_dora.peft.load_adapter(model, "folder")
torch_dora.peft.save_adapter(model, "another")

``accelerate`` makes the DoRA layers of a live PeftModel compute by torch_dora.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dora_common.peft.config import AdapterConfig
from torch_dora.peft.load import load_adapter
from torch_dora.peft.save import save_adapter

if TYPE_CHECKING:
    from torch_dora.peft.acceleration import accelerate, restore
    from torch_dora.peft.trainer import TrainerCallback

__all__ = [
    "AdapterConfig",
    "TrainerCallback",
    "accelerate",
    "load_adapter",
    "restore",
    "save_adapter",
]

_LAZY = {"TrainerCallback": "trainer", "accelerate": "acceleration", "restore": "acceleration"}

if not TYPE_CHECKING:  # a type checker would accept any attribute of the package

    def __getattr__(name: str) -> Any:
        """Imports what needs transformers or PEFT only when it is used."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"torch_dora.peft.{_LAZY[name]}"), name)
