"""Tells which modules of a model are projections, as "all-linear" selects them."""

from typing import Any

from torch import nn

from torch_dora.layers import DoRAConv1D, DoRAExperts, DoRALayer, DoRALinear, layer_class


def is_linear(module: nn.Module) -> bool:
    """Returns whether ``module`` is a projection, or packed experts, that is adapted or can be."""
    kind = type(module) if isinstance(module, DoRALayer) else layer_class(module)
    return kind is not None and issubclass(kind, DoRALinear | DoRAConv1D | DoRAExperts)


def projection_shape(module: Any) -> tuple[int, int] | None:
    """Returns (out, in) of a module that says how many features it projects, whatever holds its
    weight; None for other modules."""
    for names in (("out_features", "in_features"), ("outfeatures", "infeatures")):
        out, width = (getattr(module, name, None) for name in names)
        if isinstance(out, int) and isinstance(width, int) and not any(module.children()):
            return out, width
    return None


def output_head(model: nn.Module) -> nn.Module | None:
    """Returns the output head, if the model has a ``get_output_embeddings`` method."""
    return getattr(model, "get_output_embeddings", lambda: None)()
