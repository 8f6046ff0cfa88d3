"""Folders of a model whose vocabulary was resized before the training."""

from collections.abc import Mapping
from dataclasses import replace

from dora_common.peft.config import TOKEN_EMBEDDINGS, AdapterConfig
from dora_common.peft.keys import Key, parse
from dora_common.peft.layers import Architecture, Layer, Shape
from dora_common.rules import OUTPUT_HEADS


def new_vocabulary(
    config: AdapterConfig,
    tensors: Mapping[str, tuple[str, Shape]],
    architecture: Architecture,
    *,
    adapter: str = "default",
) -> tuple[int, int] | None:
    """Returns the model's number of tokens, and the one to which it has to be resized, or None, by
    the arguments of `find_destinations`. Raises ValueError if the folder does not store the
    embedding and the output head, so that the weights of new tokens are not known."""
    tables, sizes, stored = _tables(architecture), dict[str, int](), set[str]()
    for key, (_, shape) in sorted(tensors.items()):
        parsed = parse(key, adapter)
        layer = tables.get(parsed.module)
        size = None if layer is None else _tokens(parsed, layer, shape)
        if layer is not None and size not in (None, _size(layer)):
            sizes[key] = size
            if parsed.role is None:
                stored.add(parsed.name)
    if len(set(sizes.values())) != 1:
        return None
    key, size = next(iter(sizes.items()))
    old = _size(tables[parse(key, adapter).module])
    names = {f"{name}.weight" for name, layer in tables.items() if _size(layer) == old}
    ties = {name: tied for tied in architecture.tied() for name in tied}
    follow = {
        name
        for name in names
        for other in ties.get(name, ())
        if other in stored and (config.keeps_ties or not config.saves(other))
    }
    if missing := sorted(names - stored - follow):
        raise ValueError(
            f"{key} is of {size} tokens, but the model has {old}: the adapter is of a model whose "
            f"vocabulary was resized, or of another model; expected {', '.join(missing)} of {size} "
            "tokens in the folder, which PEFT stores with save_embedding_layers=True, or a model "
            f"with {size} tokens: resize it as before the training of the adapter"
        )
    return old, size


def resized(architecture: Architecture, size: int) -> Architecture:
    """Returns the architecture of the model after its vocabulary is resized to `size` tokens."""
    tables = {
        name: replace(layer, **{_side(layer): size})
        for name, layer in _tables(architecture).items()
    }
    parameters = {
        name: (size, *shape[1:]) if name.rpartition(".")[0] in tables else shape
        for name, shape in architecture.parameters.items()
    }
    layers = [tables.get(layer.name, layer) for layer in architecture.layers]
    return replace(architecture, layers=layers, parameters=parameters)


def _tables(architecture: Architecture) -> dict[str, Layer]:
    """Returns the embeddings and the output heads with a row for each token, by name."""
    layers = {layer.name: layer for layer in architecture.layers}
    embeddings = {name: one for name, one in layers.items() if one.kind == "embedding"}
    heads = {
        name: layer
        for name, layer in layers.items()
        if layer.kind == "linear" and name.rpartition(".")[2] in OUTPUT_HEADS
    }
    sizes = {layer.in_features for layer in embeddings.values()}
    heads = {name: layer for name, layer in heads.items() if layer.out_features in sizes}
    sizes = {layer.out_features for layer in heads.values()}
    return heads | {
        name: layer
        for name, layer in embeddings.items()
        if layer.in_features in sizes or name.rpartition(".")[2] in TOKEN_EMBEDDINGS
    }


def _side(layer: Layer) -> str:
    return "in_features" if layer.kind == "embedding" else "out_features"


def _size(layer: Layer) -> int:
    return getattr(layer, _side(layer))


def _tokens(key: Key, layer: Layer, shape: Shape) -> int | None:
    """Returns the number of tokens of a tensor of a table, or None if it has no axis of them."""
    width = layer.out_features if layer.kind == "embedding" else layer.in_features
    if key.role is None:
        return shape[0] if key.parameter == "weight" and shape[1:] == (width,) else None
    if key.role == "embedding_a":
        return shape[-1]
    is_of_head = layer.kind == "linear" and key.role in ("lora_b", "magnitude")
    return shape[0] if is_of_head and shape else None
