"""with_bank: a model whose rows choose their adapters from a bank, and its layers."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dora_common.slots import check_ids, check_ids_array, check_plain, check_rows
from torch_dora.adapt.apply import HOOKS, check_model
from torch_dora.bank.adapter_bank import AdapterBank
from torch_dora.layers import dora_layers, fast_path, named_modules, placement, replaced_forward
from torch_dora.ops.bank import Slots, bank_linear, group_rows
from torch_dora.ops.choose import check_name


class BankLinear(nn.Module):
    """A projection of the base model with a bank's adapters for it: the slot of each row,
    i64[batch], and the rows grouped by it. The base's hooks become hooks of this layer."""

    def __init__(
        self,
        base: Any,
        slots: Slots,
        ids: Tensor,
        row_groups: Tensor | None = None,
        implementation: str | None = None,
    ) -> None:
        super().__init__()
        self.base, self.slots, self.ids, self.row_groups = base, slots, ids, row_groups
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
        """Returns [batch, ..., out] for [batch, ..., in], in the base's dtype."""
        x = input  # the parameter's name in torch.nn.Linear: a model may pass it by keyword
        if isinstance(x, Tensor) and x.is_nested:
            return fast_path.call_on_nested(self, x)
        check_rows(x.shape, self.ids.shape[0], has_rows=x.ndim > 1)
        ids = self.ids.to(x.device)
        row_groups = None if self.row_groups is None else self.row_groups.to(x.device)
        y = self.base.forward(x)  # not base(x): this layer runs the base's hooks
        return bank_linear(y, x, self.slots, ids, self.base.bias, self.implementation, row_groups)


def with_bank(
    model: nn.Module,
    bank: AdapterBank,
    adapter_ids: Tensor | Sequence[int],
    *,
    implementation: str | None = None,
) -> Any:
    """Returns a copy of ``model`` whose rows use the adapters of a bank, for one or a few calls.

        logits = torch_dora.with_bank(model, bank, [3, -1, 3, 0])(tokens)

    The first axis of every projection's input [batch, ..., in] must be the batch. Row b uses the
    adapter in slot adapter_ids[b]; if that is -1, row b gets exactly the base's result, bit for
    bit. The copy shares all tensors with the model and the bank.

    Args:
        model: the plain model that the bank was made for.
        bank: the adapters.
        adapter_ids: integers [batch], each a slot or -1. Reading ids from a GPU synchronises with
            it: pass a list, or a tensor on the CPU.
        implementation: None, "triton" or "eager"; a named one runs or raises. The kernels have no
            gradient: with None they run only under :func:`torch.no_grad`.

    Raises:
        TypeError: ``model`` is not a module, ``bank`` is not a bank, or the ids are not integers.
        ValueError: the ids do not have exactly one axis; an id is not a slot, or its slot is empty;
            the model is not the bank's, or has an adapter.
        NotImplementedError: a module's replaced ``forward`` cannot be made to call the copy.
    """
    check_model(model)
    check_name(implementation)
    if not isinstance(bank, AdapterBank):
        raise TypeError(f"bank is a {type(bank).__name__}; expected an AdapterBank")
    check_plain([name for name, _ in dora_layers(model)], "torch_dora")
    ids = _as_ids(bank, adapter_ids)
    modules: dict[str, Any] = dict(named_modules(model, remove_duplicate=False))
    placement.refuse_sharded((name, modules[name]) for name in bank.layers if name in modules)
    row_groups = group_rows(ids.cpu())
    replacements: dict[int, nn.Module] = {}
    on_device: dict[torch.device, tuple[Tensor, Tensor | None]] = {}
    for name, layer in bank.layers.items():
        module = modules.get(name)
        if module is None or module.weight.shape != layer.weight.shape:
            raise ValueError(
                f"model has no {type(layer).__name__} {tuple(layer.weight.shape)} at {name!r}, for "
                "which the bank has adapters; expected the model that the bank was made for"
            )
        device = bank.tensors[name].scale.device
        if device not in on_device:
            groups = None if row_groups is None else row_groups.to(device)
            on_device[device] = ids.to(device), groups
        replacements[id(module)] = BankLinear(
            module, bank.tensors[name], *on_device[device], implementation
        )
    layers = set(replacements)
    copied = _copy_modules(model, replacements)
    for original in replacements.keys() - layers:
        replaced_forward.rebind(replacements[original], replacements)
    new_layers = {id(replacements[original]) for original in layers}
    replaced_forward.refuse_shared(model, copied, new_layers)
    fast_path.disable_for_adapted(copied, BankLinear)
    return copied


def _copy_modules(module: nn.Module, replacements: dict[int, nn.Module]) -> nn.Module:
    """Returns a copy of a module tree over the same tensors, with the modules in `replacements`
    replaced; adds the copies to `replacements`."""
    if id(module) not in replacements:
        replacements[id(module)] = new = copy.copy(module)
        new._forward_pre_hooks = new._forward_pre_hooks.copy()
        new._modules = {
            name: None if child is None else _copy_modules(child, replacements)
            for name, child in module._modules.items()
        }
    return replacements[id(module)]


def _as_ids(bank: AdapterBank, adapter_ids: Any) -> Tensor:
    """Returns a checked copy of `adapter_ids` as i64[batch]: a caller may change its own tensor
    later, but the rows are grouped only once."""
    try:
        ids = torch.as_tensor(adapter_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"adapter_ids is {adapter_ids!r}; expected integers [batch], a slot for each row"
        ) from error
    if isinstance(adapter_ids, list | tuple) and not ids.numel():
        ids = ids.long()  # torch makes an empty list a float tensor
    is_integer = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    check_ids_array(ids, are_integers=is_integer)
    distinct = set(ids.tolist())
    slots = distinct.intersection(range(bank.slots))
    check_ids(distinct, bank.slots, [slot for slot in slots if bank.is_empty(slot)])
    return ids.to(torch.int64, copy=True)
