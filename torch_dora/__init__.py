"""DoRA, weight-decomposed low-rank adaptation, for PyTorch.

The layer is :class:`DoRALinear`, and :func:`apply_dora` puts such layers into an existing model.
The functions they are made of are in :mod:`torch_dora.ops`.
"""

from torch_dora.adapt import DoRARule, apply_dora, merge_dora, remove_dora
from torch_dora.layers import DoRAConv, DoRAConv1D, DoRAEmbedding
from torch_dora.nn import DoRALinear
from torch_dora.reuse import drop_norms, keep_norms, refresh_norms

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
    "refresh_norms",
    "remove_dora",
]
