"""DeBERTa-v2 and v3 in Flax NNX, loaded from Hugging Face folders, for classifying texts."""

from jax_dora.lm.encoder.deberta import SequenceClassifier as SequenceClassifier
from jax_dora.lm.encoder.encoder_config import DebertaConfig as DebertaConfig
from jax_dora.lm.encoder.encoder_folder import load_classifier as load_classifier
from jax_dora.lm.encoder.encoder_folder import save_classifier as save_classifier
