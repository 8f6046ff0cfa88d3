"""DoRA, weight-decomposed low-rank adaptation, for Flax."""

import importlib as _importlib

from dora_common.version import __version__ as __version__
from jax_dora import linen as linen
from jax_dora import ops as ops
from jax_dora import peft as peft
from jax_dora.adapt import Adapter as Adapter
from jax_dora.adapt import DoRARule as DoRARule
from jax_dora.adapt import apply_dora as apply_dora
from jax_dora.adapt import coverage as coverage
from jax_dora.adapt import get_adapter as get_adapter
from jax_dora.adapt import merge_dora as merge_dora
from jax_dora.adapt import quantize as quantize
from jax_dora.adapt import remove_dora as remove_dora
from jax_dora.adapt import set_adapter as set_adapter
from jax_dora.adapt import to_lora as to_lora
from jax_dora.bank import AdapterBank as AdapterBank
from jax_dora.bank import with_bank as with_bank
from jax_dora.layers import DoRAConv as DoRAConv
from jax_dora.layers import DoRAConvTranspose as DoRAConvTranspose
from jax_dora.layers import DoRAEinsum as DoRAEinsum
from jax_dora.layers import DoRAEmbed as DoRAEmbed
from jax_dora.layers import DoRALayer as DoRALayer
from jax_dora.layers import DoRALinear as DoRALinear
from jax_dora.layers import DoRALinearGeneral as DoRALinearGeneral
from jax_dora.layers import DoRAParam as DoRAParam
from jax_dora.layers import apply_layers as apply_layers
from jax_dora.layers import layer_inputs as layer_inputs
from jax_dora.layers import swiglu as swiglu
from jax_dora.norms import freeze as freeze
from jax_dora.norms import norms as norms
from jax_dora.norms import remat_policy as remat_policy
from jax_dora.norms import reset_magnitudes as reset_magnitudes
from jax_dora.norms import with_norms as with_norms
from jax_dora.tracing.registry import einsum_axes as einsum_axes
from jax_dora.tracing.registry import register as register


def __getattr__(name: str) -> object:
    # It imports qwix, which is optional.
    if name == "provider":
        return _importlib.import_module("jax_dora.provider")
    raise AttributeError(f"module 'jax_dora' has no attribute {name!r}")
