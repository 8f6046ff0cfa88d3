"""Loads Hugging Face PEFT adapter folders into nnx models, and saves nnx models as such folders.

model = jax_dora.peft.load_adapter(model, "folder")
jax_dora.peft.save_adapter(model, "another")
"""

from dora_common.peft.config import AdapterConfig as AdapterConfig
from jax_dora.adapt.tied_heads import UntiedEmbed as UntiedEmbed
from jax_dora.peft.load import adapter_rules as adapter_rules
from jax_dora.peft.load import load_adapter as load_adapter
from jax_dora.peft.names import Names as Names
from jax_dora.peft.save import save_adapter as save_adapter
