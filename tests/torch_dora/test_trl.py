"""TRL's SFTTrainer trains an accelerated PeftModel as it trains PEFT's."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import tokenizers
import torch
import transformers

from tests.torch_dora.peft_folders import base, llama, tensors_of
from tests.torch_dora.test_trainer import losses
from torch_dora.peft import accelerate

pytestmark = pytest.mark.trl


def trainer(folder: Path, is_accelerated: bool) -> Any:
    """A trainer that makes the PeftModel itself, with accumulation and gradient checkpointing."""
    import trl  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model = base(llama)
    generator = np.random.default_rng(1)
    size = model.config.vocab_size
    rows = [generator.integers(3, size, n).tolist() for n in generator.integers(4, 12, 40)]
    words = tokenizers.models.WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0")
    made = trl.SFTTrainer(
        model,
        trl.SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            activation_checkpointing=True,
            max_steps=6,
            max_length=16,
            learning_rate=0.02,
            logging_steps=1,
            save_steps=2,
            report_to="none",
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(words), eos_token="w1", pad_token="w2"
        ),
        peft_config=peft.LoraConfig(
            r=4, lora_alpha=6, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    if is_accelerated:
        report = accelerate(made.model)
        assert report.accelerated
        assert not report.left
    return made


def test_sft_accumulates_saves_and_resumes_as_with_peft(tmp_path: Path) -> None:
    found = {}
    for is_accelerated in (False, True):
        folder = tmp_path / str(is_accelerated)
        run = trainer(folder, is_accelerated)
        run.train()
        again = trainer(folder, is_accelerated)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        found[is_accelerated] = losses(run), losses(again), tensors_of(folder / "checkpoint-6")
    theirs, ours = found[False], found[True]
    assert ours[0][-1] < ours[0][0]
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4)
    np.testing.assert_allclose(ours[1], ours[0], rtol=1e-4)
    for name, tensor in theirs[2].items():
        torch.testing.assert_close(ours[2][name], tensor, atol=1e-4, rtol=1e-3)
