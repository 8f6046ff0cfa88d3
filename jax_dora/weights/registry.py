"""The register of parameters that are weights which can be adapted, as their users say."""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from jax_dora.layers.stack import stacked_axes

type Axes = str | Callable[[Any], str | None]


@dataclasses.dataclass(frozen=True)
class Registration:
    """A parameter that `register` has named.

    Attributes:
      param: its name in the module.
      axes, linear: as `register`'s.
    """

    param: str
    axes: Axes
    linear: bool

    def axes_of(self, module: Any, stack_axis: int | None = None) -> str | None:
        """Returns the axes in `module`, or None where the parameter has no adaptable form.

        Args:
          stack_axis: the axis that a call takes layers from, where that is known.
        """
        axes = self.axes(module) if callable(self.axes) else self.axes
        if axes is None:
            return None
        _check_axes(axes)
        variable = getattr(module, self.param)
        ndim = variable.ndim
        if stack_axis is None:
            stack_axis = scan_axis(variable)
        if len(axes) > ndim:
            raise ValueError(
                f"axes is {axes!r} for a {self.param} of {ndim} axes; expected a letter for each"
            )
        if ndim - len(axes) == 1 and stack_axis is not None:
            return f"{axes[:stack_axis]}s{axes[stack_axis:]}"
        return "s" * (ndim - len(axes)) + axes


_BY_CLASS: dict[type[Any] | str, dict[str, Registration]] = {}


def register(
    module_type: type[nnx.Module] | str,
    *,
    param: str = "w",
    axes: Axes,
    linear: bool = True,
) -> None:
    """Makes a parameter of a class of layers one that `jax_dora.apply_dora` adapts.

        jax_dora.register(MyProjection, param="weight", axes="io")
        jax_dora.register(MyExperts, param="gate", axes="bio")
        jax_dora.register("package.model.Einsum", axes=lambda m: jax_dora.einsum_axes(m.equation))

    The layer keeps its class and its code. In its methods, the products that read the
    parameter along these axes become adapted ones, and whatever else reads it is given the merged
    weight W'.

    Args:
      module_type: the class, whose subclasses are meant too; or its full name, as in
        "package.module.Class", which need not be imported yet.
      param: the name of the parameter, an `nnx.Variable` of any type.
      axes: a letter for each of its axes: "i" for one that products contract, "o" for features of
        their results, "b" for one that matrices lie along, each with a norm and an adapter of its
        own, such as experts, "s" for one that layers are stacked along by `nnx.vmap`. Further axes
        are a stack too, of which inputs in `apply_dora` tell the place, and without inputs the
        leading ones. Or a function that takes the module to such letters, or to None where that
        module cannot be adapted.
      linear: whether "all-linear" means it; False for embeddings.

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
    """Returns the registrations of a module, by the parameter's name: of its class, then of the
    classes that this inherits from."""
    return {
        name: registration
        for name, registration in _of_class(type(module)).items()
        if isinstance(getattr(module, name, None), nnx.Variable)
    }


def why_unknown(module: Any) -> str:
    """Returns why a parameter of a module is not known to be a weight."""
    names = _of_class(type(module))
    if names:
        return f"of its class {', '.join(names)} is registered, and this is not"
    return "a class that the library does not know"


def _of_class(module_type: type[Any]) -> dict[str, Registration]:
    found: dict[str, Registration] = {}
    for one in module_type.__mro__:
        for key in (one, class_name(one)):
            found = _BY_CLASS.get(key, {}) | found
    return found


def class_name(module_type: type[Any]) -> str:
    """Returns a class's full name; Flax's own are called nnx.Linear and so on."""
    name = f"{module_type.__module__}.{module_type.__qualname__}"
    return f"nnx.{module_type.__qualname__}" if name.startswith("flax.nnx.") else name


def einsum_axes(equation: str) -> str | None:
    """Returns the axes of the second operand of an einsum, as `register` takes them; None where it
    is no projection, such as "ab,ab->a".

        einsum_axes("BTD,DNH->BTNH") == "ioo"
    """
    operands, _, result = equation.replace(" ", "").partition("->")
    x, _, kernel = operands.partition(",")
    axes = "".join(("b" if letter in x else "o") if letter in result else "i" for letter in kernel)
    lone = [letter for letter, role in zip(kernel, axes, strict=True) if role == "i"]
    is_projection = set(lone) <= set(x) and "." not in kernel and "i" in axes and "o" in axes
    return axes if is_projection and len(set(kernel)) == len(kernel) else None


def _check_axes(axes: str) -> None:
    if not isinstance(axes, str) or set(axes) - set("bios") or not {"i", "o"} <= set(axes):
        raise ValueError(
            f"axes is {axes!r}; expected a letter for each axis, 'i' for contracted, 'o' for "
            "features, 'b' for one along which matrices lie, 's' for one along which layers are "
            "stacked, with an 'i' and an 'o' among them, as in 'io'"
        )


def _einsum(module: Any) -> str | None:
    return einsum_axes(module.einsum_str)


def _dense_general(module: Any) -> str | None:
    letters = "i" * len(module.in_features_shape) + "o" * len(module.out_features_shape)
    single = (*module.in_features_shape, *module.out_features_shape)
    axes = stacked_axes(module.kernel.shape, single)  # MaxText scans along the second
    if len(axes) == 1:
        return f"{letters[: axes[0]]}s{letters[axes[0] :]}"
    return None if axes and scan_axis(module.kernel) is None else letters


def scan_axis(variable: Any) -> int | None:
    """Returns the axis of a parameter along which MaxText has stacked layers, as its metadata says;
    None where it says nothing."""
    return variable.get_metadata().get("param_scan_axis")


_TUNIX = tuple(
    f"tunix.models.{name}.model"
    for name in ("qwen2", "qwen3", "llama3", "gemma", "gemma3", "gemma4")
)
_BONSAI = tuple(f"bonsai.models.{name}.modeling" for name in ("llada", "qwen3_vl"))

# Layers of public model libraries, none of which is imported: class, parameters, axes, whether
# "all-linear" means them.
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
