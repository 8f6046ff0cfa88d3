"""adapter_config.json: which layers an adapter has, and with what rank and scale.

Names are matched by the rules of PEFT 0.21, as the documentation of its `LoraConfig` tells them;
module names are PyTorch's, "model.layers.0.self_attn.q_proj".
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dora_common.fields import each_once
from dora_common.peft import checks
from dora_common.peft.names import Names, first_match, matches

# A file that lacks one of these says too little to compute with.
_REQUIRED = ("peft_type", "r")
_OPTIONAL = (
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "ensure_weight_tying",
    "peft_version",
)

# Beside what changes results: told to people and to PEFT, or how training began or ran.
_INFORMATIVE = frozenset(
    {"inference_mode", "runtime_config", "eva_config"}
    # Both mean something only beside a field that is refused when it is set.
    | {"megatron_core", "qalora_group_size"}
    # NVlabs' own.
    | {"dora_simple", "merge_weights"}
)
_OFF = (None, False, "", [], {})

TOKEN_EMBEDDINGS = ("embed_tokens", "lm_head")
"""What PEFT calls embeddings and heads by the last parts of their names."""

# The first of PEFT's whose adapters of packed experts are as they are written here.
EXPERTS_VERSION = "0.19.1"

_NUMBERED_BLOCK = r".*?\.[^.]*\.(?P<index>\d+)\."


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The fields of PEFT's `LoraConfig` that change results, under its names.

    Attributes:
      r, lora_alpha: rank and alpha of every layer that no pattern speaks of.
      rank_pattern, alpha_pattern: a key is a regular expression for the end of a layer's name; the
        first that matches gives its rank or alpha.
      use_rslora: the scale is alpha / sqrt(rank), else alpha / rank, of the layer's own two.
      use_dora: the layers have magnitudes; without, this is a LoRA adapter.
      target_modules: names or ends of names, or one regular expression for whole names, or
        "all-linear": every linear layer, the output head possibly left out. None in a file means
        the layers that have tensors in it.
      target_parameters: names or ends of names of parameters that hold packed experts. Beside them
        target_modules may be empty.
      exclude_modules: names, ends of names, or a regular expression; wins over target_modules.
      layers_to_transform, layers_pattern: only these indices of the block list, and its name.
      modules_to_save: modules that are stored whole, by the ends of their names; what else their
        weights are tied to keeps its own.
      ensure_weight_tying: weights that are tied stay tied, whichever of them is stored; see
        `keeps_ties`.
      trainable_token_indices: rows of embeddings that are stored, by the ends of the embeddings'
        names; or only the rows, where one embedding has such.
      bias: "none", "all" or "lora_only": the biases that were trained and are stored.
      lora_dropout, fan_in_fan_out, init_lora_weights: as PEFT's.
      base_model_name_or_path, revision, task_type, auto_mapping: for whoever reads the folder.
      peft_version: that wrote the folder, or whose format it is.
    """

    r: int
    lora_alpha: float = 8
    target_modules: Names | str | None = None
    use_dora: bool = False
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_parameters: Names | None = None
    exclude_modules: Names | str | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: Names | None = None
    modules_to_save: Names | None = None
    ensure_weight_tying: bool = False
    trainable_token_indices: Mapping[str, tuple[int, ...]] | tuple[int, ...] | None = None
    fan_in_fan_out: bool = False
    bias: str = "none"
    lora_dropout: float = 0.0
    init_lora_weights: bool | str = True
    base_model_name_or_path: str | None = None
    revision: str | None = None
    task_type: str | None = None
    auto_mapping: Mapping[str, Any] | None = None
    peft_version: str | None = None

    def __post_init__(self) -> None:
        """
        Raises:
          TypeError, ValueError: a field has the wrong type or is out of its range.
          NotImplementedError: `init_lora_weights` is one that changes the base weights.
        """
        checks.is_rank("r", self.r)
        checks.is_alpha("lora_alpha", self.lora_alpha)
        checks.is_pattern("rank_pattern", self.rank_pattern, checks.is_rank)
        checks.is_pattern("alpha_pattern", self.alpha_pattern, checks.is_alpha)
        for name in ("use_dora", "use_rslora", "fan_in_fan_out", "ensure_weight_tying"):
            checks.has_type(name, getattr(self, name), bool, "true or false")
        for name in ("base_model_name_or_path", "revision", "task_type", "peft_version"):
            checks.has_type(name, getattr(self, name), str | None, "a string or null")
        checks.has_type("auto_mapping", self.auto_mapping, Mapping | None, "an object or null")
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            is_empty = name == "target_modules" and value == () and self.target_parameters
            if value is not None and not is_empty:
                checks.are_targets(name, value)
        if self.target_parameters is not None:
            checks.are_names("target_parameters", self.target_parameters)
        if self.trainable_token_indices is not None:
            checks.are_token_indices("trainable_token_indices", self.trainable_token_indices)
        for name in ("layers_pattern", "modules_to_save"):
            if (value := getattr(self, name)) is not None:
                checks.are_names(name, value)
                for one in value:
                    checks.is_expression(name, one, one)
        self._check_layers()
        is_known = self.bias in ("none", "all", "lora_only")
        checks.expect(is_known, "bias", self.bias, "one of 'none', 'all', 'lora_only'")
        dropout = self.lora_dropout
        is_probability = checks.is_finite(dropout) and 0 <= dropout < 1
        checks.expect(is_probability, "lora_dropout", dropout, "a probability in [0, 1)")
        checks.keeps_the_base(self.init_lora_weights)

    def _check_layers(self) -> None:
        name, chosen = "layers_to_transform", self.layers_to_transform
        if chosen is None:
            given = "indices, since layers_pattern is given"
            checks.expect(self.layers_pattern is None, name, chosen, given)
        else:
            checks.has_type(name, chosen, tuple, "indices")
            checks.expect(checks.are_indices(chosen), name, chosen, "indices from 0 on")
            null = (
                "null beside the regular expression target_modules = "
                f"{self.target_modules!r}: PEFT takes indices beside a list of names only"
            )
            checks.expect(not isinstance(self.target_modules, str), name, chosen, null)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the contents of adapter_config.json.

        Raises:
          ValueError, TypeError: the text is no JSON object, a field is missing or malformed.
          NotImplementedError: it asks for something that is not supported; every such field is
            named. A field unknown here is taken for one, unless it is null, false or empty.
        """
        given: dict[str, Any] = _json_object(text)
        peft_type = given.get("peft_type")
        if peft_type not in ("LORA", "DORA", None):
            raise NotImplementedError(
                f"peft_type is {peft_type!r}; expected 'LORA' (with or without use_dora), or "
                "'DORA', as NVlabs' DoRA writes"
            )
        missing = [name for name in _REQUIRED if given.get(name) is None]
        missing += [name for name in ("lora_alpha",) if given.get(name, 8) is None]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} missing; expected a complete LoRA configuration"
            )
        del given["peft_type"]
        given.setdefault("use_dora", peft_type == "DORA")
        own = {item.name for item in dataclasses.fields(cls)}
        asked = {
            name: value
            for name, value in given.items()
            if name not in own | _INFORMATIVE and value not in _OFF
        }
        if asked:
            told = ", ".join(f"{name} = {checks.short(asked[name])}" for name in sorted(asked))
            raise NotImplementedError(
                f"{told}: not supported; expected null, false or no such field, since it may "
                "change what the adapter computes"
            )
        # PEFT writes null for what is not given, and takes a scalar for a list of one.
        fields: dict[str, Any] = {
            name: _as_tuple(value)
            for name, value in given.items()
            if name in own and value is not None
        }
        lists = ("layers_to_transform", "layers_pattern", "modules_to_save")
        for name in lists:
            if isinstance(fields.get(name), int | str):
                fields[name] = (fields[name],)
        for name in (*lists, "exclude_modules", "target_parameters", "trainable_token_indices"):
            if fields.get(name) in ("", (), ("",), {}):
                del fields[name]
        if isinstance(tokens := fields.get("trainable_token_indices"), Mapping):
            fields["trainable_token_indices"] = {n: _as_tuple(one) for n, one in tokens.items()}
        return cls(**fields)

    def to_json(self) -> str:
        """Returns the file as PEFT writes it: two spaces, sorted keys. Fields that old versions
        lack are written only when they are set, for those versions refuse them."""
        value = dataclasses.asdict(self)
        for name in _OPTIONAL:
            if not value[name]:
                del value[name]
        value |= {"peft_type": "LORA", "inference_mode": True}
        return json.dumps(value, indent=2, sort_keys=True) + "\n"

    def rank_of(self, name: str) -> int:
        key = first_match(self.rank_pattern, name)
        return self.r if key is None else self.rank_pattern[key]

    def alpha_of(self, name: str) -> float:
        key = first_match(self.alpha_pattern, name)
        return self.lora_alpha if key is None else self.alpha_pattern[key]

    @property
    def targets_all_linear(self) -> bool:
        targets = self.target_modules
        return isinstance(targets, str) and targets.lower() == "all-linear"

    @property
    def keeps_ties(self) -> bool:
        """Returns whether modules of modules_to_save stay tied: PEFT heeds ensure_weight_tying
        where it names one of `TOKEN_EMBEDDINGS`, and not beside others, such as GPT-2's wte."""
        lasts = {name.rpartition(".")[2] for name in self.modules_to_save or ()}
        return self.ensure_weight_tying and not lasts.isdisjoint(TOKEN_EMBEDDINGS)

    def selects(self, name: str, *, is_linear: bool) -> bool:
        if matches(self.exclude_modules, name) or self._saves_around(name):
            return False
        if self.targets_all_linear:
            return is_linear
        if isinstance(self.target_modules, str) or name in (self.target_modules or ()):
            return matches(self.target_modules, name)
        return matches(self.target_modules, name) and self._is_in_chosen_block(name)

    @property
    def square_experts_refusal(self) -> str:
        """Says why packed experts with as many in features as out features are refused, or "": PEFT
        before `EXPERTS_VERSION` took the middle axis of a parameter for the inputs, whatever it
        is, and nothing but their shapes would tell."""
        if checks.release(self.peft_version or "") >= checks.release(EXPERTS_VERSION):
            return ""
        return (
            f"peft_version is {self.peft_version or 'absent'}, and PEFT before {EXPERTS_VERSION} "
            "took the middle axis of packed experts for their inputs, whose features are as many "
            f"as the outputs'; expected {EXPERTS_VERSION} or later in adapter_config.json"
        )

    def saves(self, parameter: str) -> bool:
        """Returns whether `parameter` belongs to a module that modules_to_save names."""
        parts = parameter.split(".")
        modules = [".".join(parts[:length]) for length in range(1, len(parts))]
        saved = self.modules_to_save or ()
        return any(module.endswith(name) for module in modules for name in saved)

    def token_indices_of(self, name: str) -> tuple[int, ...] | None:
        """Returns the rows of the embedding `name` that are stored on their own, if any."""
        indices = self.trainable_token_indices
        if isinstance(indices, Mapping):
            return next((rows for end, rows in indices.items() if name.endswith(end)), None)
        return indices

    def stores(self, parameter: str, *, of_adapted_layer: bool) -> bool:
        """Returns whether `parameter`, of the base model, is in the folder: whole modules and
        biases."""
        trained = self.bias == "all" or (self.bias == "lora_only" and of_adapted_layer)
        return (trained and parameter.rpartition(".")[2] == "bias") or self.saves(parameter)

    def _saves_around(self, name: str) -> bool:
        saved = self.modules_to_save or ()
        return any(re.match(rf"(^|.*\.){module}($|\..*)", name) for module in saved)

    def _is_in_chosen_block(self, name: str) -> bool:
        if not self.layers_to_transform:
            return True
        named = [rf"(?:^|.*?\.){block}\.(?P<index>\d+)\." for block in self.layers_pattern or ()]
        for pattern in named or [_NUMBERED_BLOCK]:
            if found := re.match(pattern, name):
                return int(found["index"]) in self.layers_to_transform
        return False


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=each_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); expected an object of fields") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply; expected one flat object") from error
    if not isinstance(value, dict):
        raise ValueError(f"the JSON is {checks.short(value)}; expected an object of fields")
    return value
