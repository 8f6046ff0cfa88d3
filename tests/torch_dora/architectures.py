"""Small models of the architectures that PEFT is tested with, and what is adapted of each."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

IDS = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DECODER: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
ENCODER = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
WHISPER = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 3,
    "max_source_positions": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def of(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**sizes))


IMAGES = {"pixel_values": NOISE[:, :, :8, :8]}
TEXT, TEXTS = {"input_ids": IDS}, {"input_ids": IDS, "decoder_input_ids": IDS.flip(0)}
SOUND = {"input_features": NOISE[:, :, 0, :], "decoder_input_ids": IDS}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any, dict[str, Any]]] = {
    "Llama": (of("LlamaForCausalLM", "LlamaConfig", **DECODER), TEXT, "all-linear", {}),
    "Qwen3": (
        of("Qwen3ForCausalLM", "Qwen3Config", **DECODER, tie_word_embeddings=True),
        TEXT,
        ["q_proj", "down_proj", "embed_tokens"],
        {},
    ),
    "Mistral": (of("MistralForCausalLM", "MistralConfig", **DECODER), TEXT, "all-linear", {}),
    "Gemma2": (
        of("Gemma2ForCausalLM", "Gemma2Config", **DECODER),
        TEXT,
        ["q_proj", "up_proj"],
        {"modules_to_save": ["lm_head"]},
    ),
    "GPT-2": (
        of("GPT2LMHeadModel", "GPT2Config", vocab_size=40, n_embd=16, n_layer=2, n_head=2),
        TEXT,
        ["c_attn", "c_proj", "wpe"],
        {"fan_in_fan_out": True, "modules_to_save": ["wte"]},
    ),
    "BERT": (
        of("BertForSequenceClassification", "BertConfig", **ENCODER),
        TEXT,
        ["query", "dense", "word_embeddings"],
        {"modules_to_save": ["classifier"]},
    ),
    "ViT": (
        of(
            "ViTForImageClassification",
            "ViTConfig",
            **{name: size for name, size in ENCODER.items() if name != "vocab_size"},
            image_size=8,
            patch_size=4,
        ),
        IMAGES,
        r".*\.(projection|q_proj|v_proj|query|value)",
        {"modules_to_save": ["classifier"]},
    ),
    "T5": (
        of("T5ForConditionalGeneration", "T5Config", **T5),
        TEXTS,
        ["q", "v", "wo"],
        {"modules_to_save": ["decoder.embed_tokens", "lm_head"]},
    ),
    "Whisper": (
        of("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER),
        SOUND,
        ["q_proj", "v_proj", "fc1"],
        {"modules_to_save": ["proj_out"]},
    ),
    "Mixtral": (
        of(
            "MixtralForCausalLM",
            "MixtralConfig",
            **DECODER,
            num_local_experts=2,
            experts_implementation="eager",
        ),
        TEXT,
        ["q_proj", "v_proj"],
        {"trainable_token_indices": {"embed_tokens": [3, 1]}},
    ),
}


def base(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


def output(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs).logits
