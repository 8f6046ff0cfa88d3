"""transformers' Trainer saves adapters, resumes from them, and loads the best."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import torch_dora
from tests.torch_dora.peft_folders import IDS, base, classifier, llama, output, qwen3
from torch_dora import DoRARule, apply_dora
from torch_dora.peft import TrainerCallback, load_adapter

RULE = DoRARule(".*_proj", rank=2, alpha=4, dropout=0.1)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 40, (9,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": ids}


def adapted(make: Any = llama) -> Any:
    return apply_dora(base(make), RULE)


def trainer(model: Any, folder: Path, callback: Any = None, **arguments: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 0.02,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(**settings | arguments),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[callback or TrainerCallback()],
    )


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.ci
@pytest.mark.parametrize("make", [llama, qwen3])
def test_an_interrupted_run_goes_on_from_its_adapter(
    make: Any, tmp_path: Path, caplog: Any
) -> None:
    whole = trainer(adapted(make), tmp_path / "whole")
    whole.train()
    first = trainer(adapted(make), tmp_path / "run")
    first.add_callback(Stop(2))
    first.train()
    caplog.clear()
    resumed = trainer(adapted(make), tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)

    assert losses(resumed) == losses(whole)
    assert losses(whole)[-1] < losses(whole)[0]
    state, want = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(state[name], want[name]) for name in want)
    assert "missing keys" not in caplog.text
    for folder in (tmp_path / "run").iterdir():
        names = {file.name for file in folder.iterdir()}
        assert "config.json" not in names
        assert {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt"} <= names


class Stop(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def test_a_saved_model_is_an_adapter_that_peft_finds_the_base_model_of(tmp_path: Path) -> None:
    base(llama).save_pretrained(tmp_path / "base")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    run = trainer(apply_dora(model, RULE), tmp_path / "run", TrainerCallback(task_type="CAUSAL_LM"))
    run.train()
    run.save_model(tmp_path / "saved")
    run.save_model(tmp_path / "saved")

    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "training_args.bin"}
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["task_type"]) == (
        str(tmp_path / "base"),
        "CAUSAL_LM",
    )
    want = output(run.model.eval())
    theirs = peft.PeftModel.from_pretrained(base(llama), tmp_path / "saved")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")
    ours = load_adapter(base(llama), tmp_path / "saved")
    for one in (theirs, loaded, ours.eval()):
        assert (output(one) - want).abs().max() <= 1e-5
    assert (output(base(llama)) - want).abs().max() > 1e-3


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    run = trainer(
        adapted(),
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the earliest
    )
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    want = load_adapter(base(llama), tmp_path / "checkpoint-2").eval()
    assert torch.equal(output(run.model.eval()), output(want))


def test_what_is_trained_beside_adapters_is_saved_or_refused(tmp_path: Path) -> None:
    model = apply_dora(base(classifier), RULE)
    model.score.requires_grad_(True)
    with pytest.raises(ValueError, match=r"would not be stored(.|\n)*  score\.weight"):
        trainer(model, tmp_path).train()
    callback = TrainerCallback(modules_to_save=["score"], task_type="SEQ_CLS")
    run = trainer(model, tmp_path, callback, max_steps=1)
    run.save_model(tmp_path / "saved")
    with torch.no_grad():
        model.score.weight.add_(1)
    run.save_model(tmp_path / "checkpoint-1")
    other = apply_dora(base(classifier), RULE)
    other.score.requires_grad_(True)
    run = trainer(other, tmp_path, callback)
    run._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert torch.equal(output(other), output(model))


def test_a_model_that_is_not_transformers(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = base(llama)

        def forward(self, input_ids, labels=None):
            return self.inner(input_ids=input_ids, labels=labels)

    run = trainer(apply_dora(Model(), RULE), tmp_path, save_steps=4)
    run.train()
    folder = tmp_path / "checkpoint-4"
    assert (folder / "model.safetensors").exists()
    ours = load_adapter(Model(), folder).eval()
    assert torch.equal(ours(IDS).logits, run.model.eval()(IDS).logits)


def test_a_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no DoRA layer"):
        trainer(base(llama), tmp_path)


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    run = trainer(adapted(), tmp_path)
    run.model.lm_head.weight.ds_id = 0  # as DeepSpeed's ZeRO-3 marks a parameter
    with pytest.raises(NotImplementedError, match=r"sharded these .*:\n  lm_head\.weight$"):
        run.train()


def test_save_pretrained_warns_of_whole_models(tmp_path: Path, caplog: Any) -> None:
    model = adapted()
    for one in (model, copy.deepcopy(model), nn.Sequential(model)[0]):
        caplog.clear()
        one.save_pretrained(tmp_path)
        assert caplog.text.count("torch_dora.peft.save_adapter") == 1
    pickle.loads(pickle.dumps(model)).save_pretrained(tmp_path / "pickled")
    caplog.clear()
    trainer(model, tmp_path / "run").save_model(tmp_path / "saved")
    merged = torch_dora.merge_dora(model)
    merged.save_pretrained(tmp_path / "merged")
    torch_dora.remove_dora(model)
    model.save_pretrained(tmp_path / "removed")
    assert "saves the whole base model" not in caplog.text
    for name, one in (("merged", merged), ("removed", base(llama))):
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(output(again), output(one))
