"""Weights of a module that cannot be adapted where they are: inside lists, tuples and dicts, in
modules of other frameworks, and in linen modules with adapters of their own."""

from typing import Any

import jax
from flax import nnx

from jax_dora.adapt.bridge import LinenModule
from jax_dora.adapt.reads import is_weight
from jax_dora.adapt.tree import linen_adapters, nested_leaves
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers import DORA_CLASSES
from jax_dora.layers.base_layer import is_node
from jax_dora.tracing.registry import class_name


def paths_within(paths: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Returns the paths of the attribute `name` of a module with these paths."""
    return tuple(f"{path}/{name}".lstrip("/") for path in paths)


def with_linen_refusals(
    module: nnx.Module, weights: list[AdaptableWeight]
) -> list[AdaptableWeight]:
    """Returns the weights of a linen module without the arrays of its own adapters. Those in plain
    dicts are marked as not adaptable: the module has such adapters, its `ToNNX` is of a subclass,
    or one of its modules has a name that `nnx.Dict` needs."""
    if isinstance(module, LinenModule):
        refusal = "a linen module's, inside a module whose name nnx.Dict needs: rename it"
        return [one if one.variable is None else one.replace(refusal=refusal) for one in weights]
    adapters = linen_adapters(module)
    kernels = {cls.kernel_name for cls in DORA_CLASSES.values()}
    marked = []
    for one in weights:
        changes: dict[str, Any] = {"refusal": "a linen module's, which nothing adapts inside nnx"}
        owner, _, name = one.param.rpartition("/")
        of_layer = f"{owner}/lora_a".lstrip("/") if name in kernels else ""
        if not adapters.isdisjoint({f"{one.param}_lora_a", of_layer}):
            how = "a linen module's, by jax_dora.linen.apply_dora"
            changes = {"is_adapted": True, "refusal": how, "how": how}
        marked.append(one.replace(is_linear=False, **changes))
    return [one for one in marked if one.param not in adapters]


def nested_weights(one: AdaptableWeight, module: Any) -> list[AdaptableWeight]:
    """Returns the weights in plain lists, tuples and dicts of a module or of its parameters. They
    cannot be adapted."""
    weights = []
    for name, value in vars(module).items():
        refusal = "it is inside a list, tuple or dict: make it an attribute of a module"
        leaves = nested_leaves(value)
        if isinstance(value, nnx.Param) and not hasattr(value, "ndim"):
            refusal = "its parameter holds several arrays: make each a separate parameter"
            leaves = ((keys, type(value)(leaf)) for keys, leaf in nested_leaves(value.get_value()))
        elif isinstance(value, nnx.Variable) and _framework(value) == "keras":
            refusal = "it is a variable of Keras, no nnx.Param: write the module in nnx"
            leaves = [((), nnx.Param(value.get_value()))]
        elif arrays := _foreign_arrays(value):
            kind = class_name(type(value))
            refusal = f"it is inside a {kind}, which is no nnx module: write the module in nnx"
            leaves = ((keys, nnx.Param(array)) for keys, array in arrays)
        weights += [
            one.replace(
                paths=paths_within(one.module_paths, param),
                param=param,
                shape=tuple(leaf.shape),
                refusal=refusal,
                variable=leaf,
            )
            for keys, leaf in leaves
            if is_weight(leaf)
            for param in ["/".join((name, *keys))]
        ]
    return weights


def _framework(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _foreign_arrays(value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns (keys, array) for every array in a module of another framework: Equinox's modules are
    pytrees, and Keras' layers list their `weights`."""
    framework = _framework(value)
    if is_node(value) or isinstance(value, list | tuple | dict | jax.Array) or framework == "qwix":
        return []
    if framework == "keras":
        weights = enumerate(getattr(value, "weights", ()))
        arrays = [((getattr(w, "name", str(n)),), w) for n, w in weights]
    else:
        leaves = jax.tree_util.tree_leaves_with_path(value)
        arrays = [((jax.tree_util.keystr(path).strip("."),), leaf) for path, leaf in leaves if path]
    found = ((keys, getattr(leaf, "value", leaf)) for keys, leaf in arrays)
    return [(keys, array) for keys, array in found if isinstance(array, jax.Array)]
