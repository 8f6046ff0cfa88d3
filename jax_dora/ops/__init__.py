"""DoRA as functions of arrays: the factored norm, compose, adapted projections and SwiGLU."""

from typing import TYPE_CHECKING

from dora_common.renamed import no_attribute as _no_attribute
from jax_dora.ops.compose import compose as compose
from jax_dora.ops.compose import compose_delta as compose_delta
from jax_dora.ops.dropout import Dropout as Dropout
from jax_dora.ops.dropout import draw_seed as draw_seed
from jax_dora.ops.linear import dora_linear as dora_linear
from jax_dora.ops.linear import lora_linear as lora_linear
from jax_dora.ops.norm import factored_norm as factored_norm
from jax_dora.ops.norm import magnitude_scale as magnitude_scale
from jax_dora.ops.swiglu import swiglu as swiglu

if not TYPE_CHECKING:  # a type checker would accept any name of a module with __getattr__

    def __getattr__(name: str) -> None:
        raise _no_attribute(__name__, name)
