"""The few calls for which a checkout from before norms were values has other names.

`python -m benchmarks model --against DIR` may import such a checkout; nothing else needs this.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx

import jax_dora

NORMS_ARE_VALUES = hasattr(jax_dora, "with_norms")
INNER = "dora_inner"


def keep_norms(model: Any) -> Any:
    """Returns the norms of `model` as values; in an older checkout None, and it keeps them."""
    if NORMS_ARE_VALUES:
        return nnx.jit(jax_dora.norms)(model)
    nnx.jit(jax_dora.keep_norms)(model)
    return None


def retake_norms(model: Any) -> Any:
    """Returns the norms anew, once for several micro-steps."""
    if NORMS_ARE_VALUES:
        return jax_dora.norms(model)
    jax_dora.refresh_norms(model)
    return None


def with_norms(model: Any, values: Any) -> Any:
    """Returns `model` with the norms that `keep_norms` returned."""
    return model if values is None else jax_dora.with_norms(model, values)


def prepared_for_scan(layers: Any) -> Any:
    """Returns what an older checkout asks to be scanned over."""
    return layers if NORMS_ARE_VALUES else jax_dora.checked_norms(layers)


def remat_policy() -> Any:
    return jax_dora.remat_policy() if NORMS_ARE_VALUES else jax_dora.remat_policy(INNER)


def keep_inner() -> dict[str, Any]:
    """Returns the attribute of a rule whose layers keep inner."""
    fields = {field.name for field in dataclasses.fields(jax_dora.DoRARule)}
    return {"keep_inner": True} if "keep_inner" in fields else {"inner_name": INNER}
