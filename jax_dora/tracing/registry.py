"""The register of parameters that can be adapted.

`jax_dora.register` adds to it. It already contains the parameters of public model libraries.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from jax_dora.layers.contraction import Contraction
from jax_dora.layers.stack import STACK_LETTERS, stacked_axes, with_stack_axes

type Axes = str | Callable[[Any], str | None]


@dataclasses.dataclass(frozen=True)
class Registration:
    """A parameter that `register` has named, by its name in its module: a claim about a class,
    before there is any model."""

    param: str
    axes: Axes
    linear: bool

    def axes_of(self, module: Any, stack_axes: tuple[int, ...] | None = None) -> str | None:
        """Returns the axes in `module`, or None if the parameter cannot be adapted there.
        `stack_axes` are those along which a traced call takes layers from it, if known."""
        axes = self.axes(module) if callable(self.axes) else self.axes
        if axes is None:
            return None
        _check_axes(axes)
        variable = getattr(module, self.param)
        ndim = variable.ndim
        if len(axes) > ndim:
            raise ValueError(
                f"axes is {axes!r} for a {self.param} of {ndim} axes; expected one letter for each "
                "axis of a single layer"
            )
        count = ndim - len(axes)
        if stack_axes is not None and len(stack_axes) == count:
            return with_stack_axes(axes, stack_axes)
        # MaxText stacks along the same axis at every level.
        return with_stack_axes(axes, (scan_axis(variable) or 0,) * count)


_BY_CLASS: dict[type[Any] | str, dict[str, Registration]] = {}


def register(
    module_type: type[nnx.Module] | str,
    *,
    param: str = "w",
    axes: Axes,
    linear: bool = True,
) -> None:
    """Registers a parameter of a layer class, so that `jax_dora.apply_dora` can adapt it.

        jax_dora.register(MyProjection, param="weight", axes="io")
        jax_dora.register(MyExperts, param="gate", axes="bio")
        jax_dora.register("package.model.Einsum", axes=lambda m: jax_dora.einsum_axes(m.equation))

    The layer keeps its class and its code. In its methods, the products that read the parameter
    along these axes become adapted ones. Any other operation gets the merged weight W'.

    Args:
      module_type: the class; its subclasses are included. Or the class's full name, such as
        "package.module.Class", which need not be imported yet.
      param: the name of the parameter, an `nnx.Variable` of any type.
      axes: one letter for each axis: "i" for an axis that products contract, "o" for output
        features, "b" for a batch axis such as experts, where each index has its own matrix, norm
        and adapter, "s" for an axis along which `nnx.vmap` has stacked layers, "t" for a stack
        inside of that stack, and so on. Additional axes of the parameter are stacks too: inputs in
        `apply_dora` show their position, and without inputs they are the leading axes. Instead of
        letters, a function that takes the module and returns them, or None if the module cannot be
        adapted.
      linear: whether "all-linear" selects the parameter; False for embeddings.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a letter is none of these, or "i" or "o" is missing.
    """
    if not isinstance(module_type, str) and not (
        isinstance(module_type, type) and issubclass(module_type, nnx.Module)
    ):
        raise TypeError(
            f"module_type is {module_type!r}; expected a subclass of nnx.Module, or its full name"
        )
    if not isinstance(param, str):
        raise TypeError(f"param is {param!r}; expected the name of a parameter")
    if not callable(axes):
        _check_axes(axes)
    known = _BY_CLASS.setdefault(module_type, {})
    known[param] = Registration(param, axes, linear)


def registrations(module: Any) -> dict[str, Registration]:
    """Returns the registrations of a module by the parameter's name. A registration of its class
    takes precedence over one of a base class."""
    return {
        name: registration
        for name, registration in _of_class(type(module)).items()
        if isinstance(getattr(module, name, None), nnx.Variable)
    }


def why_unknown(module: Any) -> str:
    """Returns why a parameter of a module is not known to be a weight."""
    names = _of_class(type(module))
    if names:
        return f"its class has {', '.join(names)} registered, but not this parameter"
    return "a class that the library does not know"


def _of_class(module_type: type[Any]) -> dict[str, Registration]:
    found: dict[str, Registration] = {}
    for cls in module_type.__mro__:
        for key in (cls, class_name(cls)):
            found = _BY_CLASS.get(key, {}) | found
    return found


def class_name(module_type: type[Any]) -> str:
    """Returns a class's full name; Flax's own classes are named nnx.Linear and so on."""
    name = f"{module_type.__module__}.{module_type.__qualname__}"
    return f"nnx.{module_type.__qualname__}" if name.startswith("flax.nnx.") else name


def einsum_axes(equation: str) -> str | None:
    """Returns the axes of an einsum's second operand, in `register`'s letters; None if the einsum
    is not a projection, such as "ab,ab->a".

        einsum_axes("BTD,DNH->BTNH") == "ioo"
    """
    found = Contraction.of_einsum(equation)
    kernel, inner = found.weight, found.labels("i")
    is_projection = "." not in kernel and len({*kernel}) == len(kernel) and "o" in found.roles
    return found.roles if is_projection and inner and {*inner} <= {*found.x} else None


def _check_axes(axes: str) -> None:
    stacked = sorted(letter for letter in str(axes) if letter in STACK_LETTERS)
    if (
        not isinstance(axes, str)
        or set(axes) - {*"bio", *stacked}
        or not {"i", "o"} <= set(axes)
        or stacked != [*STACK_LETTERS[: len(stacked)]]
    ):
        raise ValueError(
            f"axes is {axes!r}; expected one letter for each axis, with at least one 'i' and one "
            "'o', as in 'io': 'i' for a contracted axis, 'o' for output features, 'b' for a batch "
            "axis, 's' for an axis along which layers are stacked, 't' for one inside of that "
            "stack, and so on, each once"
        )


def _einsum(module: Any) -> str | None:
    return einsum_axes(module.einsum_str)


def _dense_general(module: Any) -> str | None:
    letters = "i" * len(module.in_features_shape) + "o" * len(module.out_features_shape)
    single = (*module.in_features_shape, *module.out_features_shape)
    found = stacked_axes(module.kernel.shape, single)
    if len(found) == 1:
        return with_stack_axes(letters, found[0])
    return None if found and scan_axis(module.kernel) is None else letters


def scan_axis(variable: Any) -> int | None:
    """Returns the axis along which MaxText has stacked layers, from the parameter's metadata; None
    if it has no such metadata."""
    return variable.get_metadata().get("param_scan_axis")


_TUNIX = tuple(
    f"tunix.models.{name}.model"
    for name in ("qwen2", "qwen3", "llama3", "gemma", "gemma3", "gemma4")
)
_BONSAI = tuple(f"bonsai.models.{name}.modeling" for name in ("llada", "qwen3_vl"))

# Layers of public model libraries: class, parameters, axes, whether "all-linear" selects them. The
# classes are named by strings, so that no library is imported.
_KNOWN: tuple[tuple[str, str, Any, bool], ...] = (
    *((f"{model}.Einsum", "w", _einsum, True) for model in _TUNIX),
    *((f"{model}.Embedder", "input_embedding", "io", False) for model in _TUNIX),
    ("tunix.models.qwen3.model.MoELayer", "gate_proj up_proj down_proj", "bio", True),
    ("tunix.models.gemma4.moe.MoERagged", "router_logits", "io", True),
    ("tunix.models.gemma4.moe.MoERagged", "gating_einsum", "booi", True),
    ("tunix.models.gemma4.moe.MoERagged", "linear", "bio", True),
    ("maxtext.layers.linears.DenseGeneral", "kernel", _dense_general, True),
    ("maxtext.layers.embeddings.Embed", "embedding", "io", False),
    ("maxtext.layers.moe.GateLogit", "kernel", "io", True),
    ("maxtext.layers.moe.RoutedMoE", "wi wi_0 wi_1 wo", "bio", True),
    *((f"{model}.ShardedLinear", "kernel", "io", True) for model in _BONSAI),
    *((f"{model}.ShardedEmbedding", "embedding", "io", False) for model in _BONSAI),
)

for _name, _params, _axes, _linear in _KNOWN:
    for _param in _params.split():
        register(_name, param=_param, axes=_axes, linear=_linear)
