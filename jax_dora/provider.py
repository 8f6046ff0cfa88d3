"""`DoRAProvider`: DoRA for code that adapts its models by `qwix.apply_lora_to_model`.

qwix's `LoraProvider` intercepts the products of every call. `DoRAProvider` intercepts nothing: qwix
calls it once with a copy of the model and the inputs, and it adapts that copy as
`jax_dora.apply_dora` does.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from dora_common.rules import listing
from jax_dora.adapt.apply import adapt_weights
from jax_dora.adapt.inventory import find_weights
from jax_dora.adapt.quantize import quantize
from jax_dora.adapt.reads import record_reads
from jax_dora.adapt.tree import find_dora_layers, find_modules, replace_modules
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers.base_layer import check_has_values
from jax_dora.layers.rule import DoRARule
from jax_dora.tracing.read_log import Example, ReadLog

try:
    from qwix import LoraProvider, LoraRule, QuantizationRule
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "jax_dora.provider is for qwix.apply_lora_to_model, and qwix is not installed; install the "
        'extra "quantised"'
    ) from error

# The settings of qwix's rules that are used here. Others change how products are intercepted, or
# how weights are rounded, and must keep their defaults.
_USED = {
    *("module_path", "weight_qtype", "act_qtype", "tile_size"),
    *("rank", "alpha", "dropout", "lora_a_initializer", "lora_b_initializer"),
}
# The attributes that qwix sets on every module of a model.
_ATTRIBUTES = {"qwix_path", "qwix_rngs", "disable_quant_stats_update"}


class DoRAProvider(LoraProvider):
    """A provider for `qwix.apply_lora_to_model` whose adapters are DoRA's. It takes the arguments
    of `qwix.LoraProvider`.

        provider = DoRAProvider(module_path=".*(q_proj|v_proj)", rank=16, alpha=32)
        model = qwix.apply_lora_to_model(model, provider, tokens, rngs=nnx.Rngs(0))

    The result is the model of `jax_dora.apply_dora`: the arrays of an adapter are `LoRAParam`s
    named lora_a, lora_b and magnitude. Like qwix's, a rule adapts the weights that products of the
    call read and whose module has the path `module_path`, but not embeddings. With `weight_qtype`
    the kernels of these modules are quantised as by `jax_dora.quantize` (QDoRA).

    Load the weights before you adapt the model, or call `jax_dora.reset_magnitudes` afterwards.
    """

    def __init__(
        self,
        rules: Sequence[QuantizationRule] | None = None,
        *,
        disable_jit: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
          rules: instances of `qwix.LoraRule`; the first whose `module_path` matches the whole path
            of a module is used. A `qwix.QuantizationRule` quantises without an adapter or, without
            `weight_qtype`, leaves out modules that later rules match.
          disable_jit: must be False, since nothing is intercepted.
          **kwargs: the attributes of a single `qwix.LoraRule`:

            - `module_path`, `rank`, `alpha` and `dropout`.
            - `weight_qtype`: "nf4", "int8", "int4" or "float8_e4m3fn", or the dtype of that name.
            - `tile_size`: the number of input features that share a scale. With None all of an
              output feature share one, as in qwix.
            - `act_qtype`: see `jax_dora.quantize`.
            - `lora_a_initializer`, `lora_b_initializer`: see `jax_dora.DoRARule`, whose defaults
              are used here.

        Raises:
          TypeError, ValueError: an argument is unknown, is out of range, or has a value that this
            provider cannot honour; the message names it.
        """
        if disable_jit:
            raise ValueError(
                f"disable_jit is {disable_jit!r}; expected False: this provider intercepts no "
                "functions, so it adapts what is inside jax.jit too"
            )
        super().__init__(rules, **kwargs)
        self.rules = list([LoraRule(**kwargs)] if rules is None else rules)
        for rule in self.rules:
            _check_used(rule)
        self._dora_rules = {
            at: _dora_rule(rule) for at, rule in enumerate(self.rules) if isinstance(rule, LoraRule)
        }

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """Returns an empty dict, since a DoRA model intercepts nothing."""
        return {}

    def process_model_inputs(
        self, model: Any, model_args: Sequence[Any], model_kwargs: dict[str, Any]
    ) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        """Adapts `model`, in place; qwix calls this when it calls the model for the first time.
        Returns a copy without adapters for this call, which may change the copy's state, and the
        inputs.

        Raises the errors of `apply_dora` and `quantize`, or ValueError if no rule adapts anything.
        """
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"model is a {type(model).__name__}; expected an nnx.Module: a linen model is "
                "adapted without qwix, by jax_dora.linen.apply_dora"
            )
        rngs = vars(model).get("qwix_rngs")
        if not isinstance(rngs, nnx.Rngs):
            raise ValueError(
                f"rngs is {rngs!r} when the adapters are created; expected nnx.Rngs: pass rngs= "
                "and inputs of the model to qwix.apply_lora_to_model, and not skip_nnx_init=True"
            )
        example = Example(tuple(model_args), model_kwargs, method=_restore_plain(model))
        base = nnx.clone(model)
        _become(model, self._adapt(model, example, rngs))
        # qwix sets these attributes once more, and expects to find them.
        root: Any = model
        root.qwix_rngs, root.disable_quant_stats_update = nnx.data(None), False
        return base, model_args, model_kwargs

    def _adapt(self, model: nnx.Module, example: Example, rngs: nnx.Rngs) -> nnx.Module:
        """Returns `model` with adapters and quantised kernels where the rules match."""
        check_has_values(model, "DoRAProvider")
        reads = record_reads(model, example)
        modules = find_modules(model, opens_linen=True)
        find_dora_layers(modules)  # raises for adapters that would not belong to the others
        weights = find_weights(modules, reads)
        products = [weight for weight in weights if _is_read_by_products(weight, reads)]
        matched = [(weight, self._rule_at(weight)) for weight in products]
        adapted = [
            weight.replace(rule=self._dora_rules[at])
            for weight, at in matched
            if at in self._dora_rules
        ]
        if not adapted:
            expressions = ", ".join(repr(rule.module_path) for rule in self.rules)
            paths = {path for weight in products for path in weight.module_paths}
            raise ValueError(
                f"module_path {expressions} matches no module whose weights products of this call "
                "read; expected a regular expression for the whole path of at least one: "
                f"{listing(paths)}"
            )
        model = adapt_weights(model, weights, adapted, rngs)
        for at, rule in enumerate(self.rules):
            names = [weight.path for weight, index in matched if index == at]
            if names and rule.weight_qtype is not None:
                path = "|".join(map(re.escape, names))
                options: dict[str, Any] = {"path": path, "tile_size": rule.tile_size or 0}
                if rule.act_qtype is not None:
                    options["act_qtype"] = _qtype_name(rule.act_qtype)
                model = quantize(model, _qtype_name(rule.weight_qtype), **options)
        return model

    def _rule_at(self, weight: AdaptableWeight) -> int | None:
        """Returns the index of the first rule that matches a weight's module, and counts the match
        for `get_unused_rules`."""
        for at, rule in enumerate(self.rules):
            if any(re.fullmatch(rule.module_path, path) for path in weight.module_paths):
                self._rule_matches[at] += 1
                return at
        return None


