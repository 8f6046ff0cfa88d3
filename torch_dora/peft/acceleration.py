"""Makes the DoRA layers of a live PeftModel compute by torch_dora, and undoes it."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from dora_common.rules import listing
from torch_dora.peft.variants import OURS, THEIRS, forward, refuses


class Report(NamedTuple):
    """What :func:`accelerate` did; ``str()`` lists it.

    Attributes:
        accelerated: the names of the layers whose DoRA adapters compute by torch_dora.
        left: the names of the other layers with DoRA adapters, and why PEFT computes them.
    """

    accelerated: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        text = f"torch_dora computes {len(self.accelerated)} DoRA layers"
        if not self.left:
            return text
        left = [f"{name}: {reason}" for name, reason in self.left.items()]
        return f"{text}, and PEFT computes {len(left)}:{listing(left)}"


def accelerate(peft_model: nn.Module) -> Report:
    """Makes the DoRA layers of ``peft_model`` compute by torch_dora's operators, in place.

        model = peft.get_peft_model(model, LoraConfig(use_dora=True, ...))
        print(torch_dora.peft.accelerate(model))

    Parameters, their names, files, and all that PEFT does with adapters stay as they are. Adapters
    that are added to the PeftModel later are accelerated, too. A layer that cannot be is left to
    PEFT and listed.

    Args:
        peft_model: a PeftModel, or another module that contains PEFT's layers. After PEFT's
            ``inject_adapter_in_model`` or transformers' ``add_adapter`` has added an adapter to a
            model that is not a PeftModel, call this function again.

    Raises:
        TypeError: ``peft_model`` is not a module.
        ValueError: it has no DoRA adapter of PEFT.
    """
    report = _accelerate(peft_model, is_told=True)
    if not any(report):
        raise ValueError(
            f"{type(peft_model).__name__} has {len(_layers(peft_model))} LoRA layers of PEFT, none "
            "with a DoRA adapter; expected a model from peft.get_peft_model with "
            "LoraConfig(use_dora=True)"
        )
    return report


def restore(peft_model: nn.Module) -> None:
    """Undoes :func:`accelerate`: PEFT computes all layers of ``peft_model`` again.

    Raises:
        TypeError: ``peft_model`` is not a module.
    """
    for layer in _layers(peft_model).values():
        for adapter, variant in layer.lora_variant.items():
            if type(variant) in THEIRS:
                layer.lora_variant[adapter] = THEIRS[type(variant)]()
    for module in peft_model.modules():
        for name, value in list(vars(module).items()):
            if getattr(value, "func", None) in (forward, _inject, _replicated):
                delattr(module, name)
                if name == "_old_forward":  # accelerate's hook calls it.
                    vars(module)[name] = MethodType(type(module).forward, module)


def accelerate_process(tell: Callable[[Report], object]) -> None:
    """Accelerates every model that gets a DoRA adapter of PEFT in this process from now on, and
    calls ``tell`` with each report."""
    tuners: Any = BaseTuner
    original = tuners.inject_adapter

    @functools.wraps(original)
    def inject_adapter(tuner: Any, *arguments: Any, **named: Any) -> None:
        original(tuner, *arguments, **named)
        if any(report := _accelerate(tuner.model, is_told=True)):
            tell(report)

    tuners.inject_adapter = inject_adapter


def _accelerate(model: nn.Module, is_told: bool) -> Report:
    """Accelerates a model. If its user is not told of the report, the layers that PEFT computes
    warn."""
    accelerated, left, layers = [], {}, _layers(model)
    ours = (one for layer in layers.values() for one in layer.lora_variant.values())
    warned = next((one.warned for one in ours if type(one) in THEIRS), set())
    for name, layer in layers.items():
        for adapter, variant in layer.lora_variant.items():
            theirs = THEIRS.get(type(variant), type(variant))
            if theirs in OURS:
                if type(variant) not in THEIRS:
                    variant = layer.lora_variant[adapter] = OURS[theirs](name, warned)
                if reason := refuses(layer, adapter):
                    left[name] = f"adapter {adapter!r}: {reason}"
                    if is_told:
                        variant.reported = reason
            elif isinstance(variant, tuple(OURS)):
                left[name] = f"adapter {adapter!r} has a variant of its own, {theirs.__name__}"
        if not any(type(variant) in THEIRS for variant in layer.lora_variant.values()):
            continue
        if name not in left:
            accelerated.append(name)
        # A forward that is set already is a hook of accelerate's, and calls PEFT's.
        if type(layer).forward is Linear.forward and "forward" not in vars(layer):
            _set_forward(layer)
    for module in model.modules():
        if isinstance(module, BaseTuner):
            vars(module)["inject_adapter"] = functools.partial(_inject, module)
    return Report(tuple(accelerated), left)


def _set_forward(layer: Any) -> None:
    layer.forward = functools.partial(forward, layer)
    layer._replicate_for_data_parallel = functools.partial(_replicated, layer)


def _replicated(layer: Any) -> Any:
    """Returns a copy of the layer for another device, as torch.nn.DataParallel makes in each call:
    it shall compute with its own tensors."""
    replica = type(layer)._replicate_for_data_parallel(layer)
    _set_forward(replica)
    return replica


def _layers(model: Any) -> dict[str, Any]:
    """Returns PEFT's LoRA layers by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"peft_model is a {type(model).__name__}; expected a peft.PeftModel")
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def _inject(tuner: Any, *arguments: Any, **named: Any) -> None:
    """Replaces the ``inject_adapter`` of an accelerated model's tuner."""
    type(tuner).inject_adapter(tuner, *arguments, **named)
    _accelerate(tuner.model, is_told=False)
