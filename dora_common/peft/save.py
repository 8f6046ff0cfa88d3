"""Saves a model's adapter as a folder. The code is independent of the model's framework."""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dora_common.peft import checks
from dora_common.peft.config import EXPERTS_VERSION, AdapterConfig
from dora_common.peft.destinations import find_destinations
from dora_common.peft.folder import check_finite
from dora_common.peft.keys import key_of, parameter_key, parse
from dora_common.peft.layers import Architecture, Layer, check_layers, key_modules
from dora_common.peft.names import first_match, parameters_for, patterns_for, targets_for
from dora_common.peft.writing import check_writable, write
from dora_common.rules import nearest

_LOG = logging.getLogger(__name__)
# PEFT's task types.
_TASKS = "SEQ_CLS SEQ_2_SEQ_LM CAUSAL_LM TOKEN_CLS QUESTION_ANS FEATURE_EXTRACTION".split()
# PEFT adds these names to modules_to_save for some task types, whatever the name of the head is.
_HEADS_OF_TASKS = ("classifier", "score")

# How layers get the same value of a setting and compute what they did.
_SAME = {
    "use_rslora": "set use_rslora to False and alpha to scale * rank, by which each scale stays",
    "dropout": "set dropout to one value, which has no effect outside of training",
}


@dataclass(frozen=True)
class Adapted:
    """One adapted layer of a model, and the hyperparameters of its adapter."""

    layer: Layer
    rank: int
    alpha: float
    use_rslora: bool
    dropout: float