def _is_read_by_products(weight: AdaptableWeight, log: ReadLog) -> bool:
    keys = [(path, weight.param) for path in weight.module_paths]
    kinds = {read.kind for key in keys for read in log.reads.get(key, ())}
    return "product" in kinds and "lookup" not in kinds


def _check_used(rule: Any) -> None:
    """Raises if a rule has a setting that `DoRAProvider` cannot honour."""
    if not isinstance(rule, QuantizationRule):
        raise TypeError(f"rules has a {type(rule).__name__}; expected instances of qwix.LoraRule")
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if field.name not in _USED and value != field.default:
            raise ValueError(
                f"{field.name} is {value!r}, which DoRAProvider cannot honour; expected "
                f"{field.default!r}"
            )
    if rule.weight_qtype is None:
        for name in ("tile_size", "act_qtype"):
            if getattr(rule, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(rule, name)!r} without weight_qtype; expected a "
                    'weight_qtype too, such as "nf4"'
                )
    elif isinstance(rule.tile_size, float):
        raise ValueError(
            f"tile_size is {rule.tile_size!r}; expected the number of input features that share a "
            "scale, as an integer, or None for all of them"
        )


def _dora_rule(rule: LoraRule) -> DoRARule:
    defaults = {field.name: field.default for field in dataclasses.fields(LoraRule)}
    inits = {}
    for name, ours in {
        "lora_a_initializer": "lora_a_init",
        "lora_b_initializer": "lora_b_init",
    }.items():
        value = getattr(rule, name)
        inits[ours] = None if value is defaults[name] else value
    return DoRARule(rule.module_path, rule.rank, rule.alpha, dropout=rule.dropout, **inits)


def _qtype_name(qtype: Any) -> str:
    return qtype if isinstance(qtype, str) else jnp.dtype(qtype).name


def _restore_plain(model: Any) -> str:
    """Removes what qwix has added to a model, in place; returns the name of the method that it has
    wrapped."""
    cls = type(model)
    model.__class__ = cls._unquantized_type
    for module in find_modules(model).values():
        for name in _ATTRIBUTES & vars(module).keys():
            delattr(module, name)
    [method] = [name for name, value in vars(cls).items() if hasattr(value, "__wrapped__")]
    return method


def _become(model: Any, other: nnx.Module) -> None:
    """Makes `model` equal to `other`, in place, for the caller that holds `model`."""
    if other is not model:
        attributes = dict(vars(other))
        vars(model).clear()
        vars(model).update(attributes)
        model.__class__ = type(other)
        replace_modules(model, {id(other): model})  # submodules may refer back to the root
