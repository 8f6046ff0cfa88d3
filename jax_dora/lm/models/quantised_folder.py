"""The weights of a folder that are quantised in it."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jax_dora.lm.models.config import USE_16_BITS
from jax_dora.lm.models.quantised_weights import QuantisedTensor
from jax_dora.lm.models.stored_arrays import StoredArray
from jax_dora.lm.models.tensor_files import StoredTensor
from jax_dora.quantisation import set_kernel


def quantised_tensors(
    names: Iterable[str], tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, QuantisedTensor]:
    """Returns those of the weights `names` that are quantised in the folder."""
    found = {name: QuantisedTensor.of(name, tensors, config) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def use_stored_formats(
    model: Any, arrays: Iterable[StoredArray], tensors: Mapping[str, QuantisedTensor]
) -> None:
    """Gives an abstract model, in place, quantised kernels where the folder has such weights."""
    for array in arrays:
        layers = [tensors.get(name) for name in array.names]
        if not any(layers):
            continue
        if array.path[-1] != "kernel":
            raise ValueError(
                f"{array.names[0]} is quantised in the folder; expected quantised weights of "
                f"projections only: {USE_16_BITS}"
            )
        formats: dict[str, list[int]] = {}
        for number, one in enumerate(layers):
            formats.setdefault(_format(one), []).append(number)
        if len(formats) > 1:
            found = ", and ".join(
                f"layers {_shortened(numbers)} ({name})" for name, numbers in formats.items()
            )
            raise ValueError(
                f"{'/'.join(array.path)} has layers of different formats in the folder: {found}; "
                f"expected the same format in all layers, which are one array: {USE_16_BITS}"
            )
        module = functools.reduce(getattr, array.path[:-1], model)
        kernel = layers[0].abstract if layers[0] is not None else None
        count = (len(layers),) if array.stacked else ()
        kernel = jax.tree.map(
            lambda one, count=count: jax.ShapeDtypeStruct((*count, *one.shape), one.dtype), kernel
        )
        set_kernel(module, kernel)


def _format(tensor: QuantisedTensor | None) -> str:
    """Describes the shapes and dtypes that all layers of a stack must have in common."""
    if tensor is None:
        return "not quantised"
    parts = ", ".join(
        f"{name.lstrip('._')} {part.dtype} {part.shape}"
        for name, part in sorted(tensor.parts.items())
        if "quant_state" not in name
    )
    return f"{tensor.weight.dtype} {tensor.shape} with {parts}"


def _shortened(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"{', '.join(map(str, numbers[:5]))}{more}"
