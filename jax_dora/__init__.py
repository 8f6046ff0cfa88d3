"""DoRA, weight-decomposed low-rank adaptation, for Flax.

Names are imported when they are first asked for: `import jax_dora` alone loads neither JAX nor
Flax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_dora import linen as linen
    from jax_dora import ops as ops
    from jax_dora import peft as peft
    from jax_dora.adapt import Adapter as Adapter
    from jax_dora.adapt import AdapterSet as AdapterSet
    from jax_dora.adapt import DoRARule as DoRARule
    from jax_dora.adapt import apply_dora as apply_dora
    from jax_dora.adapt import get_adapter as get_adapter
    from jax_dora.adapt import merge_dora as merge_dora
    from jax_dora.adapt import remove_dora as remove_dora
    from jax_dora.adapt import set_adapter as set_adapter
    from jax_dora.gated import swiglu as swiglu
    from jax_dora.layers import DoRAConv as DoRAConv
    from jax_dora.layers import DoRAEinsum as DoRAEinsum
    from jax_dora.layers import DoRAEmbed as DoRAEmbed
    from jax_dora.layers import DoRALinearGeneral as DoRALinearGeneral
    from jax_dora.nnx import DoRALinear as DoRALinear
    from jax_dora.nnx import DoRAParam as DoRAParam
    from jax_dora.remat import remat_policy as remat_policy
    from jax_dora.reuse import DoRANorm as DoRANorm
    from jax_dora.reuse import FrozenAdapter as FrozenAdapter
    from jax_dora.reuse import checked_norms as checked_norms
    from jax_dora.reuse import drop_norms as drop_norms
    from jax_dora.reuse import freeze as freeze
    from jax_dora.reuse import keep_norms as keep_norms
    from jax_dora.reuse import refresh_norms as refresh_norms

_HOME = {
    "AdapterSet": "jax_dora.adapt",
    "Adapter": "jax_dora.adapt",
    "set_adapter": "jax_dora.adapt",
    "get_adapter": "jax_dora.adapt",
    "remove_dora": "jax_dora.adapt",
    "merge_dora": "jax_dora.adapt",
    "DoRALinearGeneral": "jax_dora.layers",
    "DoRAEinsum": "jax_dora.layers",
    "DoRAEmbed": "jax_dora.layers",
    "DoRAConv": "jax_dora.layers",
    "DoRALinear": "jax_dora.nnx",
    "DoRAParam": "jax_dora.nnx",
    "DoRANorm": "jax_dora.reuse",
    "FrozenAdapter": "jax_dora.reuse",
    "DoRARule": "jax_dora.adapt",
    "apply_dora": "jax_dora.adapt",
    "checked_norms": "jax_dora.reuse",
    "drop_norms": "jax_dora.reuse",
    "freeze": "jax_dora.reuse",
    "keep_norms": "jax_dora.reuse",
    "refresh_norms": "jax_dora.reuse",
    "swiglu": "jax_dora.gated",
    "remat_policy": "jax_dora.remat",
}
_SUBMODULES = ("linen", "ops", "peft")

__all__ = [
    "Adapter",
    "AdapterSet",
    "DoRAConv",
    "DoRAEinsum",
    "DoRAEmbed",
    "DoRALinear",
    "DoRALinearGeneral",
    "DoRANorm",
    "DoRAParam",
    "DoRARule",
    "FrozenAdapter",
    "apply_dora",
    "checked_norms",
    "drop_norms",
    "freeze",
    "get_adapter",
    "keep_norms",
    "linen",
    "merge_dora",
    "ops",
    "peft",
    "refresh_norms",
    "remat_policy",
    "remove_dora",
    "set_adapter",
    "swiglu",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"jax_dora.{name}")
    raise AttributeError(f"module 'jax_dora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
