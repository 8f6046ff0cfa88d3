"""Makes a tiny model with a byte-level tokenizer, and training data: sums of two numbers."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jax_dora.lm.models import DecoderConfig, make_model, save_model

MODEL, DATA = "tiny-model", "tiny.jsonl"  # in a run's folder
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{% else %}{{ message.role + ': ' + message.content + '\\n' }}{% endif %}"
    "{% endfor %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 257,
    "eos_token_id": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


@contextlib.contextmanager
def make_tiny_inputs(output: Path, *, data: bool) -> Iterator[None]:
    """Makes the tiny model in a run's folder, and the data if `data` is True.

    If the block raises an error, what was made is removed again.
    """
    folder, file = output / MODEL, output / DATA
    with contextlib.ExitStack() as undo:
        if not folder.exists():
            make_tiny_model(folder)
            undo.callback(shutil.rmtree, folder)
        if data:
            if not file.exists():
                undo.callback(file.unlink)
            make_tiny_data(file)
        yield
        undo.pop_all()


def make_tiny_model(folder: Path) -> None:
    """Makes a Hugging Face folder with a Qwen3 of random weights.

    The folder appears once it is complete.
    """
    config = DecoderConfig.from_hf(CONFIG)
    model = make_model(config)
    # The embeddings have a standard deviation of 0.02. With a tied head, logits would be almost
    # equal without this factor.
    model.model.norm.scale[...] = 10 * model.model.norm.scale[...]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": CHAT_TEMPLATE,
    }
    with tempfile.TemporaryDirectory() as temporary:
        byte_level_tokenizer().save(str(Path(temporary) / "tokenizer.json"))
        (Path(temporary) / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2) + "\n"
        )
        save_model(model, folder, CONFIG, tokenizer_from=temporary)


def byte_level_tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token per byte, and one more that ends a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def make_tiny_data(file: Path) -> None:
    """Writes 500 sums of two numbers, as prompts and completions."""
    rng = np.random.default_rng(0)
    sums = rng.integers(0, 50, (500, 2)).tolist()
    records = ({"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in sums)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
