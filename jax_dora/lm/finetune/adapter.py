"""The adapter of a run: fresh or from a folder, in which layers, and what of it is trained."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_dora
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import find_adapter_folder, open_folder
from jax_dora.lm.finetune.settings import Settings
from jax_dora.lm.models import CausalLM
from jax_dora.lm.models.folder import TIED
from jax_dora.lm.models.stored_arrays import stored_arrays
from jax_dora.ops import is_quantised
from jax_dora.peft import adapter_rules, load_adapter

EMBEDDING, LAYERS = "model/embed_tokens", "model/layers"
# How the adapter of a folder is trained.
FOLDER_OPTIONS: Any = {"adapter_dtype": jnp.float32, "dropout_mode": "adapter"}
DEFAULTS = {"method": "dora", "rank": 64, "dropout": 0.0, "target": f"{LAYERS}/.*_proj"}


class SavedParam(nnx.LoRAParam):
    """A parameter of a module in `modules_to_save`, in float32, since a step changes it little."""


def complete(settings: Settings) -> Settings:
    """Returns `settings` with values for what None leaves open: those of `from_adapter`, if given.

    Raises:
      ValueError: a setting differs from the folder's.
      NotImplementedError: the folder has something that is not trained.
      FileNotFoundError, TypeError, OSError: the folder cannot be read.
    """
    if settings.from_adapter is None:
        alpha = (settings.rank or DEFAULTS["rank"]) / 2
        found = DEFAULTS | {"alpha": alpha}
        missing = {name for name in found if getattr(settings, name) is None}
        return dataclasses.replace(settings, **{name: found[name] for name in missing})
    folder = find_adapter_folder(settings.from_adapter) or settings.from_adapter
    with open_folder(folder, "np") as source:
        config = source.config
    rows, is_biased = config.trainable_token_indices, config.bias != "none"
    if rows or is_biased:
        name = "trainable_token_indices" if rows else f"bias={config.bias!r}"
        raise NotImplementedError(
            f"from_adapter={folder}: it has {name}, which is not trained here; expected a folder "
            "with adapters and modules_to_save only: train it further with PEFT"
        )
    found = {
        "from_adapter": folder,
        "method": "dora" if config.use_dora else "lora",
        "rank": config.r,
        "alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "dropout": config.lora_dropout,
        "layers": tuple(sorted(config.layers_to_transform or ())),
        "modules_to_save": config.modules_to_save or (),
    }
    for name, value in found.items():
        given = getattr(settings, name)
        is_given = given is not None and given is not False and given != ()
        if is_given and given != value and name != "from_adapter":
            raise ValueError(
                f"{name}={given!r}: expected {value!r}, as in from_adapter={folder}: leave out "
                f"`{name}`"
            )
    return dataclasses.replace(settings, **found)


def rules(settings: Settings, base: CausalLM) -> list[jax_dora.DoRARule]:
    """Returns the rules of the adapter.

    Args:
      settings: `complete` settings.
      base: the base model; shapes and dtypes are enough.
    """
    if settings.from_adapter is None:
        return _fresh_rules(settings, base)
    found = adapter_rules(base, settings.from_adapter, **FOLDER_OPTIONS)
    adapted = {re.sub(r"\\(.)", r"\1", rule.path) for rule in found}
    if settings.target is not None and adapted != (matched := _matched(settings.target, base)):
        raise ValueError(
            f"target={settings.target!r}: expected the layers of from_adapter="
            f"{settings.from_adapter}, but {min(adapted ^ matched)} is in one of them only: leave "
            "out `target`"
        )
    return found


def _matched(target: str, base: CausalLM) -> set[str]:
    """Returns the paths of the modules with weights that a target matches."""
    rule = jax_dora.DoRARule(target, rank=1, alpha=1)
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(base)}
    return {
        path
        for path, module in modules.items()
        if isinstance(module, nnx.Linear | nnx.Embed)
        and rule.matches(path, linear=isinstance(module, nnx.Linear))
    }


def _fresh_rules(settings: Settings, base: CausalLM) -> list[jax_dora.DoRARule]:
    """Returns the rule of the target, and a separate rule for the embedding if it is a target.

    In the separate rule, only the lookup is adapted, without dropout, as in PEFT.
    """
    target: Any = settings.target
    options: Any = {
        name: getattr(settings, name) for name in ("rank", "alpha", "use_rslora", "dropout")
    }
    rule = jax_dora.DoRARule(target, **options)
    matched = _matched(target, base)
    count = base.config.num_hidden_layers
    if outside := [path for path in matched if settings.layers and not path.startswith(LAYERS)]:
        raise ValueError(
            f"layers={settings.layers}: expected a `target` in {LAYERS} only, but {target!r} also "
            f"matches {outside[0]}"
        )
    if settings.layers and max(settings.layers) >= count:
        raise ValueError(f"layers={settings.layers}: expected indices from 0 to {count - 1}")
    if EMBEDDING not in matched:
        return [rule]
    embedding = dataclasses.replace(
        rule, path=re.escape(EMBEDDING), dropout=0.0, adapt_attend=False
    )
    if matched != {EMBEDDING}:
        return [embedding, rule]
    if settings.dropout:
        raise ValueError(
            f"dropout={settings.dropout}: expected 0, since target={settings.target!r} matches "
            "only the embedding, which reads token ids and has no activation to drop: leave "
            "out `dropout`"
        )
    return [embedding]


def adapt(
    model: CausalLM,
    settings: Settings,
    rules: list[jax_dora.DoRARule],
    *,
    is_abstract: bool = False,
) -> CausalLM:
    """Returns `model` with the adapter that training starts from, in training mode.

    Args:
      model: the base model.
      settings, rules: `complete` settings, and the rules for them.
      is_abstract: whether the model has no values; the adapter is a fresh one then.
    """
    rngs: Any = nnx.Rngs(settings.seed)
    if settings.from_adapter is not None and not is_abstract:
        model = load_adapter(model, settings.from_adapter, rngs=rngs, **FOLDER_OPTIONS)
    else:
        model = jax_dora.apply_dora(model, rules, rngs=rngs)
        for _, layer in _adapted(model) if settings.layers else ():
            # Of the other layers lora_b is zero too, so that neither gets a gradient.
            mask = np.isin(np.arange(len(layer.lora_a[...])), settings.layers)[:, None, None]
            layer.lora_a.set_value(layer.lora_a[...] * mask)
    # What is tied in a model is not in one from a folder, which has an array for each.
    can_share = is_abstract and settings.from_adapter is not None
    _train_modules(model, settings.modules_to_save, can_share=can_share)
    model.train()
    return model


def _train_modules(model: CausalLM, names: Any, *, can_share: bool) -> None:
    """Makes the parameters of modules `SavedParam`s, in place.

    Raises:
      ValueError: a name is unknown, or the module is adapted or quantised, or, unless it
        `can_share`, it shares an array with another one that is not saved.
    """
    if not names:
        return
    base = nnx.state(model, lambda _, one: type(one) is nnx.Param)
    arrays = {array.path: [*array.names] for array in stored_arrays(base, model.config)}
    if model.lm_head is None:
        arrays["model", "embed_tokens", "embedding"].append(TIED[0])
    config = AdapterConfig(r=1, modules_to_save=tuple(names))
    tensors = [tensor for stored in arrays.values() for tensor in stored]
    for name in names:
        if not any(map(AdapterConfig(r=1, modules_to_save=(name,)).saves, tensors)):
            modules = sorted({tensor.split(".")[-2] for tensor in tensors})
            raise ValueError(
                f"modules_to_save={list(names)}: no module has the name {name!r}; expected some of "
                f"{', '.join(modules)}"
            )
    for path, stored in arrays.items():
        if not (saved := [name for name in stored if config.saves(name)]):
            continue
        others = sorted(set(stored) - set(saved))
        if others and not can_share:
            raise ValueError(
                f"modules_to_save={list(names)}: it has {saved[0]}, but not {others[0]}, which is "
                "in the same array and stays so in training; expected both or none"
            )
        module = functools.reduce(getattr, path[:-1], model)
        variable = getattr(module, path[-1])
        value = variable.get_value()
        if isinstance(module, jax_dora.DoRALayer) or is_quantised(value):
            what = "quantised" if is_quantised(value) else "adapted too"
            raise ValueError(
                f"modules_to_save={list(names)}: {saved[0]} is {what}; expected modules that are "
                "neither: narrow `target`, or leave out the name"
            )
        new = SavedParam.from_metadata(value.astype(jnp.float32), variable.get_metadata())
        setattr(module, path[-1], new)


def trained_magnitudes(model: CausalLM, method: str | None) -> dict[str, jax.Array] | None:
    """Returns which magnitudes are trained, in a shape that fits them, by the layer's path; None if
    all are.

    Those of LoRA are not, and in a stack, those of layers without an adapter are not: their lora_a
    and lora_b are zero.

    Raises:
      NotImplementedError: not all are trained, and there are several processes.
    """
    found = {}
    for path, layer in _adapted(model):
        arrays = layer.lora_a[...], layer.lora_b[...]
        axes = tuple(range(len(layer.stack.shape), arrays[0].ndim))
        has_adapter = jnp.logical_or(*(jnp.any(array != 0, axes) for array in arrays))[..., None]
        found[path] = has_adapter & (method == "dora")
    if all(mask.all() for mask in found.values()):
        return None
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"method={method!r}: expected DoRA in all layers with several processes, one of which "
            "could not compute the norms of weights that are spread over them for the adapter's "
            "folder: use one process, whose `mesh` may have several devices"
        )
    return found


def keep_norms(model: CausalLM, trained: Mapping[str, jax.Array]) -> None:
    """Sets the magnitudes that are not trained to the norms, in place, so that they scale nothing.

    So a layer computes what LoRA does, and its lora_a and lora_b have LoRA's gradients, since no
    gradient flows through a norm.
    """
    before = {path: layer.magnitude[...] for path, layer in _adapted(model)}
    jax_dora.reset_magnitudes(model)
    for path, layer in _adapted(model):
        value = jnp.where(trained[path], before[path], layer.magnitude[...])
        layer.magnitude.set_value(value)


def without_untrained(gradients: nnx.State, trained: Mapping[str, jax.Array]) -> nnx.State:
    """Returns `gradients` with zeros for the magnitudes that are not trained."""

    def masked(path: Any, variable: Any) -> Any:
        if path[-1] != "magnitude":
            return variable
        mask = trained["/".join(map(str, path[:-1]))]
        return variable.replace(jnp.where(mask, variable.get_value(), 0))

    flat = nnx.to_flat_state(gradients)
    return nnx.from_flat_state((path, masked(path, variable)) for path, variable in flat)


def finished(model: CausalLM, trained: Mapping[str, jax.Array] | None) -> CausalLM:
    """Returns a copy of `model` with the parameters that are saved."""
    model = nnx.clone(model)
    if trained is not None:
        keep_norms(model, trained)
    for _, module in nnx.iter_modules(model):
        for name, value in [*vars(module).items()]:
            if isinstance(value, SavedParam):
                array = value.get_value().astype(model.config.dtype)
                setattr(module, name, nnx.Param.from_metadata(array, value.get_metadata()))
    return model


def _adapted(model: CausalLM) -> Iterator[tuple[str, Any]]:
    """Yields the path and the layer of every adapted layer."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, jax_dora.DoRALayer):
            yield "/".join(map(str, path)), module
