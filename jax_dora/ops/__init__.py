"""DoRA as functions of arrays: the factored norm, compose, adapted projections and SwiGLU;
attention to an FP8 cache; and disentangled attention and layer norm of encoders."""

from jax_dora.ops.compose import compose as compose
from jax_dora.ops.compose import compose_delta as compose_delta
from jax_dora.ops.decode_attention import CodedEntries as CodedEntries
from jax_dora.ops.decode_attention import decode_attention as decode_attention
from jax_dora.ops.disentangled_attention import disentangled_attention as disentangled_attention
from jax_dora.ops.dropout import Dropout as Dropout
from jax_dora.ops.dropout import draw_seed as draw_seed
from jax_dora.ops.dropout import drop as drop
from jax_dora.ops.linear import dora_linear as dora_linear
from jax_dora.ops.linear import lora_linear as lora_linear
from jax_dora.ops.norm import factored_norm as factored_norm
from jax_dora.ops.norm import magnitude_scale as magnitude_scale
from jax_dora.ops.projection import RESULT_NAME as RESULT_NAME
from jax_dora.ops.projection import Z_NAME as Z_NAME
from jax_dora.ops.quantised import is_quantised as is_quantised
from jax_dora.ops.residual_layer_norm import residual_layer_norm as residual_layer_norm
from jax_dora.ops.saved_inner import AUTOMATIC_POLICIES as AUTOMATIC_POLICIES
from jax_dora.ops.swiglu import swiglu as swiglu
