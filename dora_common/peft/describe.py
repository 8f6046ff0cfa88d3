"""The configuration that says what a model's adapters are."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dora_common.peft.config import AdapterConfig, first_match, patterns_for, targets_for
from dora_common.peft.layers import Layer

# The names that PEFT adds to modules_to_save by the task type, whatever the model calls its head.
_HEADS_OF_TASKS = ("classifier", "score")


@dataclass(frozen=True)
class Adapted:
    """One adapted layer of a model, and what its adapter was made with."""

    layer: Layer
    rank: int
    alpha: float
    use_rslora: bool
    dropout: float


def config_of(
    adapted: Mapping[str, Adapted],
    all_modules: Iterable[str],
    parameters: Iterable[str],
    *,
    modules_to_save: Sequence[str] | str,
    **fields: Any,
) -> AdapterConfig:
    """Returns the configuration that says what the adapters of a model are.

    Args:
      adapted: by the layer's name; one or more.
      all_modules: the names of every module of the model.
      parameters: the names of every parameter of the base model.
      modules_to_save: ends of the names of modules, or one such.
      **fields: what the layers do not say: use_dora, bias and so on.

    Raises:
      ValueError: the layers differ in what the format has once: use_rslora or dropout; or the
        model itself is a layer; or a name of `modules_to_save` matches nothing.
    """
    _check_names(adapted)
    saved = (modules_to_save,) if isinstance(modules_to_save, str) else tuple(modules_to_save)
    rank, rank_pattern = patterns_for({name: one.rank for name, one in adapted.items()})
    alpha, alpha_pattern = patterns_for({name: one.alpha for name, one in adapted.items()})
    # An embedding has nothing to drop, whatever the others do.
    dropouts = {n: one.dropout for n, one in adapted.items() if one.layer.kind != "embedding"}
    config = AdapterConfig(
        r=rank,
        lora_alpha=alpha,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        target_modules=targets_for(adapted, all_modules),
        use_rslora=_the_one("use_rslora", {name: one.use_rslora for name, one in adapted.items()}),
        lora_dropout=_the_one("dropout", dropouts) if dropouts else 0.0,
        modules_to_save=saved or None,
        **fields,
    )
    _check_saved(config, list(parameters))
    return config


def token_rows(
    given: Mapping[str, Sequence[int]] | Sequence[int] | None, layers: Iterable[Layer]
) -> dict[str, tuple[int, ...]] | None:
    """Returns the rows to store of each embedding or head, by its whole name.

    Args:
      given: as PEFT's trainable_token_indices: by the ends of names, or of the only embedding.

    Raises:
      ValueError: a name matches nothing, or there is more than one embedding to choose from.
    """
    if not given:
        return None
    layers = list(layers)
    if isinstance(given, Mapping):
        ends = given
    else:
        embeddings = [layer.name for layer in layers if layer.kind == "embedding"]
        if len(embeddings) != 1:
            raise ValueError(
                f"trainable_token_indices is a list and the model has the embeddings {embeddings}; "
                "expected one: pass {name: indices}"
            )
        ends = {embeddings[0]: given}
    found = {}
    for end, rows in ends.items():
        names = [one.name for one in layers if one.kind != "conv" and one.name.endswith(end)]
        if not names:
            _refuse_name("trainable_token_indices", end, [layer.name for layer in layers])
        found |= {name: tuple(map(int, rows)) for name in names}
    return found


def _check_saved(config: AdapterConfig, parameters: Sequence[str]) -> None:
    modules = {
        ".".join(parts[:length])
        for parts in (name.split(".") for name in parameters)
        for length in range(1, len(parts))
    }
    matched = {
        name
        for name in config.modules_to_save or ()
        if any(module.endswith(name) for module in modules)
    }
    for name in config.modules_to_save or ():
        is_of_task = name in _HEADS_OF_TASKS and matched.intersection(_HEADS_OF_TASKS)
        if name not in matched and not is_of_task:
            _refuse_name("modules_to_save", name, modules)


def _refuse_name(argument: str, name: str, there: Iterable[str]) -> NoReturn:
    by_end = {one.rpartition(".")[2]: one for one in there} | {one: one for one in there}
    nearest = difflib.get_close_matches(name, sorted(by_end), n=3, cutoff=0)
    raise ValueError(
        f"{argument} has {name!r}, by which the name of no module with parameters ends; the "
        f"nearest are {', '.join(nearest)}"
    )


def check_config(config: AdapterConfig, adapted: Mapping[str, Adapted]) -> None:
    """
    Raises:
      ValueError: `config` gives a layer another rank or scale than it has, once it is in a file;
        or the model itself is a layer.
    """
    _check_names(adapted)
    # A file has its patterns sorted, so that another may be the first that matches.
    written = AdapterConfig.from_json(config.to_json())
    for name, one in adapted.items():
        ours = (one.rank, one.alpha, one.use_rslora)
        theirs = (written.rank_of(name), written.alpha_of(name), written.use_rslora)
        if ours != theirs:
            by = ", ".join(
                f"{field}[{key!r}]"
                for field in ("rank_pattern", "alpha_pattern")
                if (key := first_match(getattr(written, field), name)) is not None
            )
            told = f" by {by}, in its file's sorted patterns the first that matches" if by else ""
            raise ValueError(
                f"config gives {name} the rank, alpha and use_rslora {theirs}{told}; expected "
                f"{ours}, the model's"
            )


def _check_names(adapted: Mapping[str, Adapted]) -> None:
    if "" in adapted:
        raise ValueError(
            "model is itself the adapted layer, and a PEFT adapter names every layer by its path "
            "inside of a model; expected a model that holds the layer: put it into a module"
        )


def _the_one(field: str, values: Mapping[str, Any]) -> Any:
    examples = {value: name for name, value in values.items()}
    if len(examples) > 1:
        told = ", ".join(f"{name} has {value}" for value, name in examples.items())
        raise ValueError(f"{field}: {told}; expected one for all layers, as PEFT's format has")
    return next(iter(examples))
