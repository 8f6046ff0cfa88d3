"""A decoder for Llama, Mistral and Qwen models in Flax NNX, loaded from Hugging Face folders."""

from jax_dora.models.cache import Cache as Cache
from jax_dora.models.cache import make_cache as make_cache
from jax_dora.models.config import QWEN3_8B as QWEN3_8B
from jax_dora.models.config import DecoderConfig as DecoderConfig
from jax_dora.models.config import Rope as Rope
from jax_dora.models.decoder import CausalLM as CausalLM
from jax_dora.models.decoder import make_model as make_model
from jax_dora.models.folder import abstract_model as abstract_model
from jax_dora.models.folder import load_model as load_model
from jax_dora.models.folder import read_config as read_config
from jax_dora.models.folder import save_model as save_model
from jax_dora.models.generate import NotFiniteError as NotFiniteError
from jax_dora.models.generate import Sampling as Sampling
from jax_dora.models.generate import generate as generate
from jax_dora.models.generate import generate_steps as generate_steps
from jax_dora.models.loss import last_tokens_loss as last_tokens_loss
from jax_dora.models.loss import next_token_loss as next_token_loss
from jax_dora.models.sharding import DecoderSharding as DecoderSharding
