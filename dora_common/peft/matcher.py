"""Finds the destination of each tensor of a folder in a model, and collects all problems."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from dora_common.peft import checks
from dora_common.peft.config import TOKEN_EMBEDDINGS, AdapterConfig
from dora_common.peft.keys import Key, Role, key_of
from dora_common.peft.layers import Architecture, Shape, key_modules
from dora_common.peft.names import matches
from dora_common.rules import OUTPUT_HEADS, nearest, with_any_beginning

# The dtypes that an adapter's tensors may have, as safetensors names them.
FLOATS = ("F64", "F32", "F16", "BF16")

MAX_LISTED = 20  # problems in one error message
_MAX_NAMES = 3  # of layers or tensors with the same problem

_NO_MAGNITUDES = (
    "; use_dora is true, so that each layer needs a magnitude. If the adapter was trained as LoRA, "
    "set use_dora to false in adapter_config.json. If it was trained as DoRA, another program has "
    "dropped the magnitudes, and no number that is left tells them: take the folder that the "
    "training wrote (docs/magnitudes.md names such programs). With use_dora false it loads as the "
    "LoRA adapter that is left, whose magnitudes are the norms"
)

_INCOMPLETE = (
    "; expected lora_A and lora_B of each layer that adapter_config.json selects: the folder was "
    "saved or copied incompletely, so save or copy the adapter again. To load it without the "
    "layer, leave it out of target_modules, and its other tensors out of the file"
)


class Matcher:
    """The destinations found so far for a folder's tensors, and the problems with them.

    Attributes:
      selected: the names of the layers that the configuration selects.
      adapters: the keys found for each adapter, by layer name and role.
      whole: the keys that hold a parameter's value, by the parameter's name.
      tokens: the key that holds some rows of a parameter and the indices of these rows, by the
        parameter's name.
      unselected: the names of layers with tensors that the configuration does not select.
      unknown: the keys of tensors for layers that the model does not have, by the layer's name.
      ranks: the layers whose tensors have another rank, by it and the rank of the configuration.
      magnitudes: the keys of magnitudes that the configuration does not expect.
      problems: descriptions of the problems.
    """

    def __init__(self, config: AdapterConfig, architecture: Architecture) -> None:
        self.config, self.parameters = config, architecture.parameters
        self.refusals = architecture.refusals
        self.layers = layers = {layer.name: layer for layer in architecture.layers}
        self.tied, self.row_owners = architecture.tied(), architecture.row_owners()
        self.ties = {name: names for names in self.tied for name in names}
        self.selected = {
            name
            for name, layer in layers.items()
            if (
                matches(config.target_parameters, name)
                if layer.kind == "experts"
                else config.selects(name, is_linear=layer.kind == "linear")
            )
        }
        self.key_modules = key_modules(one for one in layers.values() if one.name in self.selected)
        self.names = {module: name for name, module in self.key_modules.items()}
        self.adapters: dict[str, dict[Role, str]] = {}
        self.whole: dict[str, list[str]] = {}
        self.tokens: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.unselected: set[str] = set()
        self.unknown: dict[str, list[str]] = {}
        self.ranks: dict[tuple[int, int], set[str]] = {}
        self.magnitudes: set[str] = set()
        self.problems: list[str] = []

    def place(self, key: str, parsed: Key, dtype: str, shape: Shape) -> None:
        """Records the destination of a tensor, or the problem with it."""
        if dtype not in FLOATS:
            problem = f"is {dtype}; expected one of {', '.join(FLOATS)}"
        elif parsed.role == "tokens":
            problem = self._place_tokens(key, parsed.module, shape)
        elif parsed.role is not None:
            problem = self._place_in_adapter(key, parsed.module, parsed.role, shape)
        else:
            problem = self._problem_with_parameter(parsed, shape)
            if not problem and not parsed.is_original:
                self.whole.setdefault(parsed.name, []).append(key)
        if problem:
            self.problems.append(f"{key} {problem}")

    def check_tied_adapters(self) -> None:
        """Raises NotImplementedError if tied layers would have to share one adapter."""
        tied = [one for one in self.selected if f"{one}.weight" in self.ties]
        if tied and self.config.ensure_weight_tying:
            raise NotImplementedError(
                f"ensure_weight_tying is true and target_modules selects {', '.join(sorted(tied))}"
                ", whose weight is tied, so that PEFT ties the adapters too; expected "
                "ensure_weight_tying to be false"
            )

    def untied(self) -> list[str]:
        """Returns the names of the parameters that need an array of their own: PEFT unties every
        module in modules_to_save from others, unless the configuration keeps ties."""
        untied = []
        for names in self.tied:
            saved = [name for name in names if name in self.whole and self.config.saves(name)]
            if not self.config.keeps_ties:
                untied += saved[len(saved) == len(names) :]
        return untied

    def by_array(self, untied: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns the keys of every parameter that is stored whole, by the first name of those that
        stay tied."""
        found: dict[str, tuple[str, ...]] = {}
        for name, keys in self.whole.items():
            tied = (one for one in self.ties.get(name, ()) if one in self.whole)
            owner = next((one for one in tied if one not in untied), name)
            owner = name if name in untied else owner
            found[owner] = (*found.get(owner, ()), *keys)
        return found

    def _place_tokens(self, key: str, module: str, shape: Shape) -> str | None:
        name = f"{module}.weight"
        layer, indices = self.layers.get(module), self.config.token_indices_of(module)
        rows, *width = self.parameters.get(name, (0,))
        if (owner := self.row_owners.get(module, module)) != module:
            return (
                f"holds rows of {name}, which is tied to {owner}.weight; PEFT would change only "
                f"{name}; expected only rows of {owner}.weight, to which PEFT ties the others"
            )
        if layer is None or layer.kind == "conv":
            return f"finds no embedding{self._nearest(module, self.layers)}"
        if indices is None:
            return "holds rows, but trainable_token_indices does not name this module"
        if shape != (len(indices), *width):
            return f"has shape {list(shape)}; expected {[len(indices), *width]}"
        if max(indices) >= rows:
            return f"holds row {max(indices)} of {name}, which has {rows}"
        if module in self.selected or self.config.saves(name):
            return f"holds rows of {name}, which target_modules or modules_to_save names too"
        tied = [one for one in self.ties.get(name, ()) if one != name]
        if layer.kind == "linear" and (tied or f"{module}.bias" in self.parameters):
            return (
                f"holds rows of {name}, which has a bias or is tied (to {tied or 'nothing'}); "
                "expected rows of the embedding"
            )
        self.tokens[name] = (key, indices)
        return None

    def _is_embedding_weight(self, name: str) -> bool:
        layer = self.layers.get(name.removesuffix(".weight"))
        return layer is not None and layer.kind == "embedding"

    def _check_adapted_heads(self) -> None:
        for name, (key, _) in self.tokens.items():
            for tied in self.ties.get(name, ()):
                if tied.removesuffix(".weight") in self.adapters:
                    self.problems.append(
                        f"{key} holds rows of {name}, which is tied to {tied}, whose adapter PEFT "
                        "would then ignore; expected target_modules without it"
                    )

    def _find_missing_tokens(self) -> None:
        indices = self.config.trainable_token_indices
        ends = indices if isinstance(indices, Mapping) else [""] if indices else []
        found = [one for name in self.tokens for one in (name, *self.ties.get(name, ()))]
        for end in ends:
            if not any(name.removesuffix(".weight").endswith(end) for name in found):
                self.problems.append(
                    f"{end or 'an embedding'} has no rows, though trainable_token_indices names it"
                )

    def _place_in_adapter(self, key: str, module: str, role: Role, shape: Shape) -> str | None:
        module = self.names.get(module, module)
        layer = self.layers.get(module)
        if layer is None and module in self.refusals:
            return f"is of a weight that cannot be adapted: {self.refusals[module]}"
        if layer is None:
            self.unknown.setdefault(module, []).append(key)
            return None
        found = self.adapters.setdefault(module, {})
        if role in found:
            return f"and {found[role]} are the same tensor; expected one of them"
        found[role] = key
        rank = self.config.rank_of(module)
        if module not in self.selected:
            self.unselected.add(module)
            return None
        if role not in layer.shapes(rank):
            by_key = self.key_modules[module]
            expected = ", ".join(key_of(by_key, role) for role in layer.shapes(rank))
            return f"is not for {layer.kind} layers; expected {expected}"
        if role == "magnitude" and not self.config.use_dora:
            self.magnitudes.add(key)
            return None
        if key.endswith("dora_scale") and len(shape) > 1 and shape[0] == 1:
            return (
                f"has shape {list(shape)}, which is LyCORIS's shape for a magnitude per input "
                "feature (wd_on_output=False), but DoRA has one per output feature; expected "
                f"{[layer.out_features, *(1,) * (len(shape) - 1)]}: train with wd_on_output=True"
            )
        if layer.kind == "experts" and layer.in_features == layer.out_features:
            if reason := self.config.square_experts_refusal:
                return f"may have its input and output features swapped: {reason}"
        if shape not in (accepted := layer.accepted_shapes(role, rank)):
            sizes = (size // max(1, layer.experts) for size in shape if role != "magnitude")
            ranks = (one for one in sizes if shape in layer.accepted_shapes(role, one))
            if other := next(ranks, 0):
                self.ranks.setdefault((other, rank), set()).add(module)
                return None
            return f"has shape {list(shape)}; expected {list(accepted[0])} for rank {rank}"
        return None

    def _problem_with_parameter(self, key: Key, shape: Shape) -> str | None:
        if key.name not in self.parameters:
            return f"finds no parameter{self._nearest(key.name, self.parameters)}"
        if shape != self.parameters[key.name]:
            return f"has shape {list(shape)}; expected {list(self.parameters[key.name])}"
        tied = self.ties.get(key.name, ()) if self.config.ensure_weight_tying else ()
        is_named = self._is_stored(key.name) or any(map(self._is_stored, tied))
        if not (is_named or self._is_token_embedding(key)):
            return (
                "is a parameter of the base model; expected it to be named by modules_to_save or "
                "bias in adapter_config.json"
            )
        return None

    def _is_stored(self, name: str) -> bool:
        return self.config.stores(name, of_adapted_layer=name.rpartition(".")[0] in self.selected)

    def _is_token_embedding(self, key: Key) -> bool:
        is_embedding = self._is_embedding_weight(f"{key.module}.weight")
        # PEFT stores the weights of embedding and head if the vocabulary was resized.
        has_known_name = key.module.rpartition(".")[2] in TOKEN_EMBEDDINGS
        return key.parameter == "weight" and (is_embedding or has_known_name)

    def _nearest(self, name: str, existing: Iterable[str]) -> str:
        """Returns the end of an error message with the nearest names, which takes time to find, if
        listed."""
        return nearest(name, existing) if len(self.problems) < MAX_LISTED else ""

    def find_missing_parameters(self) -> None:
        """Records the names in target_parameters that match no packed experts, as the first
        problems, since they explain others."""
        experts = [name for name, layer in self.layers.items() if layer.kind == "experts"]
        for target in self.config.target_parameters or ():
            if not any(matches((target,), name) for name in experts):
                self.problems.insert(
                    0,
                    f"{target}, which target_parameters names, is no parameter with packed experts "
                    f"that can be adapted; the model has {checks.short(experts)}",
                )

    def find_unknown(self) -> bool:
        """Records the layers with tensors that the model does not have, and returns whether all of
        them are there under a longer or a shorter name."""
        if not self.unknown:
            return False
        first = min(self.unknown)
        for layer in self.layers:
            start = layer.removesuffix(f".{first}") + "."
            if layer != start[:-1] and all(start + name in self.layers for name in self.unknown):
                self.problems.insert(
                    0,
                    f"the adapter is of the part {start[:-1]!r} of this model, where {first} is "
                    f"{layer}; load it into that part",
                )
                return True
        parts = first.split(".")
        for length in range(1, len(parts)):
            start = ".".join(parts[:length]) + "."
            if all(name.removeprefix(start) in self.layers for name in self.unknown):
                self.problems.insert(
                    0,
                    f"the adapter is of a model that has this one as its part {start[:-1]!r}, so "
                    f"that {first} is {first.removeprefix(start)} here; load it into that model",
                )
                return True
        for module, keys in self.unknown.items():
            for key in keys:
                near = self._nearest(module, self.layers)
                self.problems.append(f"{key} finds no layer that can be adapted{near}")
        return False

    def find_unselected(self) -> None:
        """Records the layers with tensors that the configuration does not select, as the first
        problem, since it explains others."""
        if self.unselected:
            names = _some(self.unselected, "has tensors", "have tensors")
            problem = f"{names}, but adapter_config.json does not select "
            problem += "it" if len(self.unselected) == 1 else "them"
            self.problems.insert(0, f"{problem}; {self._why_unselected()}")

    def _why_unselected(self) -> str:
        targets = self.config.target_modules
        if isinstance(targets, str) and not self.config.targets_all_linear:
            longer = with_any_beginning(targets, r"\.")
            if all(matches(longer, name) for name in self.unselected):
                return (
                    f"target_modules is the regular expression {targets!r}, which PEFT compares "
                    f"with whole names; expected {longer!r}, or a list of ends of names"
                )
        elif targets and not isinstance(targets, str):
            unknown = (t for t in targets if not any(matches((t,), name) for name in self.layers))
            if unknown := [
                f"{t!r}, which names no layer{nearest(t, self.layers)}" for t in unknown
            ]:
                return f"target_modules has {'; and '.join(unknown[:_MAX_NAMES])}"
        of_layers = ("target_modules", "target_parameters", "exclude_modules")
        names = (*of_layers, "layers_to_transform", "modules_to_save")
        fields = {name: getattr(self.config, name) for name in names}
        return ", ".join(f"{field} is {checks.short(one)}" for field, one in fields.items() if one)

    def find_contradictions(self) -> None:
        """Records where the tensors are not those of the configuration's rank and use_dora."""
        for (rank, expected), layers in sorted(self.ranks.items()):
            names = _some(layers, "has a tensor", "have tensors")
            self.problems.append(
                f"{names} of rank {rank}; expected rank {expected}, by r and rank_pattern of "
                "adapter_config.json: correct these"
            )
        if self.magnitudes:
            names = _some(self.magnitudes, "is a magnitude", "are magnitudes")
            self.problems.append(
                f"{names}; expected none, since use_dora is false: if the adapter is DoRA, set "
                "use_dora to true in adapter_config.json"
            )

    def find_missing(self) -> None:
        """Records everything else that the configuration selects and the folder lacks."""
        if not (self.selected or self.unselected):
            self.problems.append(
                "adapter_config.json selects none of the model's layers; expected target_modules "
                f"{checks.short(self.config.target_modules)} to name some of "
                f"{checks.short(sorted(self.layers))}"
            )
        empty, missing = [], dict[Role, list[str]]()
        for name in sorted(self.selected):
            found = self.adapters.get(name)
            if found is None:
                # "all-linear" excludes the output head in PEFT only if PEFT can identify it.
                is_head = name.rpartition(".")[2] in OUTPUT_HEADS
                if not (is_head and self.config.targets_all_linear):
                    empty.append(name)
                continue
            for role in self.layers[name].shapes(self.config.rank_of(name)):
                if role not in found and (role != "magnitude" or self.config.use_dora):
                    missing.setdefault(role, []).append(key_of(self.key_modules[name], role))
        if empty:
            names = _some(empty, "has no tensors", "have no tensors")
            self.problems.append(f"{names}, though adapter_config.json selects them")
        for role, keys in missing.items():
            remedy = _NO_MAGNITUDES if role == "magnitude" else _INCOMPLETE
            self.problems.append(_some(keys, "is missing", "are missing") + remedy)
        stored = set(self.whole)
        if self.config.keeps_ties:
            stored |= {tied for name in self.whole for tied in self.ties.get(name, ())}
        for name in sorted(set(self.parameters) - stored):
            if self._is_stored(name):
                self.problems.append(f"{name} is missing, though adapter_config.json selects it")
        self._find_missing_tokens()
        self._check_adapted_heads()


def _some(names: Collection[str], one: str, several: str) -> str:
    """Returns the first of some names and the number of the others, and what is said of them."""
    first, others = sorted(names)[:_MAX_NAMES], len(names) - _MAX_NAMES
    subject = ", ".join(first) + (f" and {others} more" if others > 0 else "")
    return f"{subject} {one if len(names) == 1 else several}"
