"""Matrix products accurate to float32 for operands of any dtype, on tensor cores if available.

A product of two bfloat16 numbers (8 significant bits each) is exact in float32. So tensor cores
that accumulate in float32 lose nothing on bfloat16 operands; the same holds for float16. A float32
number is the exact sum of three bfloat16 pieces (24 = 3 * 8 bits), a float16 number of two. Wider
operands are therefore multiplied piece by piece. Two float32 numbers have nine such products; the
three smallest, together below 3 * 2**-24 of |a||b|, are left out. TensorFloat-32 keeps 11 bits and
is never used, even if the process allows it elsewhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def pieces(x: Tensor) -> int:
    """Returns the number of bfloat16 pieces of an element of ``x``; 1 for float64."""
    return _PIECES.get(x.dtype, 1)


def split(x: Tensor) -> list[Tensor]:
    """Returns bfloat16 tensors, largest first, whose sum is ``x``."""
    parts = [x.to(torch.bfloat16)]
    rest = x
    while len(parts) < pieces(x):
        rest = rest.float() - parts[-1].float()
        parts.append(rest.to(torch.bfloat16))
    return parts


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``a @ b`` for a [m, k] and b [k, n] of any float dtypes, accumulated and returned in
    ``dtype``: float64, or float32 if neither operand is float64."""
    if dtype == torch.float64 or a.device.type != "cuda":
        return a.to(dtype) @ b.to(dtype)
    if a.dtype == b.dtype and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return split_product(a, b, lambda x, y: torch.mm(x, y, out_dtype=torch.float32))


def rows_of(x: Tensor) -> Tensor:
    """Returns x [..., features] as [rows, features]."""
    # reshape(-1, ...) cannot infer the number of rows if a shard has no features.
    return x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 1 else x[None]


def rounded_once(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a @ b in ``dtype``; an fp32 result of fp16 or bf16 operands is not rounded in
    between."""
    if dtype == a.dtype:
        return torch.mm(a, b)
    if a.device.type == "cuda" and dtype == torch.float32 and a.dtype.itemsize == 2:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def split_product(a: Tensor, b: Tensor, mm: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Computes :func:`product` from bfloat16 pieces; ``mm`` multiplies two bfloat16 matrices into
    float32."""
    n = b.shape[1]
    b_parts = torch.cat(split(b), dim=1)
    terms = []
    for i, part in enumerate(split(a)):
        kept = min(pieces(b), 3 - i)
        terms.extend(mm(part, b_parts[:, : kept * n]).split(n, dim=1))
    # terms[0] is the largest product: it is added last, after the corrections.
    total = terms.pop()
    while terms:
        total = total + terms.pop()
    return total
