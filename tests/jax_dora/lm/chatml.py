"""A base model like those of Qwen: its config ends texts with one token, and its chat template ends
replies with another."""

import json
from pathlib import Path
from typing import Any

from jax_dora.lm.finetune import tiny
from jax_dora.lm.models import DecoderConfig, make_model, save_model

TEXT_END, BEGIN, REPLY_END = 256, 257, 258
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = tiny.CONFIG | {"vocab_size": 259, "eos_token_id": TEXT_END}


def write_text_files(folder: Path, template: str | None = TEMPLATE, **settings: Any) -> None:
    """Writes the tokenizer and its settings into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.loads(tiny.byte_level_tokenizer().to_str())
    [end] = stored["added_tokens"]
    stored["added_tokens"] = [
        end | {"id": TEXT_END + number, "content": token} for number, token in enumerate(TOKENS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TOKENS[0],
        "chat_template": template,
    } | settings
    (folder / "tokenizer_config.json").write_text(
        json.dumps({name: value for name, value in settings.items() if value is not None})
    )


def make_folder(folder: Path, template: str | None = TEMPLATE, **settings: Any) -> Path:
    """Makes the folder of the model, with random weights."""
    model = make_model(DecoderConfig.from_hf(CONFIG))
    model.model.norm.scale[...] = 10 * model.model.norm.scale[...]
    save_model(model, folder, CONFIG)
    write_text_files(folder, template, **settings)
    return folder
