"""Rank, alpha and dropout of an adapter: what they mean and which values they may have."""

import math
import numbers
from typing import Any, Literal, get_args

DropoutMode = Literal["adapter", "input"]
"""What dropout acts on: what lora_a reads, or what the whole correction reads."""

ADAPTER_NAMES = ("lora_a", "lora_b", "magnitude")
"""The parameters of an adapter, in every layer that has one."""

LEAST, LARGEST = 2.0**-126, 2.0**127  # of float32, in which a scale is applied
LARGEST_SCALE = 2.0**60  # float32 holds its square


def adapter_scale(rank: Any, alpha: Any, use_rslora: bool = False) -> float:
    """Returns s = alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732).

    Raises:
        TypeError: rank is no integer, alpha no real number, or use_rslora no bool.
        ValueError: rank is below 1, alpha is not finite, or s is no number that float32 can square.
    """
    check_rank(rank)
    check_alpha(alpha)
    if use_rslora not in (True, False):
        raise TypeError(f"use_rslora is {use_rslora!r}; expected True or False")
    scale = float(alpha) / (math.sqrt(rank) if use_rslora else int(rank))
    if scale and not LEAST <= abs(scale) <= LARGEST_SCALE:
        raise ValueError(
            f"alpha is {alpha}, a scale of {scale:.2g} at rank {rank}; expected an alpha, often "
            f"rank or 2 * rank, whose scale is 0 or from {LEAST:.1e} to {LARGEST_SCALE:.1e} in "
            "size: float32 squares it"
        )
    return scale


def check_rank(rank: Any) -> None:
    """Raises TypeError or ValueError unless ``rank`` is an integer of at least 1."""
    if isinstance(rank, bool) or not isinstance(rank, numbers.Integral):
        raise TypeError(
            f"rank is {rank!r}, a {type(rank).__name__}; expected an integer of at least 1: "
            "pass a Python int"
        )
    if rank < 1:
        raise ValueError(
            f"rank is {rank}; expected at least 1: leave a layer unadapted instead of giving it "
            "rank 0"
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
            "twenty, 0 none"
        )
    if mode not in get_args(DropoutMode):
        raise ValueError(
            f"dropout_mode is {mode!r}; expected 'adapter' (drop what the adapter reads, as LoRA "
            "does) or 'input' (drop what the whole correction reads, as PEFT's DoRA does)"
        )
