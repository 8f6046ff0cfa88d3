"""A model whose rows choose their adapters from a bank: the layers that it has instead."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dora_common.slots import check_ids, check_ids_array, check_plain, check_rows
from torch_dora.adapt.apply import HOOKS, check_model
from torch_dora.bank.bank import AdapterBank
from torch_dora.layers import dora_layers, fast_path, named_modules, own_forward, placement
from torch_dora.ops.bank import Slots, bank_linear, together
from torch_dora.ops.choose import check_name


class BankLinear(nn.Module):
    """A projection, and the adapters of a bank beside it.

    The base's hooks are called with what this layer reads and returns.

    Attributes:
        base: the model's own layer.
        slots: its adapters.
        ids: i64[batch], each row's slot.
        order: of the ids, as :func:`~torch_dora.ops.bank.together` has it.
        implementation: as :func:`with_bank`'s.
    """

    def __init__(
        self,
        base: Any,
        slots: Slots,
        ids: Tensor,
        order: Tensor | None = None,
        implementation: str | None = None,
    ) -> None:
        super().__init__()
        self.base, self.slots, self.ids, self.order = base, slots, ids, order
        self.implementation = implementation
        vars(self).update({name: vars(base)[name] for name in HOOKS if "state_dict" not in name})
        self.train(base.training)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, input: Tensor) -> Tensor:
        """Returns [batch, ..., out] of [batch, ..., in], in the base's dtype."""
        x = input  # torch.nn.Linear's name, by which a model may call it
        if isinstance(x, Tensor) and x.is_nested:
            return fast_path.of_nested(self, x)
        check_rows(x.shape, self.ids.shape[0], has_rows=x.ndim > 1)
        ids = self.ids.to(x.device)
        order = None if self.order is None else self.order.to(x.device)
        y = self.base.forward(x)  # without its hooks, which are this layer's
        return bank_linear(y, x, self.slots, ids, self.base.bias, self.implementation, order)


def with_bank(
    model: nn.Module,
    bank: AdapterBank,
    adapter_ids: Tensor | Sequence[int],
    *,
    implementation: str | None = None,
) -> Any:
    """Returns a copy of ``model``, for a call or a few, whose rows have the adapters of a bank.

        logits = torch_dora.with_bank(model, bank, [3, -1, 3, 0])(tokens)

    Row b of every projection's input [batch, ..., in], whose first axis is the batch, meets the
    adapter in slot adapter_ids[b], or the base alone where that is -1, bit for bit. The copy shares
    all tensors of the model and of the bank.

    Args:
        model: the plain model that the bank was made of.
        bank: of it.
        adapter_ids: integers [batch], each a slot or -1. Reading those on a GPU waits for it: hand
            over a list, or a tensor on the CPU.
        implementation: None, "triton" or "eager"; a named one runs or raises. The kernels have no
            gradient: unnamed, they run under :func:`torch.no_grad` alone.

    Raises:
        TypeError: ``model`` is no module, ``bank`` no bank, or the ids are no integers.
        ValueError: the ids have not one axis; one of them is no slot, or the slot is empty; or the
            model is not the bank's, or holds an adapter.
        NotImplementedError: a module has a forward of its own that cannot be told to call the copy.
    """
    check_model(model)
    check_name(implementation)
    if not isinstance(bank, AdapterBank):
        raise TypeError(f"bank is a {type(bank).__name__}; expected an AdapterBank")
    check_plain([name for name, _ in dora_layers(model)], "torch_dora")
    ids = _checked(bank, adapter_ids)
    modules: dict[str, Any] = dict(named_modules(model, remove_duplicate=False))
    placement.refuse_sharded((name, modules[name]) for name in bank.layers if name in modules)
    order = together(ids.cpu())
    made: dict[int, nn.Module] = {}
    placed: dict[torch.device, tuple[Tensor, Tensor | None]] = {}
    for name, layer in bank.layers.items():
        module = modules.get(name)
        if module is None or module.weight.shape != layer.weight.shape:
            raise ValueError(
                f"model has no {type(layer).__name__} {tuple(layer.weight.shape)} at {name!r}, for "
                "which the bank holds adapters; expected the model that it was made of"
            )
        device = bank.tensors[name].scale.device
        if device not in placed:
            placed[device] = ids.to(device), None if order is None else order.to(device)
        made[id(module)] = BankLinear(module, bank.tensors[name], *placed[device], implementation)
    layers = set(made)
    copied = _copied(model, made)
    for original in made.keys() - layers:
        own_forward.rebind(made[original], made)
    own_forward.refuse_shared(model, copied, {id(made[original]) for original in layers})
    fast_path.avoid(copied, BankLinear)
    return copied


def _copied(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Returns a copy of a module tree over the same tensors, with those in `made` replaced."""
    if id(module) not in made:
        made[id(module)] = new = copy.copy(module)
        new._forward_pre_hooks = new._forward_pre_hooks.copy()
        new._modules = {
            name: None if child is None else _copied(child, made)
            for name, child in module._modules.items()
        }
    return made[id(module)]


def _checked(bank: AdapterBank, adapter_ids: Any) -> Tensor:
    try:
        ids = torch.as_tensor(adapter_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"adapter_ids is {adapter_ids!r}; expected integers [batch], a slot for each row"
        ) from error
    if isinstance(adapter_ids, list | tuple) and not ids.numel():
        ids = ids.long()  # torch takes a list of nothing for floats
    is_other = ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool
    check_ids_array(ids, are_integers=not is_other)
    known = set(ids.tolist())
    slots = known.intersection(range(bank.slots))
    check_ids(known, bank.slots, [one for one in slots if bank.is_empty(one)])
    return ids.long()
