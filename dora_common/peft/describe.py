"""The configuration that says what a model's adapters are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dora_common.peft.config import AdapterConfig, first_match, patterns_for, targets_for
from dora_common.peft.fit import Layer


@dataclass(frozen=True)
class Adapted:
    """One adapted layer of a model, and what its adapter was made with."""

    layer: Layer
    rank: int
    alpha: float
    use_rslora: bool
    dropout: float


def config_of(
    adapted: Mapping[str, Adapted], all_modules: Iterable[str], **fields: Any
) -> AdapterConfig:
    """
    Args:
      adapted: by the layer's name; one or more.
      all_modules: the names of every module of the model.
      **fields: what the layers do not say: use_dora, bias and so on.

    Raises:
      ValueError: the layers differ in what the format has once: use_rslora or dropout; or the
        model itself is a layer.
    """
    _check_names(adapted)
    rank, rank_pattern = patterns_for({name: one.rank for name, one in adapted.items()})
    alpha, alpha_pattern = patterns_for({name: one.alpha for name, one in adapted.items()})
    # An embedding has nothing to drop, whatever the others do.
    dropouts = {n: one.dropout for n, one in adapted.items() if one.layer.kind != "embedding"}
    return AdapterConfig(
        r=rank,
        lora_alpha=alpha,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        target_modules=targets_for(adapted, all_modules),
        use_rslora=_the_one("use_rslora", {name: one.use_rslora for name, one in adapted.items()}),
        lora_dropout=_the_one("dropout", dropouts) if dropouts else 0.0,
        **fields,
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
