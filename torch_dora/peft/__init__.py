"""Loads Hugging Face PEFT adapter folders into torch models, and saves them.

model = torch_dora.peft.load_adapter(model, "folder")
torch_dora.peft.save_adapter(model, "another")
"""

from dora_common.peft.config import AdapterConfig
from torch_dora.peft.load import load_adapter
from torch_dora.peft.save import save_adapter

__all__ = ["AdapterConfig", "load_adapter", "save_adapter"]
