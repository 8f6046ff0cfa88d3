"""DoRA layers: an existing layer together with its adapter."""

from torch import nn

from torch_dora.layers.base import DoRALayer as DoRALayer
from torch_dora.layers.conv import DoRAConv as DoRAConv
from torch_dora.layers.embedding import DoRAEmbedding as DoRAEmbedding
from torch_dora.layers.experts import DoRAExperts as DoRAExperts
from torch_dora.layers.experts import PackedExperts as PackedExperts
from torch_dora.layers.experts import packed_experts as packed_experts
from torch_dora.layers.linear import DoRAConv1D as DoRAConv1D
from torch_dora.layers.linear import DoRALinear as DoRALinear
from torch_dora.layers.linear4bit import DoRALinear4bit as DoRALinear4bit
from torch_dora.layers.names import adapted_layers as adapted_layers
from torch_dora.layers.names import check_is_module as check_is_module
from torch_dora.layers.names import dora_layers as dora_layers
from torch_dora.layers.names import named_modules as named_modules
from torch_dora.layers.names import record_untied as record_untied
from torch_dora.layers.names import tied_modules as tied_modules

LAYERS: list[type[DoRALayer]] = [
    DoRALinear,
    DoRAConv,
    DoRAEmbedding,
    DoRAConv1D,
    DoRALinear4bit,
    DoRAExperts,
]
"""The layer classes that :func:`torch_dora.apply_dora` chooses from. You can append your own."""


def layer_class(module: nn.Module) -> type[DoRALayer] | None:
    """Returns the class that adapts ``module``, or None if there is none."""
    return next((kind for kind in LAYERS if kind.adapts(module)), None)
