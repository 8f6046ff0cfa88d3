"""DoRA, weight-decomposed low-rank adaptation, for PyTorch.

The layer is :class:`DoRALinear`, and :func:`apply_dora` puts such layers into an existing model.
The functions they are made of are in :mod:`torch_dora.ops`; Hugging Face PEFT folders are read and
written by :mod:`torch_dora.peft`, which is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_dora.adapt import DoRARule, apply_dora, merge_dora, remove_dora
from torch_dora.layers import DoRAConv, DoRAConv1D, DoRAEmbedding
from torch_dora.nn import DoRALinear
from torch_dora.reuse import drop_norms, keep_norms, refresh_norms

if TYPE_CHECKING:
    from torch_dora import peft as peft

__all__ = [
    "DoRAConv",
    "DoRAConv1D",
    "DoRAEmbedding",
    "DoRALinear",
    "DoRARule",
    "apply_dora",
    "drop_norms",
    "keep_norms",
    "merge_dora",
    "peft",
    "refresh_norms",
    "remove_dora",
]


def __getattr__(name: str) -> Any:
    if name == "peft":
        return importlib.import_module("torch_dora.peft")
    raise AttributeError(f"module 'torch_dora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