@dataclass(frozen=True)
class Source:
    """An adapted model under PyTorch's names.

    Attributes:
      architecture: the layers and parameters of the model.
      adapted: the adapted layers by name; at least one.
      modules: the names of all modules.
      read: returns the tensor to store for a parameter, given its name.
      read_adapter: returns the tensor to store for an adapter, given the layer's name and "lora_a",
        "lora_b" or "magnitude".
      is_lora: returns whether a layer's magnitude equals its norm, given the layer's name.
    """

    architecture: Architecture
    adapted: Mapping[str, Adapted]
    modules: Collection[str]
    read: Callable[[str], Any]
    read_adapter: Callable[[str, str], Any]
    is_lora: Callable[[str], bool]

    def config(
        self,
        given: AdapterConfig | None,
        modules_to_save: Any = (),
        trainable_token_indices: Any = None,
        layers_to_transform: Sequence[int] = (),
        *,
        for_peft: bool = True,
        **fields: Any,
    ) -> AdapterConfig:
        """Returns `given` after checking it, or a configuration made from the model and arguments.

        Args:
          given: a complete configuration, or None.
          modules_to_save: ends of the names of modules, or one of them.
          trainable_token_indices: indices by the ends of names, or of the only embedding.
          layers_to_transform: the only indices of layers with adapters; if empty, the names of
            modules tell them.
          for_peft: whether to reject what PEFT cannot read.
          **fields: the fields that do not follow from the layers: use_dora, bias and so on.

        Raises:
          ValueError: the configuration does not match the model; or a name matches nothing; or the
            layers differ in a setting that the format has only once.
          NotImplementedError: PEFT's adapter of a layer would compute something else.
        """
        if "" in self.adapted:
            raise ValueError(
                "model is itself the adapted layer, but a PEFT adapter names every layer by its "
                "path inside of a model; expected a model that contains the layer: put it into a "
                "module"
            )
        if given is not None:
            checks.check_type("config", given, AdapterConfig, "an AdapterConfig, or None")
            self._check_config(config := given)
            for problem in config.unused_patterns(self.adapted):
                _LOG.warning("config: %s", problem)
        else:
            rank, rank_pattern = patterns_for({n: one.rank for n, one in self.adapted.items()})
            alpha, alpha_pattern = patterns_for({n: one.alpha for n, one in self.adapted.items()})
            names = "a list of ends of module names"
            checks.check_type("modules_to_save", modules_to_save, Iterable, names)
            saved = (modules_to_save,) if isinstance(modules_to_save, str) else modules_to_save
            experts = self._experts()
            modules = [name for name in self.adapted if name not in experts]
            blocks = tuple(map(int, layers_to_transform)) or None
            chosen = AdapterConfig(r=1, layers_to_transform=blocks)
            others = [name for name in self.modules if chosen.has_block_of(name)]
            if experts:
                fields |= {
                    "target_parameters": parameters_for(experts, self.architecture.parameters),
                    "peft_version": EXPERTS_VERSION,
                }
            config = AdapterConfig(
                r=rank,
                lora_alpha=alpha,
                rank_pattern=rank_pattern,
                alpha_pattern=alpha_pattern,
                target_modules=targets_for(modules, others) if modules else (),
                layers_to_transform=blocks,
                use_rslora=self._common_value("use_rslora"),
                lora_dropout=self._common_value("dropout"),
                modules_to_save=tuple(saved) or None,
                trainable_token_indices=self._token_rows(trainable_token_indices) or None,
                **fields,
            )
            self._check_modules_to_save(config)
        check_layers((one.layer for one in self.adapted.values()), use_dora=config.use_dora)
        for name in () if config.use_dora else self.adapted:
            if not self.is_lora(name):
                raise ValueError(
                    f"use_dora is False and the magnitude of {name} is not its norm; expected a "
                    "LoRA adapter, such as load_adapter returns for a LoRA folder, or to_lora for "
                    "a DoRA adapter: pass use_dora=True for a DoRA adapter"
                )
        self._check_ties(config)
        if for_peft:
            self._check_for_peft(config)
        return config

    def _experts(self) -> list[str]:
        return [name for name, one in self.adapted.items() if one.layer.kind == "experts"]

    def _check_for_peft(self, config: AdapterConfig) -> None:
        """Raises ValueError if PEFT does not know the task type; NotImplementedError if it does not
        support a setting for packed experts."""
        task = config.task_type
        known = task is None or task in _TASKS
        checks.check(known, "task_type", task, f"None or one of {', '.join(_TASKS)}")
        settings = {
            "use_dora=True": config.use_dora,
            f"lora_dropout={config.lora_dropout}": config.lora_dropout,
            "fan_in_fan_out=True": config.fan_in_fan_out,
        }
        unsupported = [setting for setting, is_set in settings.items() if is_set]
        if unsupported and (experts := self._experts()):
            raise NotImplementedError(
                f"PEFT refuses {', '.join(unsupported)} for packed experts (target_parameters), "
                f"which are {', '.join(experts)}; expected no dropout and use_dora=False, which "
                "needs every magnitude to be its norm; or for_peft=False, for a folder with "
                "magnitudes [experts, out] that only jax_dora and torch_dora read; or a model "
                "merged by merge_dora"
            )

    def write(
        self,
        folder: str | os.PathLike[str],
        config: AdapterConfig,
        save_file: Callable[..., Any],
        *,
        overwrite: bool,
        run: Callable[[Callable[[], None]], None] = lambda function: function(),
    ) -> None:
        """Writes the folder with the result of `self.config`, by safetensors' `save_file`. If
        several processes read the same model, `run` must call its argument in one of them only.

        Raises FileExistsError if the folder has an adapter, and `overwrite` is False; ValueError if
        a number is not finite in the dtype in which it is stored.
        """
        check_writable(folder, overwrite=overwrite)
        tensors = self._tensors(config)
        # Checks that the folder can be read, with the same function as a reader.
        shapes = {key: ("F32", tuple(tensor.shape)) for key, tensor in tensors.items()}
        find_destinations(config, shapes, self.architecture)
        for key, tensor in tensors.items():
            reason = f"{tensor.dtype} cannot hold the numbers, or training diverged"
            check_finite(key, tensor, reason)

        def write_tensors(path: Path) -> None:
            if _is_fresh(tensors):
                _LOG.warning(
                    "%s: lora_a or lora_b is zero in every layer, as before training. If more than "
                    "magnitudes was trained, the optimizer does not have these parameters: create "
                    "it after apply_dora or load_adapter, from the model that they return",
                    os.fspath(folder),
                )
            save_file(tensors, path, metadata={"format": "pt"})

        run(lambda: write(folder, config, write_tensors, overwrite=overwrite))

    def _tensors(self, config: AdapterConfig) -> dict[str, Any]:
        tensors = {}
        keys = key_modules(one for one in self.architecture.layers if one.name in self.adapted)
        for name, one in self.adapted.items():
            for role, shape in one.layer.shapes(one.rank).items():
                if role != "magnitude" or config.use_dora:
                    tensor = self.read_adapter(name, role.replace("embedding_", "lora_"))
                    tensors[key_of(keys[name], role)] = tensor.reshape(shape)
        for name, rows in self._token_rows(config.trainable_token_indices).items():
            tensors[key_of(name, "tokens")] = self.read(f"{name}.weight")[list(rows)]
        for name in self.architecture.parameters:
            is_adapted = name.rpartition(".")[0] in self.adapted
            if config.stores(name, of_adapted_layer=is_adapted):
                tensors[parameter_key(name, of_adapted_layer=is_adapted)] = self.read(name)
        return tensors

    def _token_rows(self, tokens: Any) -> dict[str, tuple[int, ...]]:
        """Returns the rows to store of each embedding or head by its whole name, of tied ones
        once."""
        expected = "rows of an embedding, or a dict of rows by the ends of names"
        checks.check_type("trainable_token_indices", tokens, Iterable | None, expected)
        layers = self.architecture.layers
        if tokens and not isinstance(tokens, Mapping):
            embeddings = [layer.name for layer in layers if layer.kind == "embedding"]
            if len(embeddings) != 1:
                raise ValueError(
                    "trainable_token_indices is a list, but the model has the embeddings "
                    f"{embeddings}; expected one embedding: pass {{name: indices}}"
                )
            tokens = {embeddings[0]: tokens}
        owners = self.architecture.row_owners()
        # A head that is None in Flax has a weight, but is no layer.
        modules = {*(one.name for one in layers if one.kind != "conv"), *owners}
        found = {}
        for end, rows in (tokens or {}).items():
            names = sorted(module for module in modules if module.endswith(end))
            if not names:
                _raise_unknown_name("trainable_token_indices", end, modules)
            found |= {name: tuple(map(int, rows)) for name in names}
        # As in PEFT, the rows of an embedding are also those of the modules tied to it.
        return {
            name: rows
            for name, rows in found.items()
            if (owner := owners.get(name, name)) == name or rows != found.get(owner)
        }

    def _check_config(self, config: AdapterConfig) -> None:
        # Patterns are sorted in the file, so that another pattern can be the first that matches.
        written = AdapterConfig.from_json(config.to_json())
        for name, one in self.adapted.items():
            ours = (one.rank, one.alpha, one.use_rslora)
            theirs = (written.rank_of(name), written.alpha_of(name), written.use_rslora)
            if ours != theirs:
                by = ", ".join(
                    f"{field}[{key!r}]"
                    for field in ("rank_pattern", "alpha_pattern")
                    if (key := first_match(getattr(written, field), name)) is not None
                )
                reason = f" by {by}, the first match when its patterns are sorted, as in the file"
                raise ValueError(
                    f"config gives {name} the rank, alpha and use_rslora {theirs}"
                    f"{reason if by else ''}; expected {ours}, as in the model"
                )

    def _check_modules_to_save(self, config: AdapterConfig) -> None:
        modules = {
            ".".join(parts[:length])
            for parts in (name.split(".") for name in self.architecture.parameters)
            for length in range(1, len(parts))
        }
        saved = config.modules_to_save or ()
        matched = {name for name in saved if any(module.endswith(name) for module in modules)}
        for name in saved:
            is_of_task = name in _HEADS_OF_TASKS and matched.intersection(_HEADS_OF_TASKS)
            if name not in matched and not is_of_task:
                _raise_unknown_name("modules_to_save", name, modules)

    def _check_ties(self, config: AdapterConfig) -> None:
        """Raises ValueError if modules_to_save names only some of the modules, not adapted and so
        not frozen, that share a weight."""
        frozen = {f"{name}.weight" for name in self.adapted}
        for names in self.architecture.tied():
            saved = [name for name in names if config.saves(name)]
            others = sorted(set(names) - set(saved) - frozen)
            if saved and others and not config.keeps_ties:
                modules = ", ".join(repr(one.rpartition(".")[0]) for one in [*saved, *others])
                raise ValueError(
                    f"modules_to_save has {saved[0]}, which shares its array with {others[0]}; "
                    f"expected all of {modules} or none: PEFT gives every saved module a copy of "
                    "its own, and the others would keep the base model's values"
                )

    def _common_value(self, field: str) -> Any:
        """Returns the value of a setting that all layers have, though embeddings apply no
        dropout."""
        layers = {
            name: one
            for name, one in self.adapted.items()
            if field != "dropout" or one.layer.kind != "embedding"
        }
        examples = {getattr(one, field): name for name, one in layers.items()}
        if len(examples) > 1:
            values = ", ".join(f"{name} has {value}" for value, name in examples.items())
            raise ValueError(
                f"{field}: {values}; expected one value for all layers, since PEFT's format has "
                f"only one: {_SAME[field]}, in the layers of torch_dora, or in the rules of "
                "jax_dora.get_adapter for set_adapter; or merge the adapter with merge_dora; or "
                "store its arrays otherwise: the state_dict, or the arrays of get_adapter, as by "
                "Orbax"
            )
        return next(iter(examples), 0.0)


def _is_fresh(tensors: Mapping[str, Any]) -> bool:
    """Returns whether each layer has a matrix of zeros, by which lora_b lora_a is zero."""
    layers, zero = set[str](), set[str]()
    for key, tensor in tensors.items():
        parsed = parse(key)
        if parsed.role not in (None, "magnitude", "tokens"):
            layers.add(parsed.module)
            if parsed.module not in zero and not bool((tensor != 0).any()):
                zero.add(parsed.module)
    return layers == zero


def _raise_unknown_name(argument: str, name: str, there: Iterable[str]) -> NoReturn:
    raise ValueError(
        f"{argument} has {name!r}, but no module with parameters has a name that ends so"
        f"{nearest(name, there)}"
    )
