"""A decoder for Llama, Mistral and Qwen models in Flax NNX, loaded from Hugging Face folders."""

from jax_dora.lm.models.cache import Cache as Cache
from jax_dora.lm.models.cache import make_cache as make_cache
from jax_dora.lm.models.config import DecoderConfig as DecoderConfig
from jax_dora.lm.models.decoder import CausalLM as CausalLM
from jax_dora.lm.models.decoder import make_model as make_model
from jax_dora.lm.models.folder import abstract_model as abstract_model
from jax_dora.lm.models.folder import load_model as load_model
from jax_dora.lm.models.folder import read_config as read_config
from jax_dora.lm.models.folder import save_model as save_model
from jax_dora.lm.models.generation import NotFiniteError as NotFiniteError
from jax_dora.lm.models.generation import generate as generate
from jax_dora.lm.models.generation import generate_steps as generate_steps
from jax_dora.lm.models.loss import last_tokens_loss as last_tokens_loss
from jax_dora.lm.models.loss import next_token_loss as next_token_loss
from jax_dora.lm.models.rope import Rope as Rope
from jax_dora.lm.models.sampling import Sampling as Sampling
from jax_dora.lm.models.sharding import DecoderSharding as DecoderSharding
