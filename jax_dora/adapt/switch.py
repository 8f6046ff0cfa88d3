"""Adapters as values: taken out of a model, put into one, several by name over one base.

A layer holds one adapter at a time. DoRA has no agreed meaning for several at once, since each
brings a norm and a magnitude of its own, so that they do not simply add up: `merge_dora` with
`adapters=` adds up what each changes, and `merge_dora` followed by `apply_dora` or `set_adapter`
puts one on top of another.
"""

import dataclasses
import re
from typing import Any

import jax
from flax import nnx

from jax_dora.adapt.apply import adapt_layer, apply_dora
from jax_dora.adapt.kinds import kind_of_base
from jax_dora.adapt.remove import adapted, remove_dora
from jax_dora.adapt.rule import DoRARule, Rules, as_rules, listing
from jax_dora.adapt.tree import find_modules, replace_modules
from jax_dora.hyperparameters import ADAPTER_NAMES
from jax_dora.model import check_model


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One adapter of a whole model, without the model: a pytree whose leaves are its arrays.

    Attributes:
      rules: one for each layer, whose path it matches exactly.
      arrays: by the layer's path, then "lora_a", "lora_b", "magnitude", in the layer's shapes. In
        any order: JAX sorts the keys of a dict wherever it maps over a pytree.
    """

    rules: tuple[DoRARule, ...]
    arrays: dict[str, dict[str, Any]]


jax.tree_util.register_dataclass(Adapter, data_fields=["arrays"], meta_fields=["rules"])


def get_adapter(model: nnx.Module) -> Adapter:
    """The adapter that `model` holds, on the arrays of its parameters at this moment.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: it holds no adapter.
    """
    check_model(model, for_linen="jax_dora.linen.split_adapters")
    layers = {found.paths[0]: found.module for found, _ in adapted(model)}
    if not layers:
        raise ValueError("model holds no adapter; expected a model from apply_dora")
    return Adapter(
        tuple(_rule(path, layer) for path, layer in layers.items()),
        {
            path: {name: getattr(layer, name).get_value() for name in ADAPTER_NAMES}
            for path, layer in layers.items()
        },
    )


def set_adapter[Model: nnx.Module](
    model: Model, adapter: Adapter | None, *, rngs: nnx.Rngs | None = None
) -> Model:
    """`model` with `adapter` in place of the one that it holds, if any; None leaves none.

        adapters = {"french": get_adapter(french), "code": get_adapter(code)}
        model = set_adapter(model, adapters["code"])

    The result is a model of its own that shares the arrays of both. A function compiled by
    `nnx.jit` serves every adapter of the same layers, ranks and scales without compiling again.

    An adapter's dropout is on or off as it was in the layer whose place it takes. Where that layer
    had none, it is on if anything else in `model` is in training (its `deterministic` is False),
    and off otherwise. `train()` and `eval()` of the result switch it.

    Args:
      rngs: for the masks of an adapter with dropout; only such a one needs it.

    Raises:
      TypeError: `model` is no nnx module, `adapter` no `Adapter`.
      ValueError: the adapter has a layer that the model lacks, or of another shape, or dropout and
        no rngs; or its rules are not those of its arrays. `model` is left as it is.
    """
    check_model(model, for_linen="jax_dora.linen.join_adapters")
    base = remove_dora(model)
    if adapter is None:
        return base
    if not isinstance(adapter, Adapter):
        raise TypeError(
            f"adapter is a {type(adapter).__name__}; expected an Adapter from get_adapter, or None"
        )
    rules = _rules_by_path(adapter)
    by_path = {path: found for found in find_modules(base) for path in found.paths}
    replacements: dict[int, Any] = {}
    for path, arrays in adapter.arrays.items():
        rule, found = rules[path], by_path.get(path)
        if found is None or kind_of_base(found.module) is None:
            there = (path for path, one in by_path.items() if kind_of_base(one.module))
            raise ValueError(
                f"adapter has a layer {path!r}; the model's layers that can be adapted are:"
                f"{listing(there)}"
            )
        if rule.dropout and rngs is None:
            raise ValueError(
                f"rngs is None and the adapter drops inputs of {path!r}; expected nnx.Rngs with a "
                "dropout stream"
            )
        layer = adapt_layer(found, rule, rngs or nnx.Rngs(0))
        for name, value in arrays.items():
            parameter = getattr(layer, name)
            if parameter.shape != value.shape:
                raise ValueError(
                    f"adapter has {name} {value.shape} for {path!r}; this model's layer takes "
                    f"{parameter.shape}"
                )
            parameter.set_value(value)
        replacements[id(found.module)] = layer
    return _in_the_mode_of(model, replace_modules(base, replacements))


class AdapterSet[Model: nnx.Module]:
    """Named adapters over one base model, of which one is active, or none.

        adapters = AdapterSet(model)
        adapters.add("french", rules, rngs=nnx.Rngs(0))
        model = adapters.activate("french")
        model.train()                         # and train it: the set sees what training changes
        model = adapters.activate(None)       # the base model, bit for bit

    Attributes:
      active: the name of the active adapter, or None.
      model: the base model with the active adapter.
    """

    def __init__(self, base: Model) -> None:
        """
        Args:
          base: a model without adapters.

        Raises:
          TypeError: it is no nnx module.
          ValueError: it holds an adapter.
        """
        check_model(base)
        if adapted(base):
            raise ValueError(
                "base holds an adapter; expected a plain model: AdapterSet(remove_dora(base)), "
                "then add(name, get_adapter(base))"
            )
        self.active: str | None = None
        self.model = base
        self._base = base
        self._inactive: dict[str, Adapter] = {}

    @property
    def names(self) -> list[str]:
        """Of all adapters, in alphabetical order."""
        return sorted([*self._inactive, *([] if self.active is None else [self.active])])

    def add(self, name: str, adapter: Adapter | Rules, *, rngs: nnx.Rngs | None = None) -> None:
        """Adds an adapter, without activating it.

        Args:
          name: a new one.
          adapter: an `Adapter`, or the rules of a fresh one.
          rngs: draws a fresh one.

        Raises:
          TypeError, ValueError: as `set_adapter` and `apply_dora`; `name` is there already.
        """
        if name in self.names:
            raise ValueError(f"name is {name!r}, which is taken; expected none of {self.names}")
        if isinstance(adapter, Adapter):
            set_adapter(self._base, adapter, rngs=rngs or nnx.Rngs(0))
        else:
            if rngs is None:
                raise ValueError("rngs is None; expected nnx.Rngs to draw a fresh adapter with")
            adapter = get_adapter(apply_dora(self._base, as_rules(adapter), rngs=rngs))
        self._inactive[name] = adapter

    def activate(self, name: str | None, *, rngs: nnx.Rngs | None = None) -> Model:
        """The base model with the adapter `name`, or with none; also as `self.model`.

        The adapter that was active keeps what has happened to it in `self.model`. With a name, what
        `self.model` was in training or evaluation with, the result is too, and dropout that comes
        with the adapter is on or off as by `set_adapter`; without, it is the base as it was given.

        Raises:
          ValueError: there is no adapter of that name; `rngs` is missing for dropout.
        """
        model = self._base
        if name is not None:
            model = set_adapter(self._base, self[name], rngs=rngs)
            model = _in_the_mode_of(self.model, model)
        if self.active is not None:
            self._inactive[self.active] = get_adapter(self.model)
        if name is not None:
            del self._inactive[name]
        self.active, self.model = name, model
        return model

    def __getitem__(self, name: str) -> Adapter:
        """The adapter of that name; raises ValueError where there is none."""
        if name == self.active:
            return get_adapter(self.model)
        if name not in self._inactive:
            raise ValueError(f"name is {name!r}; expected one of {self.names}")
        return self._inactive[name]


def _rules_by_path(adapter: Adapter) -> dict[str, DoRARule]:
    rules = {rule.path: rule for rule in adapter.rules}
    patterns = {path: re.escape(path) for path in adapter.arrays}
    if odd := rules.keys() ^ set(patterns.values()):
        raise ValueError(
            "adapter has not one rule for each layer of its arrays; expected rules and arrays of "
            f"one get_adapter, which these are not in both of:{listing(odd)}"
        )
    return {path: rules[pattern] for path, pattern in patterns.items()}


def _in_the_mode_of[Model: nnx.Module](other: nnx.Module, model: Model) -> Model:
    """`model`, changed in place, in training or evaluation as `other` is, module by module. Dropout
    that `other` does not have is on if anything in `other` is in training."""
    others = {path: found.module for found in find_modules(other) for path in found.paths}
    trains = any(getattr(one, "deterministic", None) is False for one in others.values())
    for found in find_modules(model):
        twin = others.get(found.paths[0])
        for name in ("deterministic", "use_running_average"):
            if hasattr(twin, name) and hasattr(found.module, name):
                setattr(found.module, name, getattr(twin, name))
        if twin is None and isinstance(found.module, nnx.Dropout):
            found.module.deterministic = not trains
    return model


def _rule(path: str, layer: Any) -> DoRARule:
    return DoRARule(
        re.escape(path),
        layer.rank,
        layer.alpha,
        use_rslora=layer.use_rslora,
        dropout=0.0 if layer.dropout is None else layer.dropout.rate,
        dropout_mode=layer.dropout_mode,
        adapter_dtype=layer.adapter_dtype,
        adapt_attend=getattr(layer, "adapt_attend", None),
        implementation=layer.implementation,
        inner_name=getattr(layer, "inner_name", None),
    )
