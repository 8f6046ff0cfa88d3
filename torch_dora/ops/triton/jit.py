"""``triton.jit``, typed as what it makes: something to index with a grid, then call."""

from collections.abc import Callable
from typing import Any

import triton

jit: Callable[[Callable[..., None]], Any] = triton.jit
