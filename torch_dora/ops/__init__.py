"""DoRA as functions of tensors: weight [out, in], lora_a [r, in], lora_b [out, r]."""

from torch_dora.ops.compose import compose as compose
from torch_dora.ops.compose import compose_delta as compose_delta
from torch_dora.ops.linear import dora_linear as dora_linear
from torch_dora.ops.norm import factored_norm as factored_norm
from torch_dora.ops.norm import magnitude_scale as magnitude_scale
