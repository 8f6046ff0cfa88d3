"""Norms as values: taken once, and handed to the calls that would compute them again.

The norm depends on weight, lora_a and lora_b alone. Between two optimizer steps none of them moves,
so the micro-steps of gradient accumulation, and the second forward pass of gradient checkpointing,
can share one:

    for batches in steps:
        with torch_dora.with_norms(model, torch_dora.norms(model)):
            for batch in batches:
                loss(model, batch).backward()
        optimizer.step()

Results are bit for bit those of computing it on every call.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import listing
from torch_dora.layers import DoRALayer, dora_layers, placement
from torch_dora.ops import check
from torch_dora.ops.shards import whole


@torch.no_grad()
def norms(model: nn.Module) -> dict[str, Tensor]:
    """Returns the norm of every DoRA layer of ``model`` as it is now, by the layer's name.

    Each is f32[out] (f64 for an fp64 layer), detached. Where the model is sharded every process
    calls this, and has all of every norm.

    Raises:
        ValueError: there is no DoRA layer in ``model``.
        NotImplementedError: accelerate has offloaded a layer, or FSDP1 flattened its weight.
    """
    layers = _layers(model)
    placement.refuse_offloaded(layers.items())
    placement.refuse_flat(layers.items())
    return {name: whole(layer.norm()) for name, layer in layers.items()}


@contextlib.contextmanager
def with_norms(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Makes the DoRA layers of ``model`` use these norms inside of a ``with`` statement.

    The values must come from the very adapters and weights that the model has inside: nothing
    checks that, and with the norms of others the model computes something else. Gradients reach the
    adapters as without it, since a norm is constant under differentiation. Run the backward pass
    inside too where activations are checkpointed, or their recomputation computes the norms again.
    Make copies of the model outside: one that is made inside keeps the norms. Wrap it outside too:
    a DistributedDataParallel that is made inside expects them as buffers in every later call.

    Args:
        model: with DoRA layers.
        values: what :func:`norms` returned for it.

    Raises:
        ValueError: a layer has no norm in ``values``, a norm has no layer, or one has another shape
            than its layer's magnitude; or there is no DoRA layer in ``model``.
        TypeError: a norm is no tensor of float32 or float64.
    """
    layers = _layers(model)
    if layers.keys() != values.keys():
        absent = [f"no norm for layer {name}" for name in layers.keys() - values.keys()]
        unknown = [f"no layer for norm {name}" for name in values.keys() - layers.keys()]
        raise ValueError(
            "values does not have the DoRA layers of this model; expected what "
            f"torch_dora.norms(model) returns:{listing(absent + unknown)}"
        )
    for name, layer in layers.items():
        check.is_float(f"values[{name!r}]", values[name])
        if values[name].dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"values[{name!r}] has dtype {values[name].dtype}; expected float32, as "
                "torch_dora.norms(model) returns it: g is only as exact as its norm"
            )
        check.has_shape(f"values[{name!r}]", values[name], tuple(layer.magnitude.shape), "[out]")
    before = {name: layer.constant_norm for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.constant_norm = values[name].detach()
        yield
    finally:
        for name, layer in layers.items():
            layer.constant_norm = before[name]


def freeze(model: nn.Module) -> nn.Module:
    """Makes ``model`` ready for inference, in place, and returns it.

    Its DoRA layers keep the norms that they have now, which later calls do not compute again, and
    their adapters no longer require a gradient; the whole model goes into evaluation mode, so there
    is no dropout. Move and cast the model before; freeze ``copy.deepcopy(model)`` to keep one that
    can be trained. An adapter that is set afterwards does not change the norm, as one does that
    ``load_state_dict`` loads.

    Raises:
        ValueError, NotImplementedError: as :func:`norms`.
    """
    values = norms(model)
    for name, layer in _layers(model).items():
        layer.constant_norm = values[name]
        for parameter in ADAPTER_NAMES:
            getattr(layer, parameter).requires_grad_(False)
    return model.eval()


def _layers(model: nn.Module) -> dict[str, DoRALayer]:
    layers = dict(dora_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no DoRA layer; build it with one, or call apply_dora first"
        )
    return layers
