"""adapter_config.json: the layers that an adapter has, and their ranks and scales.

Names are matched by the rules of PEFT 0.21, as the documentation of its `LoraConfig` states them.
Module names are PyTorch's, such as "model.layers.0.self_attn.q_proj".
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dora_common.fields import reject_duplicate_fields
from dora_common.peft import checks
from dora_common.peft.formats import MLX
from dora_common.peft.names import Names, first_match, matches
from dora_common.rules import nearest

# Without one of these fields, the adapter cannot be computed.
_REQUIRED = ("peft_type", "r")
_OPTIONAL = (
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "ensure_weight_tying",
    "peft_version",
)

# Fields that do not change results: information for people and for PEFT, or about the training.
_INFORMATIVE = frozenset(
    {"inference_mode", "runtime_config", "eva_config"}
    # These two have an effect only together with a field that is rejected when it is set.
    | {"megatron_core", "qalora_group_size"}
    # Fields that only NVlabs' DoRA writes.
    | {"dora_simple", "merge_weights"}
)
# Fields that mlx-lm writes into its file of this name.
_OF_MLX = ("fine_tune_type", "lora_parameters", "lora_layers")
_OFF = (None, False, "", [], {})

TOKEN_EMBEDDINGS = ("embed_tokens", "lm_head")
"""PEFT recognizes embeddings and output heads by these last parts of their names."""

# The first PEFT version that reads adapters of packed experts in the format written here.
EXPERTS_VERSION = "0.19.1"

_NUMBERED_BLOCK = r".*?\.[^.]*\.(?P<index>\d+)\."


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The fields of PEFT's `LoraConfig` that change results, under PEFT's names.

    Attributes:
      r, lora_alpha: rank and alpha of every layer that no pattern matches.
      rank_pattern, alpha_pattern: rank or alpha by a regular expression for the end of a layer's
        name. The first key that matches a layer applies.
      use_rslora: whether the scale of a layer is alpha / sqrt(rank) instead of alpha / rank.
      use_dora: whether the layers have magnitudes; False for a LoRA adapter.
      target_modules: names or ends of names; or one regular expression for whole names; or
        "all-linear" for every linear layer, possibly without the output head. None in a file means
        the layers that have tensors in the folder.
      target_parameters: names or ends of names of parameters that hold packed experts. With them,
        target_modules may be empty.
      exclude_modules: names, ends of names, or a regular expression; overrides target_modules.
      layers_to_transform, layers_pattern: the only indices of the block list that are adapted, and
        the name of the block list.
      modules_to_save: ends of the names of modules that are stored whole. Other weights that are
        tied to theirs keep the base model's values.
      ensure_weight_tying: whether tied weights stay tied when one of them is stored; see
        `keeps_ties`.
      trainable_token_indices: rows of embeddings that are stored, by the ends of the embeddings'
        names; or only the rows if a single embedding has stored rows.
      bias: "none", "all" or "lora_only": the biases that were trained and are stored.
      lora_dropout, fan_in_fan_out, init_lora_weights: the same as in PEFT.
      base_model_name_or_path, revision, task_type, auto_mapping: information for readers.
      peft_version: the PEFT version that wrote the folder, or that introduced its format.
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
        """Raises TypeError or ValueError if a field is out of range; NotImplementedError if
        `init_lora_weights` changes the base weights."""
        checks.check_rank("r", self.r)
        checks.check_alpha("lora_alpha", self.lora_alpha)
        checks.check_pattern("rank_pattern", self.rank_pattern, checks.check_rank)
        checks.check_pattern("alpha_pattern", self.alpha_pattern, checks.check_alpha)
        for name in ("use_dora", "use_rslora", "fan_in_fan_out", "ensure_weight_tying"):
            checks.check_type(name, getattr(self, name), bool, "true or false")
        for name in ("base_model_name_or_path", "revision", "task_type", "peft_version"):
            checks.check_type(name, getattr(self, name), str | None, "a string or null")
        checks.check_type("auto_mapping", self.auto_mapping, Mapping | None, "an object or null")
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            is_empty = name == "target_modules" and value == () and self.target_parameters
            if value is not None and not is_empty:
                checks.check_targets(name, value)
        if self.target_parameters is not None:
            checks.check_names("target_parameters", self.target_parameters)
        if self.trainable_token_indices is not None:
            checks.check_token_indices("trainable_token_indices", self.trainable_token_indices)
        for name in ("layers_pattern", "modules_to_save"):
            if (value := getattr(self, name)) is not None:
                checks.check_names(name, value)
                for one in value:
                    checks.check_regex(name, one, one)
        self._check_layers()
        is_known = self.bias in ("none", "all", "lora_only")
        checks.check(is_known, "bias", self.bias, "one of 'none', 'all', 'lora_only'")
        dropout = self.lora_dropout
        is_probability = checks.is_finite(dropout) and 0 <= dropout < 1
        checks.check(is_probability, "lora_dropout", dropout, "a probability in [0, 1)")
        checks.check_initialization(self.init_lora_weights)

    def _check_layers(self) -> None:
        name, chosen = "layers_to_transform", self.layers_to_transform
        if chosen is None:
            expected = "indices, since layers_pattern is given"
            checks.check(self.layers_pattern is None, name, chosen, expected)
        else:
            checks.check_type(name, chosen, tuple, "indices")
            checks.check(checks.are_indices(chosen), name, chosen, "indices from 0 on")
            expected = (
                "null, since target_modules is the regular expression "
                f"{self.target_modules!r}: PEFT accepts indices only with a list of names"
            )
            checks.check(not isinstance(self.target_modules, str), name, chosen, expected)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the contents of adapter_config.json.

        Raises:
          ValueError, TypeError: the text is not a JSON object, or a field is missing or malformed.
          NotImplementedError: fields have values that are not supported; the error names all of
            them. Unknown fields are not supported unless they are null, false or empty.
        """
        given: dict[str, Any] = _json_object(text)
        peft_type = given.get("peft_type")
        if peft_type not in ("LORA", "DORA", None):
            raise NotImplementedError(
                f"peft_type is {peft_type!r}; expected 'LORA' (with or without use_dora), or "
                "'DORA', as NVlabs' DoRA writes"
            )
        if peft_type is None and not given.keys().isdisjoint(_OF_MLX):
            raise NotImplementedError(f"peft_type is missing; this is {MLX}")
        missing = [name for name in _REQUIRED if given.get(name) is None]
        missing += [name for name in ("lora_alpha",) if given.get(name, 8) is None]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} missing; expected a complete LoRA configuration"
            )
        del given["peft_type"]
        given.setdefault("use_dora", peft_type == "DORA")
        own = {item.name for item in dataclasses.fields(cls)}
        unsupported = {
            name: value
            for name, value in sorted(given.items())
            if name not in own | _INFORMATIVE and value not in _OFF
        }
        if unsupported:
            listed = ", ".join(f"{name} = {checks.short(one)}" for name, one in unsupported.items())
            meant = [
                one
                for name in unsupported
                for one in difflib.get_close_matches(name, own, n=1, cutoff=0.82)
            ]
            raise NotImplementedError(
                f"{listed}: not supported; expected null, false or no such field, since it may "
                "change what the adapter computes"
                + (f"; PEFT's name is {', '.join(map(repr, meant))}" if meant else "")
            )
        # PEFT writes null for a field that was not given, and accepts a scalar as a list of one.
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
        """Returns the contents of the file in PEFT's style: two spaces, sorted keys.

        Fields that old PEFT versions do not know are written only if they are set, since those
        versions reject unknown fields.
        """
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

    def unused_patterns(
        self, adapted: Collection[str], fields: Iterable[str] = ("rank_pattern", "alpha_pattern")
    ) -> list[str]:
        """Returns descriptions of the keys of patterns that apply to none of the layers `adapted`.
        PEFT warns of them, and ignores them."""
        unused = []
        for field_name in fields:
            pattern = getattr(self, field_name)
            used = {first_match(pattern, name) for name in adapted}
            for key in pattern.keys() - used:
                start = f"{field_name} has the key {key!r}, which is ignored: "
                if any(first_match({key: None}, name) for name in adapted):
                    unused.append(f"{start}earlier keys match the same layers, and the first wins")
                else:
                    plain = key.replace("\\", "").strip("^$")
                    unused.append(f"{start}it matches no adapted layer{nearest(plain, adapted)}")
        return sorted(unused)

    @property
    def targets_all_linear(self) -> bool:
        targets = self.target_modules
        return isinstance(targets, str) and targets.lower() == "all-linear"

    @property
    def keeps_ties(self) -> bool:
        """Whether modules in modules_to_save stay tied.

        PEFT applies ensure_weight_tying only if modules_to_save names one of `TOKEN_EMBEDDINGS`. It
        ignores ensure_weight_tying for other names, such as GPT-2's wte.
        """
        last_parts = {name.rpartition(".")[2] for name in self.modules_to_save or ()}
        return self.ensure_weight_tying and not last_parts.isdisjoint(TOKEN_EMBEDDINGS)

    def selects(self, name: str, *, is_linear: bool) -> bool:
        if matches(self.exclude_modules, name) or self._is_in_saved_module(name):
            return False
        if self.targets_all_linear:
            return is_linear
        if isinstance(self.target_modules, str) or name in (self.target_modules or ()):
            return matches(self.target_modules, name)
        return matches(self.target_modules, name) and self.has_block_of(name)

    @property
    def square_experts_refusal(self) -> str:
        """Why packed experts with equal numbers of input and output features are rejected, or "".

        PEFT before `EXPERTS_VERSION` always treated the middle axis of a parameter as the input
        axis. Only the shapes show whether that was right, and not if the two numbers are equal.
        """
        if checks.version_numbers(self.peft_version or "") >= checks.version_numbers(
            EXPERTS_VERSION
        ):
            return ""
        return (
            f"peft_version is {self.peft_version or 'absent'}, and PEFT before {EXPERTS_VERSION} "
            "always treated the middle axis of packed experts as the input axis, which cannot be "
            "checked here since the experts have as many input as output features; expected "
            f"{EXPERTS_VERSION} or later in adapter_config.json"
        )

    def saves(self, parameter: str) -> bool:
        """Returns whether `parameter` belongs to a module in modules_to_save."""
        parts = parameter.split(".")
        modules = [".".join(parts[:length]) for length in range(1, len(parts))]
        saved = self.modules_to_save or ()
        return any(module.endswith(name) for module in modules for name in saved)

    def token_indices_of(self, name: str) -> tuple[int, ...] | None:
        """Returns the indices of the rows of the embedding `name` that are stored, or None."""
        indices = self.trainable_token_indices
        if isinstance(indices, Mapping):
            return next((rows for end, rows in indices.items() if name.endswith(end)), None)
        return indices

    def stores(self, parameter: str, *, of_adapted_layer: bool) -> bool:
        """Returns whether the folder stores the base model's `parameter`.

        The folder stores parameters of modules in modules_to_save, and biases according to `bias`.
        """
        trained = self.bias == "all" or (self.bias == "lora_only" and of_adapted_layer)
        return (trained and parameter.rpartition(".")[2] == "bias") or self.saves(parameter)

    def _is_in_saved_module(self, name: str) -> bool:
        saved = self.modules_to_save or ()
        return any(re.match(rf"(^|.*\.){module}($|\..*)", name) for module in saved)

    def has_block_of(self, name: str) -> bool:
        """Returns whether `layers_to_transform` chooses the block of the module `name`."""
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
        value = json.loads(text, object_pairs_hook=reject_duplicate_fields)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); expected an object of fields") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply; expected one flat object") from error
    if not isinstance(value, dict):
        raise ValueError(f"the JSON is {checks.short(value)}; expected an object of fields")
    return value
