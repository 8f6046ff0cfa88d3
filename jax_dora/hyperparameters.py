"""What an adapter is given besides arrays: rank, alpha, dropout. Checked here, for every module."""

import math
import numbers
from typing import Any, get_args

from jax_dora.ops.dropout import Mode as DropoutMode

# An adapter's parameters, in every layer that has one.
ADAPTER_NAMES = ("lora_a", "lora_b", "magnitude")


def adapter_scale(rank: Any, alpha: Any, use_rslora: bool = False) -> float:
    """s = alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732).

    Raises:
      TypeError: rank is no integer, or alpha no real number.
      ValueError: rank is below 1, or alpha is not finite.
    """
    check_rank(rank)
    check_alpha(alpha)
    return float(alpha) / (math.sqrt(rank) if use_rslora else rank)


def check_rank(rank: Any) -> None:
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
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
        raise TypeError(
            f"alpha is {alpha!r}, a {type(alpha).__name__}; expected a real number: pass a Python "
            "int or float"
        )
    if not math.isfinite(alpha):
        raise ValueError(f"alpha is {alpha}; expected a finite number, often rank or 2 * rank")


def check_dropout(dropout: Any, mode: Any) -> None:
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
