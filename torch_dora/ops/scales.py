"""max(norm, eps) and g of the direct calls: how they are computed, and where the repeated call of
gradient checkpointing finds those of the first one."""

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from torch_dora.ops import choose
from torch_dora.ops.norm import EPS_HALF

if TYPE_CHECKING:
    from torch_dora.ops.plan import Plan


class Scales:
    """max(norm, eps) and g of a call, what they were computed from, and lora_a and lora_b as the
    call cast them, for its gradient, or None.

    ``source`` begins with the versions of weight, lora_a and lora_b. More of it is only needed to
    find the scales again.
    """

    __slots__ = "__weakref__", "casts", "source", "tensors"

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor],
        source: tuple[Any, ...],
        casts: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.tensors, self.source, self.casts = tensors, source, casts

    def check(self, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> None:
        """Raises RuntimeError if one of the tensors was changed in place since the call."""
        if self.source[:3] != (weight._version, lora_a._version, lora_b._version):
            raise RuntimeError(
                "the weight, lora_a or lora_b of a DoRA layer was changed in place between the "
                "forward and the backward pass, so its gradient cannot be computed any more: call "
                "backward before optimizer.step"
            )

    def adapter(self, plan: "Plan", lora_a: Tensor, lora_b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns lora_a and lora_b in the plan's dtype, for the gradient."""
        casts, self.casts = self.casts, None
        return casts or _cast(plan, lora_a, lora_b)


class _Last:
    """The scales of the last call with each lora_b, by its id, while the call's node in the graph
    keeps both alive. As weakref.WeakValueDictionary, with less Python in a call."""

    def __init__(self) -> None:
        self.references: dict[int, ref[Scales]] = {}
        self.most = 1024

    def get(self, lora_b: Tensor, source: tuple[Any, ...]) -> Scales | None:
        """Returns the scales if they were computed from the same source."""
        reference = self.references.get(id(lora_b))
        scales = None if reference is None else reference()
        return None if scales is None or scales.source != source else scales

    def set(self, lora_b: Tensor, scales: Scales) -> None:
        self.references[id(lora_b)] = ref(scales)
        if len(self.references) > self.most:
            alive = [item for item in list(self.references.items()) if item[1]() is not None]
            self.references, self.most = dict(alive), 2 * len(alive) + 1024


_LAST = _Last()
# The id of each lora_b whose last call went the long way, for a dispatch mode to see it.
_RECORDED: set[int] = set()
_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore


def has_saved_tensors_hooks() -> bool:
    """Returns whether hooks drop or move what is saved for the backward pass, as those of
    checkpointing do."""
    return _saved_tensors_hooks(True) is not None


def must_record(lora_b: Tensor) -> bool:
    """Returns whether a compiler, a transform or a dispatch mode must see the operations of a call.
    A checkpoint's repeated call must save the tensors of the first one, and so goes its way, if a
    mode, such as FlopCounterMode, is there in one of the two only."""
    if torch.compiler.is_compiling() or choose.in_transform():
        return True
    has_mode = torch._C._len_torch_dispatch_stack() > 0
    if not (has_mode or _RECORDED):
        return False
    if torch._C._current_graph_task_id() != -1:
        reference = _LAST.references.get(id(lora_b))
        went_direct = reference is not None and reference() is not None
        return not went_direct if has_mode else id(lora_b) in _RECORDED
    if has_mode:
        forget(lora_b)
        _RECORDED.add(id(lora_b))
    else:
        _RECORDED.discard(id(lora_b))
    return has_mode


def forget(lora_b: Tensor) -> None:
    """Lets no repeated call find the scales of earlier calls with this lora_b."""
    _LAST.references.pop(id(lora_b), None)


def for_gradient(
    plan: "Plan",
    parts: tuple[Tensor, Tensor, Tensor, Tensor],
    norm: Tensor | None,
    is_hooked: bool,
) -> tuple[Scales, Tensor, Tensor]:
    """Returns the scales of a call that has a gradient, and lora_a and lora_b in the plan's dtype.
    A call within a backward pass is a repeated one: it uses the scales of the first. ``parts`` are
    weight, lora_a, lora_b and magnitude. ``_LAST`` finds the scales as long as the call's node
    keeps them.

    Args:
        is_hooked: the result of `has_saved_tensors_hooks`.
    """
    weight, lora_a, lora_b, magnitude = parts
    source: tuple[Any, ...] = weight._version, lora_a._version, lora_b._version
    repeats = torch._C._current_graph_task_id() != -1
    if not repeats and not is_hooked:
        # Checkpointing has hooks, so it is not what calls, and there is no second call.
        forget(lora_b)
        tensors, a, b = compute(plan, parts, norm)
        return Scales(tensors, source, (a, b) if plan.casts else None), a, b
    source += magnitude._version, plan.scale, norm is None, *[part.data_ptr() for part in parts]
    scales = _LAST.get(lora_b, source) if repeats else None
    if scales is None:
        tensors, a, b = compute(plan, parts, norm)
        scales = Scales(tensors, source, None)
    else:
        a, b = _cast(plan, lora_a, lora_b)
    # Where hooks drop or move what is saved, only a repeated call keeps its casts: its gradient
    # follows at once.
    if plan.casts and repeats:
        scales.casts = a, b
    if not repeats:
        _LAST.set(lora_b, scales)
    return scales, a, b


def compute(
    plan: "Plan", parts: tuple[Tensor, Tensor, Tensor, Tensor], norm: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Returns (max(norm, eps), f32[out] or the first row of f32[2, out], and g, f32[out]), and
    lora_a and lora_b in the plan's dtype. Without a norm it is computed."""
    weight, lora_a, lora_b, magnitude = parts
    if norm is None:
        a, b, both = plan.norm(weight, lora_a, lora_b, magnitude)
        if not plan.norm.is_in_pieces:
            a, b = _cast(plan, a, b)
        return (both, both[1]), a, b
    floor = norm.clamp(min=EPS_HALF)
    return (floor, magnitude / floor), *_cast(plan, lora_a, lora_b)


def _cast(plan: "Plan", lora_a: Tensor, lora_b: Tensor) -> tuple[Tensor, Tensor]:
    return (lora_a.to(plan.dtype), lora_b.to(plan.dtype)) if plan.casts else (lora_a, lora_b)
