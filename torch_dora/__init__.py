"""DoRA, weight-decomposed low-rank adaptation, for PyTorch.

The layer is :class:`DoRALinear`; the functions it is made of are in :mod:`torch_dora.ops`.
"""

from torch_dora.nn import DoRALinear

__all__ = ["DoRALinear"]
