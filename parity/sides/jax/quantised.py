"""torchao's quantised weights as `qwix.QArray`s of the same codes and scales."""

from __future__ import annotations

import jax.numpy as jnp
import qwix

from parity.quantised import Parts


def kernel_of(parts: Parts) -> qwix.QArray:
    """Returns the kernel [in, out] of a weight's parts."""
    dtype = jnp.dtype({"nf4": "uint4"}.get(parts.qtype, parts.qtype))
    codes = parts.codes if parts.qtype != "float8_e4m3fn" else parts.codes.view(dtype)
    qtype = "nf4" if parts.qtype == "nf4" else dtype
    return qwix.QArray(jnp.asarray(codes.T).astype(dtype), jnp.asarray(parts.scale.T), None, qtype)
