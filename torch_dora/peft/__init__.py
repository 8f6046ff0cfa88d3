"""Loads Hugging Face PEFT adapter folders into torch models, and saves them.

model = torch_dora.peft.load_adapter(model, "folder")
torch_dora.peft.save_adapter(model, "another")
"""

from typing import TYPE_CHECKING, Any

from dora_common.peft.config import AdapterConfig
from torch_dora.peft.load import load_adapter
from torch_dora.peft.save import save_adapter

if TYPE_CHECKING:
    from torch_dora.peft.trainer import TrainerCallback

__all__ = ["AdapterConfig", "TrainerCallback", "load_adapter", "save_adapter"]

if not TYPE_CHECKING:  # a type checker would accept any attribute of the package

    def __getattr__(name: str) -> Any:
        """Imports what needs transformers only when it is used."""
        if name != "TrainerCallback":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from torch_dora.peft.trainer import TrainerCallback

        return TrainerCallback
