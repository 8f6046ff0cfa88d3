"""What a run trains: LoRA, some layers, whole modules, and adapters of folders, as PEFT does."""

import itertools
import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

from jax_dora.lm.commands import main
from jax_dora.lm.finetune import packing, tiny, training
from jax_dora.lm.finetune.run import Run
from jax_dora.lm.models import load_model
from jax_dora.peft import load_adapter
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.lm.chat_templates import CHATML, TALK, folder_of
from tests.jax_dora.lm.finetune.runs import (
    OPTIONS,
    assert_one_line,
    finetune,
    metrics,
    plan_of,
    same_adapter,
    told,
)

TARGETS = ["q_proj", "v_proj", "down_proj"]
SHORT = [*OPTIONS, "--steps", "2", "--warmup", "0", "--dropout", "0"]
load = transformers.AutoModelForCausalLM.from_pretrained


@pytest.fixture(scope="module")
def untied(inputs, tmp_path_factory):
    """The flags for a model whose head is not its embedding."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "CONFIG", tiny.CONFIG | {"tie_word_embeddings": False})
        tiny.make_tiny_model(folder)
    return ["--model", str(folder), *inputs[2:]]


@pytest.fixture
def make_folder(untied, tmp_path) -> Callable[..., Any]:
    """A folder that PEFT writes, with no zero in it."""

    def make(**options) -> Any:
        options = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS} | options
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(load(untied[1]), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.rand_like(parameter))
        model.save_pretrained(tmp_path / "peft")
        return tmp_path / "peft"

    return make


def command(*words):
    return main([str(word) for word in words])


def logits_of_peft(model, adapter, tokens):
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(load(model), adapter).eval()
        return adapted(torch.tensor(tokens)).logits.numpy()


def assert_peft_computes_the_same(model, adapter):
    tokens = np.random.default_rng(0).integers(0, 256, (2, 9))
    expected = logits_of_peft(model, adapter, tokens)
    found = load_adapter(load_model(model), adapter)(tokens)
    peak = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=OPERATOR_FP32_MAX_ABS * peak)
    return expected


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": False, "layers_to_transform": [1]},
        pytest.param(
            {"use_dora": True, "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
            marks=pytest.mark.slow,
        ),
        pytest.param({"use_dora": False, "use_rslora": True}, marks=pytest.mark.slow),
        pytest.param({"use_dora": True, "layers_to_transform": [0]}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.ci
def test_gradients_are_those_of_peft(options, make_folder, untied, tmp_path):
    """Of an adapter that PEFT has written, with one text in a row."""
    folder = make_folder(**options)
    flags = [*untied, *SHORT, "--length", "8", "--rank", "4", "--from-adapter", str(folder)]
    run = Run(plan_of([*flags, "--output", str(tmp_path / "run")]))
    rows = packing.batch(run.plan.rows, 0, run.plan.step_rows, 0)
    assert rows.segment_ids.max() == 1
    loss, gradients, _ = training.accumulate(*run.parts, rows, run.trained)

    theirs = peft.PeftModel.from_pretrained(load(untied[1]), folder, is_trainable=True)
    tokens, targets, weights = (
        torch.tensor(np.asarray(part).reshape(-1, 8))
        for part in (rows.tokens, rows.targets, rows.weights)
    )
    logits = theirs(tokens.long(), attention_mask=torch.ones_like(tokens)).logits
    each = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), targets.long(), reduction="none"
    )
    expected = (each * weights).sum() / weights.sum()
    expected.backward()
    np.testing.assert_allclose(float(loss), expected.item(), rtol=1e-5)

    flat = {"/".join(map(str, path)): one[...] for path, one in nnx.to_flat_state(gradients)}
    chosen = options.get("layers_to_transform", [0, 1])
    named = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    compared = 0

    def compare(name, found):
        nonlocal compared
        [theirs] = [grad for key, grad in named.items() if f".{name}." in f".{key}."]
        peak = float(theirs.abs().max())
        np.testing.assert_allclose(found, theirs.numpy(), rtol=0, atol=1e-4 * peak)
        compared += 1

    for part in ("self_attn/q_proj", "self_attn/v_proj", "mlp/down_proj"):
        for layer in (0, 1):
            arrays = {
                name: flat[f"model/layers/{part}/{name}"][layer]
                for name in ("lora_a", "lora_b", "magnitude")
            }
            path = f"layers.{layer}.{part.replace('/', '.')}"
            if layer not in chosen:
                assert not any(np.any(array) for array in arrays.values())
                continue
            compare(f"{path}.lora_A.default.weight", arrays["lora_a"].T)
            compare(f"{path}.lora_B.default.weight", arrays["lora_b"].T)
            if options["use_dora"]:
                compare(f"{path}.lora_magnitude_vector", arrays["magnitude"])
            else:
                assert not np.any(arrays["magnitude"])
    if "modules_to_save" in options:
        compare("lm_head.modules_to_save.default.weight", flat["lm_head/kernel"].T)
        compare("embed_tokens.modules_to_save.default.weight", flat["model/embed_tokens/embedding"])
        compare("model.norm.modules_to_save.default.weight", flat["model/norm/scale"])
        names = "input_layernorm post_attention_layernorm self_attn.q_norm self_attn.k_norm"
        for layer, name in itertools.product((0, 1), names.split()):
            scale = flat[f"model/layers/{name.replace('.', '/')}/scale"][layer]
            compare(f"layers.{layer}.{name}.modules_to_save.default.weight", scale)
    assert compared == len(named)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "flags", "fields"),
    [
        (True, "--method lora", {"use_dora": False, "layers_to_transform": None}),
        (True, "--layers 1", {"use_dora": True, "layers_to_transform": [1]}),
        (
            True,
            "--modules-to-save lm_head embed_tokens",
            {"modules_to_save": ["embed_tokens", "lm_head"]},
        ),
        (
            False,
            "--method lora --layers 0 --modules-to-save lm_head norm --target model/layers/mlp/.*",
            {"layers_to_transform": [0], "modules_to_save": ["lm_head", "norm"]},
        ),
        (False, "--method lora --rslora --target .*embed_tokens|lm_head", {"use_rslora": True}),
    ],
)
def test_folders_are_read_by_peft(tied, flags, fields, inputs, untied, tmp_path, capsys):
    """And by `generate` and `merge`, and once more by a run."""
    model = (inputs if tied else untied)[:2]
    start = [*model, *inputs[2:], *SHORT]
    assert finetune([*start, *flags.split(), "--output", str(tmp_path / "run")]) == 0
    adapter = tmp_path / "run" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert {name: config[name] for name in fields} == fields
    expected = assert_peft_computes_the_same(model[1], adapter)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 9))
    with torch.no_grad():
        base = load(model[1])(torch.tensor(tokens)).logits.numpy()
    assert np.abs(expected - base).max() > 1e-2
    keys = load_file(adapter / "adapter_model.safetensors")
    assert any("magnitude" in key for key in keys) == config["use_dora"]
    if fields.get("layers_to_transform"):
        assert len({key.split("layers.")[1][0] for key in keys if "lora_A" in key}) == 1

    merged = tmp_path / "merged"
    assert command("merge", "--adapter", tmp_path / "run", "--output", merged) == 0
    with torch.no_grad():
        found = load(merged)(torch.tensor(tokens)).logits.numpy()
    peak = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=OPERATOR_FP32_MAX_ABS * peak)
    assert command("generate", "--adapter", tmp_path / "run", "--prompt", "1+2=") == 0

    again = [*start, "--learning-rate", "1e-30", "--from-adapter", str(tmp_path / "run")]
    assert finetune([*again, "--output", str(tmp_path / "again")]) == 0
    more = json.loads((tmp_path / "again" / "adapter" / "adapter_config.json").read_text())
    assert more == config
    np.testing.assert_array_equal(
        logits_of_peft(model[1], tmp_path / "again" / "adapter", tokens), expected
    )


def test_a_folder_s_tokenizer_and_chat_template_are_used(untied, make_folder, tmp_path, capsys):
    """As transformers uses them, and the new folder has them too."""
    folder, data = make_folder(), tmp_path / "data.jsonl"
    folder_of(folder, tiny.byte_level_tokenizer(), chat_template=CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": 10}')
    data.write_text(json.dumps({"messages": TALK}) + '\n{"prompt": "1", "completion": "2"}')
    flags = [*untied[:2], "--data", str(data), "--from-adapter", str(folder), "--length", "256"]
    capsys.readouterr()
    plan = plan_of([*flags, "--output", str(tmp_path / "run")], quiet=False)
    assert f"using the chat template in {folder}" in told(capsys)
    expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK)
    assert plan.examples_to_show[0].tokens == expected["input_ids"]
    assert plan.examples_to_show[1].tokens[-1] == 10  # where the adapter's completions end

    Run(plan)._save_adapter("adapter")
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter")
    assert written.apply_chat_template(TALK) == expected

    folder_of(folder, tiny.byte_level_tokenizer(), chat_template="<x>" + CHATML, pad_token="<x>")
    assert finetune([*flags, "--output", str(tmp_path / "other")]) == 2
    assert f"the tokenizer in {folder} returns token 257; expected less" in told(capsys)


@pytest.mark.slow
def test_a_run_of_lora_goes_on_as_if_not_stopped(inputs, tmp_path):
    flags = [*inputs, *OPTIONS, "--method", "lora", "--layers", "1", "--dropout", "0"]
    flags += ["--modules-to-save", "norm"]
    assert finetune([*flags, "--output", str(tmp_path / "whole")]) == 0
    parts = [*flags, "--output", str(tmp_path / "parts"), "--schedule", "constant"]
    whole = [*flags, "--output", str(tmp_path / "constant"), "--schedule", "constant"]
    assert finetune(whole) == 0
    assert finetune([*parts, "--steps", "3"]) == 0
    assert finetune([*parts, "--resume"]) == 0
    same_adapter(tmp_path / "constant", tmp_path / "parts")
    losses = [line["loss"] for line in metrics(tmp_path / "whole")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--from-adapter F --rank 8",
            "--rank 8: expected 4, as in --from-adapter F: leave out --r",
        ),
        (
            "--from-adapter F --method dora",
            "--method 'dora': expected 'lora', as in --from-adapter",
        ),
        ("--from-adapter F --dropout 0.5", "--dropout 0.5: expected 0.0, as in --from-adapter F"),
        ("--from-adapter F --layers 1", "--layers (1,): expected (), as in --from-adapter F"),
        (
            "--from-adapter F --target .*q_proj",
            "--target '.*q_proj': expected the layers of --from-adapter F, but "
            "model/layers/mlp/down_proj is in one of them only",
        ),
        ("--from-adapter none", "folder is none; expected an adapter folder on this machine"),
        ("--method qlora", "argument --method: invalid choice: 'qlora'"),
        ("--layers 2", "--layers (2,): expected indices from 0 to 1"),
        ("--layers 1 --target .*", "expected a --target in model/layers only, but '.*' also"),
        ("--layers -1", "argument --layers: '-1' is out of range: expected an integer from 0"),
        ("--modules-to-save heads", "no module has the name 'heads'; expected some of down_proj,"),
        ("--modules-to-save q_proj", "layers.0.self_attn.q_proj.weight is adapted too; expected"),
        (
            "--modules-to-save layers.1.input_layernorm",
            "it has model.layers.1.input_layernorm.weight, but not model.layers.0.input_layernorm",
        ),
    ],
)
def test_what_does_not_fit_is_refused(flags, message, untied, make_folder, tmp_path, capsys):
    folder = str(make_folder())
    words = [folder if word == "F" else word for word in flags.split()]
    options = [*untied, "--steps", "1", "--dry-run", "--output", str(tmp_path / "run"), *words]
    capsys.readouterr()
    assert finetune(options) == 2
    assert_one_line(capsys, message.replace(" F", f" {folder}"))


def test_a_tied_module_alone_is_refused(inputs, tmp_path, capsys):
    options = [*inputs, "--dry-run", "--output", str(tmp_path), "--modules-to-save", "lm_head"]
    assert finetune(options) == 2
    assert_one_line(capsys, "it has lm_head.weight, but not model.embed_tokens.weight, which is in")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": "all"}, "it has bias='all', which is not trained here"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "it has trainable_token_indices, whi"),
        ({"target_modules": ["norm"]}, "expected"),
    ],
)
def test_a_folder_with_more_is_refused(options, message, untied, make_folder, tmp_path, capsys):
    flags = [*untied, "--dry-run", "--output", str(tmp_path / "run")]
    if "target_modules" in options:
        folder = make_folder()
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 8}))
    else:
        folder = make_folder(**options)
    capsys.readouterr()
    assert finetune([*flags, "--from-adapter", str(folder)]) == 2
    assert message in capsys.readouterr().err
    shutil.rmtree(folder)
