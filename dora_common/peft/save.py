"""A model's adapter into a folder, whichever library the model is of."""

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dora_common.peft import checks
from dora_common.peft.config import EXPERTS_VERSION, AdapterConfig
from dora_common.peft.fit import fit
from dora_common.peft.folder import check_finite
from dora_common.peft.keys import key_of, parameter_key
from dora_common.peft.layers import Layer, Outline, key_modules, refuse_layers
from dora_common.peft.names import first_match, parameters_for, patterns_for, targets_for
from dora_common.peft.writing import check_free, write

# PEFT's task types.
_TASKS = "SEQ_CLS SEQ_2_SEQ_LM CAUSAL_LM TOKEN_CLS QUESTION_ANS FEATURE_EXTRACTION".split()
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


@dataclass(frozen=True)
class Source:
    """A model as PyTorch names it.

    Attributes:
      outline: its layers and parameters.
      adapted: the layers that are, by name; one or more.
      modules: the names of all modules.
      read: a parameter as it is stored, by its name.
      read_adapter: a tensor of an adapter as it is stored, by the layer's name and "lora_a",
        "lora_b" or "magnitude".
      is_lora: whether the magnitude of the layer of this name is its norm.
    """

    outline: Outline
    adapted: Mapping[str, Adapted]
    modules: Collection[str]
    read: Callable[[str], Any]
    read_adapter: Callable[[str, str], Any]
    is_lora: Callable[[str], bool]

    def config(
        self,
        given: AdapterConfig | None,
        modules_to_save: Any,
        tokens: Any,
        *,
        for_peft: bool = True,
        **fields: Any,
    ) -> AdapterConfig:
        """Returns the configuration `given`, or one made of the model and the other arguments.

        Args:
          modules_to_save: ends of the names of modules, or one such.
          tokens: trainable_token_indices, by the ends of names, or of the only embedding.
          for_peft: refuse what PEFT does not read.
          **fields: what the layers do not say: use_dora, bias and so on.

        Raises:
          ValueError: it does not say what the model is; a name matches nothing; the format cannot
            express the model, whose layers differ in what it has once.
          NotImplementedError: PEFT's adapter of a layer would compute something else.
        """
        if "" in self.adapted:
            raise ValueError(
                "model is itself the adapted layer, and a PEFT adapter names every layer by its "
                "path inside of a model; expected a model that holds the layer: put it into a "
                "module"
            )
        refuse_layers(one.layer for one in self.adapted.values())
        if given is not None:
            self._check(config := given)
        else:
            rank, rank_pattern = patterns_for({n: one.rank for n, one in self.adapted.items()})
            alpha, alpha_pattern = patterns_for({n: one.alpha for n, one in self.adapted.items()})
            saved = (modules_to_save,) if isinstance(modules_to_save, str) else modules_to_save
            experts = self._experts()
            modules = [name for name in self.adapted if name not in experts]
            if experts:
                fields |= {
                    "target_parameters": parameters_for(experts, self.outline.parameters),
                    "peft_version": EXPERTS_VERSION,
                }
            config = AdapterConfig(
                r=rank,
                lora_alpha=alpha,
                rank_pattern=rank_pattern,
                alpha_pattern=alpha_pattern,
                target_modules=targets_for(modules, self.modules) if modules else (),
                use_rslora=self._the_one("use_rslora"),
                lora_dropout=self._the_one("dropout"),
                modules_to_save=tuple(saved) or None,
                trainable_token_indices=self._rows(tokens) or None,
                **fields,
            )
            self._check_saved(config)
        for name in () if config.use_dora else self.adapted:
            if not self.is_lora(name):
                raise ValueError(
                    f"use_dora is False and the magnitude of {name} is not its norm; expected a "
                    "LoRA adapter, as load_adapter makes it of a LoRA folder: pass use_dora=True"
                )
        self._refuse_to_split(config)
        if for_peft:
            self._refuse_for_peft(config)
        return config

    def _experts(self) -> list[str]:
        return [name for name, one in self.adapted.items() if one.layer.kind == "experts"]

    def _refuse_for_peft(self, config: AdapterConfig) -> None:
        """Raises ValueError for a task that PEFT does not know, and NotImplementedError where its
        target_parameters do without something."""
        task = config.task_type
        known = task is None or task in _TASKS
        checks.expect(known, "task_type", task, f"None or one of {', '.join(_TASKS)}")
        given = {
            "use_dora=True": config.use_dora,
            f"lora_dropout={config.lora_dropout}": config.lora_dropout,
            "fan_in_fan_out=True": config.fan_in_fan_out,
        }
        told = [name for name, is_given in given.items() if is_given]
        if told and (experts := self._experts()):
            raise NotImplementedError(
                f"PEFT refuses {', '.join(told)} beside packed experts, its target_parameters, "
                f"which are {', '.join(experts)}; expected use_dora=False, where every magnitude "
                "is its norm, and no dropout; or for_peft=False, for a folder that jax_dora alone "
                "reads, with magnitudes [experts, out]; or merge_dora"
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
        """Writes the folder.

        Args:
          config: what `config` returned.
          save_file: safetensors' function of that name.
          overwrite: replace an adapter that is there.
          run: calls the function that writes: of several processes that read the same model, in
            one.

        Raises:
          FileExistsError: there is an adapter, and `overwrite` is False.
          ValueError: a number is not finite as it is stored.
        """
        check_free(folder, overwrite=overwrite)
        tensors = self._tensors(config)
        # What is written can be read: the same check as a reader's.
        shapes = {key: ("F32", tuple(tensor.shape)) for key, tensor in tensors.items()}
        fit(config, shapes, self.outline)
        for key, tensor in tensors.items():
            reason = f"{tensor.dtype} cannot hold the numbers, or training diverged"
            check_finite(key, tensor, reason)

        def write_tensors(path: Path) -> None:
            save_file(tensors, path, metadata={"format": "pt"})

        run(lambda: write(folder, config, write_tensors, overwrite=overwrite))

    def _tensors(self, config: AdapterConfig) -> dict[str, Any]:
        tensors = {}
        keys = key_modules(one for one in self.outline.layers if one.name in self.adapted)
        for name, one in self.adapted.items():
            for role, shape in one.layer.shapes(one.rank).items():
                if role != "magnitude" or config.use_dora:
                    tensor = self.read_adapter(name, role.replace("embedding_", "lora_"))
                    tensors[key_of(keys[name], role)] = tensor.reshape(shape)
        for name, rows in self._rows(config.trainable_token_indices).items():
            tensors[key_of(name, "tokens")] = self.read(f"{name}.weight")[list(rows)]
        for name in self.outline.parameters:
            is_adapted = name.rpartition(".")[0] in self.adapted
            if config.stores(name, of_adapted_layer=is_adapted):
                tensors[parameter_key(name, of_adapted_layer=is_adapted)] = self.read(name)
        return tensors

    def _rows(self, tokens: Any) -> dict[str, tuple[int, ...]]:
        """Returns the rows to store of each embedding or head, by its whole name."""
        layers = self.outline.layers
        if tokens and not isinstance(tokens, Mapping):
            embeddings = [layer.name for layer in layers if layer.kind == "embedding"]
            if len(embeddings) != 1:
                raise ValueError(
                    "trainable_token_indices is a list and the model has the embeddings "
                    f"{embeddings}; expected one: pass {{name: indices}}"
                )
            tokens = {embeddings[0]: tokens}
        found = {}
        for end, rows in (tokens or {}).items():
            names = [one.name for one in layers if one.kind != "conv"]
            names = [name for name in names if name.endswith(end)]
            if not names:
                _refuse_name("trainable_token_indices", end, [one.name for one in layers])
            found |= {name: tuple(map(int, rows)) for name in names}
        return found

    def _check(self, config: AdapterConfig) -> None:
        # A file has its patterns sorted, so that another may be the first that matches.
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
                told = f" by {by}, in its file's sorted patterns the first that matches"
                raise ValueError(
                    f"config gives {name} the rank, alpha and use_rslora {theirs}"
                    f"{told if by else ''}; expected {ours}, the model's"
                )

    def _check_saved(self, config: AdapterConfig) -> None:
        modules = {
            ".".join(parts[:length])
            for parts in (name.split(".") for name in self.outline.parameters)
            for length in range(1, len(parts))
        }
        saved = config.modules_to_save or ()
        matched = {name for name in saved if any(module.endswith(name) for module in modules)}
        for name in saved:
            is_of_task = name in _HEADS_OF_TASKS and matched.intersection(_HEADS_OF_TASKS)
            if name not in matched and not is_of_task:
                _refuse_name("modules_to_save", name, modules)

    def _refuse_to_split(self, config: AdapterConfig) -> None:
        """Raises ValueError where modules_to_save names one of two modules that share a weight;
        adapted layers, whose own weights are frozen, do not count."""
        frozen = {f"{name}.weight" for name in self.adapted}
        for names in self.outline.tied():
            saved = [name for name in names if config.saves(name)]
            others = sorted(set(names) - set(saved) - frozen)
            if saved and others and not config.keeps_ties:
                told = ", ".join(repr(one.rpartition(".")[0]) for one in [*saved, *others])
                raise ValueError(
                    f"modules_to_save has {saved[0]}, which shares its array with {others[0]}; "
                    f"expected all of {told} or none: PEFT gives a copy of its own to what is "
                    "saved, and would leave the other as the base model has it"
                )

    def _the_one(self, field: str) -> Any:
        """Returns the value that all layers have; of dropout, all but embeddings, which have
        nothing to drop."""
        layers = {
            name: one
            for name, one in self.adapted.items()
            if field != "dropout" or one.layer.kind != "embedding"
        }
        examples = {getattr(one, field): name for name, one in layers.items()}
        if len(examples) > 1:
            told = ", ".join(f"{name} has {value}" for value, name in examples.items())
            raise ValueError(f"{field}: {told}; expected one for all layers, as PEFT's format has")
        return next(iter(examples), 0.0)


def _refuse_name(argument: str, name: str, there: Iterable[str]) -> NoReturn:
    by_end = {one.rpartition(".")[2]: one for one in there} | {one: one for one in there}
    nearest = difflib.get_close_matches(name, sorted(by_end), n=3, cutoff=0)
    raise ValueError(
        f"{argument} has {name!r}, by which the name of no module with parameters ends; the "
        f"nearest are {', '.join(nearest)}"
    )
