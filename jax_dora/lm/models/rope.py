"""Rotary position embedding (arXiv 2104.09864), in the half-split layout of Llama."""

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base, and how its frequencies are scaled.

    Kind "linear" divides every frequency by `factor`. Kind "llama3" (Llama 3.1) divides the
    frequencies whose wavelength exceeds original_length / low_freq_factor, keeps the frequencies
    whose wavelength is below original_length / high_freq_factor, and interpolates in between. Kind
    "yarn" (arXiv 2309.00071) divides the frequencies with fewer than beta_slow turns within
    original_length, keeps those with more than beta_fast, and multiplies cosine and sine by
    attention_factor. Kind "dynamic" raises theta for texts longer than original_length.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic"] = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: float = 8192

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        # transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`.
        # If both are given, transformers uses the older fields. It ignores fields that are null.
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        parameters = {name: value for name, value in scaling.items() if value is not None}
        theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or cls.theta
        kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
        parameters.pop("type", None)
        if parameters.get("partial_rotary_factor") == 1:
            del parameters["partial_rotary_factor"]
        if kind not in ROPE_KINDS:
            raise NotImplementedError(
                f"config.json has rope_type {kind!r}; expected one of {', '.join(ROPE_KINDS)}"
            )
        names = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
        truncate = True
        if kind == "yarn":
            names |= {name: name for name in ("attention_factor", "beta_fast", "beta_slow")}
            truncate = parameters.pop("truncate", truncate)
        names["original_max_position_embeddings"] = "original_length"
        unknown = sorted(set(parameters) - set(names))
        if unknown:
            raise NotImplementedError(
                f"config.json has rope parameters {', '.join(unknown)}; expected only "
                f"{', '.join(names)}"
            )
        if kind == "default":
            parameters = {}
        elif "factor" not in parameters:
            raise ValueError(
                f"config.json has rope_type {kind!r} without a factor; expected the factor that "
                "wavelengths are multiplied by"
            )
        if kind == "llama3":
            name = "original_max_position_embeddings"
            # As in transformers, a top-level length overrides the one in the rope parameters.
            length = config.get(name) or parameters.get(name)
            parameters[name] = length or config.get("max_position_embeddings")
        if kind in ("yarn", "dynamic"):
            name, length = "original_max_position_embeddings", config.get("max_position_embeddings")
            # As in transformers, dynamic scaling knows only the model's own length.
            parameters[name] = parameters.get(name, length) if kind == "yarn" else length
        fields: dict[str, Any] = {
            names[name]: positive(name, value) for name, value in parameters.items()
        }
        if kind == "yarn":
            scale = 0.1 * math.log(max(fields["factor"], 1)) + 1
            fields = {"attention_factor": scale, "truncate": bool(truncate)} | fields
        return cls(theta=positive("rope_theta", theta), kind=kind, **fields)


def positive(name: str, value: Any, *, or_zero: bool = False) -> float:
    """Returns a number of config.json, or raises TypeError unless it is positive or may be 0."""
    is_number = type(value) in (int, float)
    if not is_number or not (0 < value <= sys.float_info.max or (or_zero and value == 0)):
        expected = "a positive number or 0" if or_zero else "a positive number"
        raise TypeError(f"{name} is {value!r}; expected {expected}")
    return float(value)


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns the frequencies theta^(-2i/head_dim), scaled as `rope` says: f32[head_dim / 2].

    Those of kind "dynamic" are for texts within its original_length.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    unscaled = np.float32(1) / np.float32(rope.theta) ** exponent
    if rope.kind in ("default", "dynamic"):
        return unscaled
    if rope.kind == "linear":
        return unscaled / np.float32(rope.factor)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, unscaled)
    turns = rope.original_length * unscaled / np.float32(2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1) if low < high else turns >= low
    return (unscaled * (kept + (1 - kept) / rope.factor)).astype(np.float32)


def _yarn(rope: Rope, head_dim: int, unscaled: np.ndarray) -> np.ndarray:
    """Returns YaRN's frequencies: a ramp over their indices from kept to divided ones."""

    def index(turns: float) -> float:
        """Returns the index of the frequency with that many turns within original_length."""
        length = rope.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / (high - low or 0.001)
    divided = np.clip(ramp, 0, 1)
    return (unscaled * (1 - divided + divided / rope.factor)).astype(np.float32)


def angles(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and the sine of position x frequency.

    Both are f32[batch, time, 1, head_dim / 2]; `positions` are i32[batch, time]. For kind
    "dynamic", the length of a text is the largest of its row's positions plus 1.
    """
    freqs = jnp.asarray(frequencies(rope, head_dim))[None, None, None, :]
    if rope.kind == "dynamic":
        length = jnp.max(positions, axis=1)[:, None, None, None].astype(jnp.float32) + 1
        excess = rope.factor * jnp.maximum(length / rope.original_length - 1, 0)
        # theta becomes theta * (1 + excess)^(head_dim / (head_dim - 2)).
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim - 2)
        freqs = freqs * (1 + excess) ** -exponent[None, None, None, :]
    angle = positions[:, :, None, None].astype(jnp.float32) * freqs
    return rope.attention_factor * jnp.cos(angle), rope.attention_factor * jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates each pair (x_i, x_{i + head_dim/2}) of x [batch, time, heads, head_dim]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x.dtype)
