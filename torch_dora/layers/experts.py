"""DoRA for packed experts: a parameter with a matrix for each expert, which the code of its module
multiplies by.

The adapted layer is a submodule beside the parameter's place: "down_proj_dora" for "down_proj".
Where the module reads its parameter, it gets an
:class:`~torch_dora.layers.expert_matrices.ExpertMatrices`, so that its code stays as it is.
"""

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_dora.layers.base import DoRALayer
from torch_dora.layers.expert_matrices import ExpertMatrices
from torch_dora.ops import check, factored_norm, magnitude_scale, shards

SUFFIX = "_dora"
"""What a parameter's name has in addition as the name of its layer among the module's children."""

# transformers' classes that name no layout, and whose parameters are [experts, out, in].
_OUT_IN = ("InklingSharedExperts", "JetMoeParallelExperts")


class PackedExperts(nn.Module):
    """A parameter with a matrix for each expert, as a module: the base of a :class:`DoRAExperts`.

    No model contains one: its module holds the parameter itself.

    Args:
        weight: the parameter, [experts, out, in] or [experts, in, out].
        is_transposed: whether it is [experts, in, out].
    """

    def __init__(self, weight: nn.Parameter, is_transposed: bool) -> None:
        super().__init__()
        self.weight, self.is_transposed = weight, is_transposed

    def extra_repr(self) -> str:
        axes = "experts, in, out" if self.is_transposed else "experts, out, in"
        return f"{tuple(self.weight.shape)} = [{axes}]"


class DoRAExperts(DoRALayer):
    """W'_e = magnitude_e ∘ (W_e + s·B_e A_e) / ‖W_e + s·B_e A_e‖ for every expert e, row by row.

    Parameters: ``weight`` [experts, out, in] (or [experts, in, out]), ``lora_a`` [experts, rank,
    in], ``lora_b`` [experts, out, rank], ``magnitude`` [experts, out]. A module has one such layer
    for each of its packed parameters; it is never called.

    The arguments are those of :class:`DoRALayer`. With dropout, the module may only multiply by the
    parameter.
    """

    BASES = (PackedExperts,)
    BASES_NAMED = (
        "packed experts (a parameter [experts, out, in] of a module whose is_transposed is False, "
        "or [experts, in, out] if it is True)"
    )

    _RANK_AXES: ClassVar = {"lora_a": 1, "lora_b": 2}

    is_transposed: bool

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        experts, features, width = self.weight_matrix().shape
        return {
            "lora_a": (experts, self.rank, width),
            "lora_b": (experts, features, self.rank),
            "magnitude": (experts, features),
        }

    def weight_matrix(self) -> Tensor:
        return self.weight.mT if self.is_transposed else self.weight

    def as_weight(self, matrix: Tensor) -> Tensor:
        return matrix.mT.contiguous() if self.is_transposed else matrix

    def norm(self, *expert: int) -> Tensor:
        """Returns the norm of all experts, f32[experts, out], or of one, f32[out]; detached."""
        weight, lora_a, lora_b = (shards.full_tensor(tensor) for tensor in self.matrices())
        experts = [expert] if expert else [(at,) for at in range(len(self.weight))]
        options = {"implementation": self.implementation}
        norms = [
            factored_norm(weight[at], lora_a[at], lora_b[at], self.scale, **options)
            for at in experts
        ]
        return norms[0] if expert else shards.place_like(torch.stack(norms), self.magnitude)

    def g(self, dtype: torch.dtype, *expert: int) -> Tensor:
        """Returns magnitude / norm of all experts, f32[experts, out], or of one, f32[out]."""
        magnitude, norm = self.magnitude[expert], self.current_norm(*expert)
        return magnitude_scale(magnitude.flatten(), norm.flatten(), dtype).reshape(norm.shape)

    def read(self) -> Any:
        """Returns what the module gets for its parameter: the adapted matrices; in a compiled
        program a tensor, and without the adapters the parameter."""
        if self.is_disabled:
            return self.weight
        matrices = ExpertMatrices.of(self)
        return matrices.tensor() if torch.compiler.is_compiling() else matrices


