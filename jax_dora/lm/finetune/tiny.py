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

# In a run's folder. `HELD_OUT` has the records to evaluate on.
MODEL, DATA, HELD_OUT = "tiny-model", "tiny.jsonl", "tiny-eval.jsonl"
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
    folder, files = output / MODEL, [output / DATA, output / HELD_OUT]
    with contextlib.ExitStack() as undo:
        if not folder.exists():
            make_tiny_model(folder)
            undo.callback(shutil.rmtree, folder)
        if data:
            for file in files:
                if not file.exists():
                    undo.callback(file.unlink, missing_ok=True)
            make_tiny_data(*files)
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


def make_tiny_data(file: Path, held_out: Path | None = None) -> None:
    """Writes the sums of two numbers below 50, as prompts and completions, in random order.

    40 sums are not in `file`, but in `held_out` if it is given.
    """
    sums = [divmod(int(one), 50) for one in np.random.default_rng(0).permutation(50 * 50)]
    for path, part in ((held_out, sums[:40]), (file, sums[40:])):
        records = ({"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in part)
        if path is not None:
            path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
