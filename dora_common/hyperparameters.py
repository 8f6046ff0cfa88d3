"""Rank, alpha and dropout of an adapter: their meaning and their valid ranges."""

import math
import numbers
from typing import Any, Literal, get_args

DropoutMode = Literal["adapter", "input"]
"""The input that dropout is applied to: only that of lora_a, or that of the whole correction."""

ADAPTER_NAMES = ("lora_a", "lora_b", "magnitude")
"""The names of an adapter's parameters, the same in every adapted layer."""

# Bounds of normal float32 numbers: scales are applied in float32.
LEAST, LARGEST = 2.0**-126, 2.0**127
LARGEST_SCALE = 2.0**60  # its square still fits into float32


def adapter_scale(rank: Any, alpha: Any, use_rslora: bool = False) -> float:
    """Returns s = alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732). Raises
    TypeError or ValueError if one of them is out of range, or float32 cannot hold the square of s.
    """
    check_rank(rank)
    check_alpha(alpha)
    if use_rslora not in (True, False):
        raise TypeError(f"use_rslora is {use_rslora!r}; expected True or False")
    scale = float(alpha) / (math.sqrt(rank) if use_rslora else int(rank))
    if scale and not LEAST <= abs(scale) <= LARGEST_SCALE:
        raise ValueError(
            f"alpha is {alpha}, a scale of {scale:.2g} at rank {rank}; expected a scale of 0, or "
            f"with an absolute value from {LEAST:.1e} to {LARGEST_SCALE:.1e}, so that its square "
            "fits into float32: alpha is often rank or 2 * rank"
        )
    return scale


def is_integer(value: Any) -> bool:
    """Returns whether a value is a Python or NumPy integer, not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_rank(rank: Any) -> None:
    """Raises TypeError or ValueError unless ``rank`` is an integer of at least 1."""
    if not is_integer(rank):
        raise TypeError(
            f"rank is {rank!r}, a {type(rank).__name__}; expected an integer of at least 1: "
            "pass a Python int"
        )
    if rank < 1:
        raise ValueError(
            f"rank is {rank}; expected at least 1: to leave a layer without an adapter, do not "
            "match it with a rule"
        )


def check_alpha(alpha: Any) -> None:
    """Raises TypeError or ValueError unless ``alpha`` is a finite real number."""
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
        raise TypeError(
            f"alpha is {alpha!r}, a {type(alpha).__name__}; expected a real number: pass a Python "
            "int or float"
        )
    if not math.isfinite(alpha):
        raise ValueError(f"alpha is {alpha}; expected a finite number, often rank or 2 * rank")


def check_dropout(dropout: Any, mode: Any) -> None:
    """Raises TypeError or ValueError unless ``dropout`` is a probability below 1 and ``mode`` a
    :data:`DropoutMode`."""
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
        raise TypeError(
            f"dropout is {dropout!r}, a {type(dropout).__name__}; expected a probability in [0, 1)"
        )
    if not 0 <= float(dropout) < 1:
        raise ValueError(
            f"dropout is {dropout}; expected a probability in [0, 1): 0.05 drops one input in "
            "twenty, and 0 drops none"
        )
    if mode not in get_args(DropoutMode):
        raise ValueError(
            f"dropout_mode is {mode!r}; expected 'adapter' (drops inputs of lora_a only, as LoRA "
            "does) or 'input' (drops inputs of the whole correction, as PEFT's DoRA does)"
        )
