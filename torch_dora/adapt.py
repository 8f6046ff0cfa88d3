"""Adapters into an existing torch model, out of it, and into its weights."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from torch_dora.hyperparameters import DropoutMode, check_hyperparameters
from torch_dora.layers import DoRAConv, DoRAConv1D, DoRAEmbedding
from torch_dora.layers.adapter import DoRALayer
from torch_dora.layers.conv import CONVOLUTIONS
from torch_dora.layers.conv1d import is_conv1d
from torch_dora.nn import DoRALinear
from torch_dora.ops import dispatch
from torch_dora.report import MergeReport, reported

ADAPTER_NAMES = ("lora_a", "lora_b", "magnitude")
_ADAPTABLE = "Linear, Conv1d, Conv2d, Conv3d, Embedding, transformers' Conv1D"


@dataclasses.dataclass(frozen=True)
class DoRARule:
    """The adapter of every layer whose name ``path`` matches.

    Attributes:
        path: a regular expression that the whole name has to match, as in ``re.fullmatch``. Names
            are those of ``named_modules``: r"model\\.layers\\.\\d+\\.self_attn\\.(q|v)_proj".
        rank, alpha, use_rslora, dropout, dropout_mode, adapter_dtype, implementation: as
            :class:`~torch_dora.DoRALinear`'s. Embeddings read no activation: dropout 0.

    Raises:
        TypeError, ValueError: an attribute is out of range, or ``path`` is no regular expression.
    """

    path: str
    rank: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    dropout_mode: DropoutMode = "adapter"
    adapter_dtype: torch.dtype = torch.float32
    implementation: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise TypeError(f"path is {self.path!r}; expected a regular expression as a string")
        try:
            re.compile(self.path)
        except re.error as error:
            raise ValueError(
                f"path is {self.path!r}, which is no regular expression ({error}); a '.' or '*' "
                "that stands for itself wants a backslash"
            ) from error
        check_hyperparameters(
            self.rank, self.alpha, self.dropout, self.dropout_mode, self.adapter_dtype
        )
        dispatch.check_name(self.implementation)

    def matches(self, path: str) -> bool:
        """Whether the whole of ``path`` matches."""
        return re.fullmatch(self.path, path) is not None


def apply_dora(model: nn.Module, rules: DoRARule | Sequence[DoRARule]) -> Any:
    """Put a fresh DoRA adapter into every layer of ``model`` that a rule matches, in place.

        model = apply_dora(model, DoRARule(r".*\\.(q|v)_proj", rank=16, alpha=32))

    Weights and biases are shared, not copied. Every parameter of the model that is not of an
    adapter is frozen (``requires_grad`` is False). Adapted are ``torch.nn.Linear``, ``Conv1d``,
    ``Conv2d``, ``Conv3d``, ``Embedding`` and the Conv1D of transformers' GPT-2; a module that is
    shared stays shared, and a rule that matches one of its names adapts it everywhere. The adapters
    draw from torch's generator: see ``torch.manual_seed``.

    Args:
        model: a model; one of the layers above is one too, whose name is "".
        rules: one rule or several; the first that matches a layer's name adapts it. Only modules
            that hold parameters themselves are matched, so ".*" does not stumble over containers.

    Returns:
        ``model``, or the DoRA layer in its place where the model itself is a layer.

    Raises:
        TypeError: ``model`` is no module; a matched module is of another type.
        ValueError: a rule adapts nothing; a matched layer is adapted already; a rule does not fit
            its layer. The message lists what is there, and ``model`` is unchanged.
        NotImplementedError: a matched layer has a setting that its adapter would not honour.
    """
    _check_model(model)
    rules = _as_rules(rules)
    layers = [(module, names) for module, names in _modules(model) if _holds_parameters(module)]
    chosen = _assign(rules, [names for _, names in layers])
    matched = [(*layer, rule) for layer, rule in zip(layers, chosen, strict=True) if rule]
    _refuse_others([(module, names) for module, names, _ in matched])
    frozen = [p for p in model.parameters() if not p.requires_grad]
    try:
        new = {id(module): _adapt(module, names, rule) for module, names, rule in matched}
    except Exception:
        # A layer that was made before the one that failed has frozen its weight.
        for parameter in set(model.parameters()) - set(frozen):
            parameter.requires_grad_(True)
        raise
    model = _replace(model, new)
    adapters = {id(p) for layer in _adapted(model) for p in _adapter_parameters(layer)}
    for parameter in model.parameters():
        if id(parameter) not in adapters:
            parameter.requires_grad_(False)
    return model


def remove_dora(model: nn.Module) -> Any:
    """Put every adapted layer's base layer back, in place: the base model exactly.

    Its parameters stay frozen. Returns ``model``, or the base layer in its place.

    Raises:
        TypeError: ``model`` is no module.
    """
    _check_model(model)
    return _replace(model, {id(layer): _base_of(layer) for layer in _adapted(model)})


def merge_dora(model: nn.Module, *, return_report: bool = False) -> Any:
    """A copy of ``model`` with plain layers, every adapter merged into its layer's weight.

    Merged in fp32 and cast once to the weight's dtype. In bf16 that cast can cost more than a small
    adapter does: ``return_report`` says. ``model`` keeps its adapters and is the way back; the copy
    shares every parameter but the merged weights.

    Args:
        model: with adapters.
        return_report: return a :class:`~torch_dora.report.MergeReport` too.

    Returns:
        The copy, or that and the report.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it holds no adapter.
    """
    _check_model(model)
    layers: dict[str, Any] = {
        name: layer for name, layer in model.named_modules() if _is_adapted(layer)
    }
    if not layers:
        raise ValueError("model holds no adapter; expected a model from apply_dora")
    plain = {name: layer.merge() for name, layer in layers.items()}
    memo: dict[int, Any] = {id(tensor): tensor for tensor in model.parameters()}
    memo |= {id(layer): plain[name] for name, layer in layers.items()}
    merged = copy.deepcopy(model, memo)
    if not return_report:
        return merged
    rows = (
        reported(name, layer.weight, layer.merged_weight(), plain[name].weight)
        for name, layer in layers.items()
    )
    return merged, MergeReport(tuple(rows))


def _adapt(module: nn.Module, names: tuple[str, ...], rule: DoRARule) -> nn.Module:
    options = {
        field.name: getattr(rule, field.name)
        for field in dataclasses.fields(rule)
        if field.name != "path"
    }
    make = _maker(module)
    assert make is not None
    try:
        return make(module, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{names[0]!r} cannot be adapted: {error}") from error


def _maker(module: nn.Module) -> Callable[..., nn.Module] | None:
    """What makes a DoRA layer of ``module``; None where nothing does."""
    if is_conv1d(module):
        return DoRAConv1D
    # MultiheadAttention reads the weight of its out_proj and never calls it.
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    makers = (
        (nn.Linear, DoRALinear.from_linear),
        (nn.Embedding, DoRAEmbedding),
        *((kind, DoRAConv) for kind in CONVOLUTIONS),
    )
    for kind, make in makers:
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return make
    return None


def _base_of(layer: nn.Module) -> nn.Module:
    if isinstance(layer, DoRALayer):
        return layer.base.train(layer.training)
    assert isinstance(layer, DoRALinear)
    base = nn.Linear(
        layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
    )
    base.weight = layer.weight
    base.register_parameter("bias", cast(nn.Parameter | None, layer.bias))
    return base.train(layer.training)


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_adapted(module)]


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(module, DoRALinear | DoRALayer)


def _adapter_parameters(layer: nn.Module) -> Iterable[nn.Parameter]:
    return (getattr(layer, name) for name in ADAPTER_NAMES)


def _modules(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Every module with all its names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return [(module, tuple(found)) for module, found in names.items()]


def _replace(model: nn.Module, new: dict[int, nn.Module]) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if id(child) in new:
                setattr(module, name, new[id(child)])
    return new.get(id(model), model)


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")


def _as_rules(rules: DoRARule | Sequence[DoRARule]) -> tuple[DoRARule, ...]:
    found = (rules,) if isinstance(rules, DoRARule) else tuple(rules)
    for index, rule in enumerate(found):
        if not isinstance(rule, DoRARule):
            raise TypeError(f"rules[{index}] is a {type(rule).__name__}; expected a DoRARule")
    if not found:
        raise ValueError("rules is empty; expected at least one DoRARule")
    return found


def _assign(rules: Sequence[DoRARule], paths: Sequence[tuple[str, ...]]) -> list[DoRARule | None]:
    """The first rule that matches any name of each module."""
    chosen = [
        next((rule for rule in rules if any(map(rule.matches, names))), None) for names in paths
    ]
    for index, rule in enumerate(rules):
        if any(rule is one for one in chosen):
            continue
        taken = any(rule.matches(path) for names in paths for path in names)
        reason = (
            "matches only layers that earlier rules take (the first match wins)"
            if taken
            else "matches no layer"
        )
        raise ValueError(
            f"rules[{index}], path {rule.path!r}, {reason}; a name is matched as a whole. The "
            f"layers with parameters are:{_listing(path for names in paths for path in names)}"
        )
    return chosen


def _refuse_others(matched: list[tuple[nn.Module, tuple[str, ...]]]) -> None:
    def listed(modules: Iterable[tuple[nn.Module, tuple[str, ...]]]) -> str:
        return _listing(f"{names[0]} ({type(module).__name__})" for module, names in modules)

    adapted = [one for one in matched if _is_adapted(one[0])]
    if adapted:
        raise ValueError(
            "a layer holds one adapter at a time, and these that the rules match hold one already: "
            f"take it out with remove_dora, or merge it with merge_dora, first:{listed(adapted)}"
        )
    others = [one for one in matched if _maker(one[0]) is None]
    if others:
        raise TypeError(
            f"the rules match modules that cannot be adapted; expected {_ADAPTABLE} alone, not "
            "subclasses that compute something else: narrow the rules' paths so that they leave "
            f"out:{listed(others)}"
        )


def _listing(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in sorted(lines))