def packed_experts(module: nn.Module) -> dict[str, PackedExperts]:
    """Returns the parameters of ``module`` with packed experts that have no adapter, by name."""
    is_transposed = None if isinstance(module, DoRALayer) else _is_transposed(module)
    if is_transposed is None:
        return {}
    return {
        name: PackedExperts(parameter, is_transposed)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.ndim == 3 and parameter.dtype in check.FLOATS
        if not hasattr(module, name + SUFFIX)
    }


def _is_transposed(module: Any) -> bool | None:
    """Returns whether the packed experts of ``module`` are [experts, in, out]; None if that is not
    known, or if it has none."""
    if isinstance(given := getattr(module, "is_transposed", None), bool):
        return given
    if any(kind.__name__ in _OUT_IN for kind in type(module).__mro__):
        return False
    shapes = [
        getattr(getattr(module, name, None), "shape", ()) for name in ("gate_up_proj", "down_proj")
    ]
    if any(len(shape) != 3 for shape in shapes):
        return None
    gate_up, down = (list(shape[1:]) for shape in shapes)
    # The gate and the up projection lie side by side along the output axis.
    layouts = {
        is_transposed
        for is_transposed, (features, width), (width_again, hidden) in [
            (False, gate_up, down),
            (True, gate_up[::-1], down[::-1]),
        ]
        if (features, width) == (2 * hidden, width_again)
    }
    return layouts.pop() if len(layouts) == 1 else None


def put_layer(module: nn.Module, name: str, layer: DoRAExperts) -> None:
    """Puts ``layer`` in the place of the parameter ``name`` of ``module``."""
    kind, names = type(module), set[str]()
    if issubclass(kind, _Reader):
        kind, names = kind.KIND, {*kind.NAMES}
    module.__class__ = _reader(kind, tuple(sorted({*names, name})))
    # The name keeps its place in the order of the parameters.
    module._parameters[name] = None
    module._modules[name + SUFFIX] = layer


def put_parameters_back(model: nn.Module) -> None:
    """Puts the parameter of every :class:`PackedExperts` that has replaced a layer of ``model``
    into its module."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if not isinstance(child, PackedExperts):
                continue
            del module._modules[name]
            module._parameters[name.removesuffix(SUFFIX)] = child.weight
            is_adapted = any(isinstance(one, DoRAExperts) for one in module._modules.values())
            if isinstance(module, _Reader) and not is_adapted:
                module.__class__ = module.KIND  # pyright: ignore[reportAttributeAccessIssue]


class _Reader(nn.Module):
    """A module whose parameters ``NAMES`` are read from layers; otherwise as its class ``KIND``."""

    KIND: type[nn.Module]
    NAMES: tuple[str, ...]

    def __setattr__(self, name: str, value: Any) -> None:
        layer = self._modules.get(name + SUFFIX) if name in self.NAMES else None
        if isinstance(layer, DoRAExperts) and isinstance(value, Tensor):
            layer.weight = value  # pyright: ignore[reportAttributeAccessIssue]
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies the module by ``KIND`` and ``NAMES``, since its class has no name."""
        _, _, *state = super().__reduce_ex__(protocol)
        return _new, (self.KIND, self.NAMES), *state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Also takes the parameters under the names that they have in the base model."""
        for name in self.NAMES:
            if prefix + name in state_dict and name + SUFFIX in self._modules:
                state_dict[f"{prefix}{name}{SUFFIX}.weight"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@functools.cache
def _reader(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Returns the subclass of ``kind`` that reads the parameters ``names`` from layers."""

    def read(self: nn.Module, name: str) -> Any:
        layer = self._modules.get(name + SUFFIX)
        return layer.read() if isinstance(layer, DoRAExperts) else self._parameters[name]

    properties = {name: property(functools.partial(read, name=name)) for name in names}
    described = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    attributes = {"KIND": kind, "NAMES": names, **described, **properties}
    return type(kind.__name__, (_Reader, kind), attributes)


def _new(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    reader = _reader(kind, names)
    return reader.__new__(reader)
