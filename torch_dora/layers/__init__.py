"""DoRA layers over existing layers other than ``torch.nn.Linear``."""

from torch_dora.layers.conv import DoRAConv
from torch_dora.layers.conv1d import DoRAConv1D
from torch_dora.layers.embedding import DoRAEmbedding

__all__ = ["DoRAConv", "DoRAConv1D", "DoRAEmbedding"]
