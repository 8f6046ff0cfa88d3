"""What an adapter is given besides tensors: rank, alpha, dropout. Checked here for every layer."""

import math
import numbers
from typing import Any, Literal, get_args

from torch_dora.ops import check

DropoutMode = Literal["adapter", "input"]


def as_python(number: Any) -> Any:
    """The int or float that ``number`` is, whichever library it comes from."""
    return int(number) if isinstance(number, numbers.Integral) else float(number)


def adapter_scale(rank: int, alpha: float, use_rslora: bool) -> float:
    """s = alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def check_hyperparameters(
    rank: object, alpha: object, dropout: object, dropout_mode: object, adapter_dtype: object
) -> None:
    """Raise TypeError or ValueError unless all of a layer's settings are in their ranges."""
    if isinstance(rank, bool) or not isinstance(rank, numbers.Integral):
        raise TypeError(f"rank is {rank!r}; expected an int of at least 1")
    if rank < 1:
        raise ValueError(f"rank is {rank}; expected at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
        raise TypeError(f"alpha is {alpha!r}; expected a number")
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
        raise TypeError(f"dropout is {dropout!r}; expected a number")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha is {alpha}; expected a finite number")
    if not 0 <= float(dropout) < 1:
        raise ValueError(f"dropout is {dropout}; expected a probability p with 0 <= p < 1")
    if dropout_mode not in get_args(DropoutMode):
        raise ValueError(
            f"dropout_mode is {dropout_mode!r}; expected 'adapter', which drops the x that lora_a "
            "reads, or 'input', which drops it in the magnitude's correction too"
        )
    if adapter_dtype not in check.FLOATS:
        raise TypeError(
            f"adapter_dtype is {adapter_dtype!r}; expected torch.float16, bfloat16, float32 or "
            "float64"
        )
