"""A decoder of the Llama and Qwen families in Flax NNX, and its Hugging Face folders."""

from .config import QWEN3_8B as QWEN3_8B
from .config import DecoderConfig as DecoderConfig
from .config import Rope as Rope
from .folder import load_model as load_model
from .folder import read_config as read_config
from .folder import save_model as save_model
from .lora import LoRALinear as LoRALinear
from .loss import last_tokens_loss as last_tokens_loss
from .loss import next_token_loss as next_token_loss
from .model import CausalLM as CausalLM
from .model import make_model as make_model
