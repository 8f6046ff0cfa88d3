"""The keys of adapter_model.safetensors: "base_model.model." + the module's name + a suffix.

    linear, conv    .lora_A.weight      .lora_B.weight      .lora_magnitude_vector
    embedding       .lora_embedding_A   .lora_embedding_B   .lora_magnitude_vector
    single tokens   .token_adapter.trainable_tokens_delta

The file can also contain whole parameters: biases, modules_to_save, and the weight of an adapted
embedding.
"""

import re
from dataclasses import dataclass
from typing import Literal

PREFIX = "base_model.model."

Role = Literal["lora_a", "lora_b", "magnitude", "embedding_a", "embedding_b", "tokens"]

# By role: the suffix that PEFT writes, then a pattern that also matches other versions and tools.
# They include the adapter's name, NVlabs' `weight_m_wdecomp` or the diffusion tools' `dora_scale`.
_SUFFIXES: dict[Role, tuple[str, str]] = {
    "lora_a": ("lora_A.weight", r"lora_A(\.{name})?\.weight"),
    "lora_b": ("lora_B.weight", r"lora_B(\.{name})?\.weight"),
    "embedding_a": ("lora_embedding_A", r"lora_embedding_A(\.{name})?"),
    "embedding_b": ("lora_embedding_B", r"lora_embedding_B(\.{name})?"),
    "magnitude": (
        "lora_magnitude_vector",
        r"lora_magnitude_vector(\.{name})?(\.weight)?|weight_m_wdecomp\.weight|dora_scale",
    ),
    "tokens": (
        "token_adapter.trainable_tokens_delta",
        r"token_adapter\.trainable_tokens_delta(\.{name})?",
    ),
}
_NAMED = re.compile(
    r"\.(?:lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|trainable_tokens_delta)"
    r"\.(?!weight$)(?P<name>[^.]+)(?:$|\.)"
)


@dataclass(frozen=True)
class Key:
    """A parsed key.

    Attributes:
      module: the module's name; "" is the model itself.
      role: the role of the tensor in an adapter; None for a parameter of the base model.
      parameter: the parameter's name in its module if `role` is None.
      is_original: whether the tensor is the base model's value of a module in modules_to_save.
    """

    module: str
    role: Role | None = None
    parameter: str = ""
    is_original: bool = False

    @property
    def name(self) -> str:
        """The parameter's full name, as in a `state_dict` of the base model."""
        return f"{self.module}.{self.parameter}" if self.module else self.parameter


def key_of(module: str, role: Role) -> str:
    """Returns the key that PEFT writes for a tensor of an adapter."""
    return f"{PREFIX}{module}.{_SUFFIXES[role][0]}"


def parameter_key(name: str, *, of_adapted_layer: bool) -> str:
    """Returns PEFT's key of a parameter of the base model, which an adapted layer has in
    `base_layer`."""
    module, _, parameter = name.rpartition(".")
    return f"{PREFIX}{module}.base_layer.{parameter}" if of_adapted_layer else PREFIX + name


def adapter_in(key: str) -> str | None:
    """Returns the adapter's name if the key includes one."""
    found = _NAMED.search(key)
    return found["name"] if found else None


def parse(key: str, adapter: str = "default") -> Key:
    """Parses a key of any of the known tools, which may include the adapter's name or "default". A
    key that is no tensor of an adapter is a parameter's, even if no model has it."""
    key = key.removeprefix(PREFIX)
    name = f"(?:default|{re.escape(adapter)})"
    for role, (_, suffix) in _SUFFIXES.items():
        pattern = suffix.replace("{name}", name)
        if found := re.fullmatch(rf"(?P<module>.+)\.(?:{pattern})", key):
            return Key(found["module"], role)
    plain = re.sub(rf"(^|\.)modules_to_save(\.{name})?\.", r"\1", key)
    is_original = re.search(r"(^|\.)original_module\.", plain) is not None
    plain = re.sub(r"(^|\.)(base_layer|original_module)\.", r"\1", plain)
    module, _, parameter = plain.rpartition(".")
    return Key(module, None, parameter, is_original)
