"""PEFT folders in torch: what PEFT wrote is computed as PEFT computes it, and the reverse."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import torch_dora
from tests.tables import thinned
from tests.torch_dora.peft_folders import (
    Convolutions,
    assert_same,
    assert_unchanged,
    base,
    classifier,
    gpt2,
    llama,
    output,
    peft_folder,
    perturbed,
    qwen3,
    reconfigured,
    rewritten,
    snapshot,
    tensors_of,
)
from torch_dora.peft import AdapterConfig, load_adapter, save_adapter

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "names": (llama, {"target_modules": ["q_proj", "v_proj"]}),
    "expression": (llama, {"target_modules": r".*\.(1|2)\.mlp\.up_proj"}),
    "all-linear": (qwen3, {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}),
    "embedding": (qwen3, {"target_modules": ["embed_tokens", "o_proj"]}),
    "head": (llama, {"target_modules": ["lm_head"], "use_rslora": True}),
    "layers": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]}),
    "pattern": (
        gpt2,
        {
            "target_modules": ["c_attn"],
            "layers_to_transform": 1,
            "layers_pattern": "h",
            "fan_in_fan_out": True,
        },
    ),
    "Conv1D": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "all-linear Conv1D": (gpt2, {"target_modules": "all-linear", "fan_in_fan_out": True}),
    "position": (gpt2, {"target_modules": ["wpe"]}),
    "convolutions": (Convolutions, {"target_modules": ["embed", "conv", "image", "volume"]}),
    "in a Sequential": (Convolutions, {"target_modules": ["score.0", "2"]}),
    "exclude": (llama, {"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"}),
    "patterns": (
        llama,
        {
            "target_modules": "all-linear",
            # In alphabetical order, which is how PEFT writes them, whatever it went by.
            "rank_pattern": {"down_proj": 2, r"layers\.1\..*": 7},
            "alpha_pattern": {"layers.0.mlp.up_proj": 20, "q_proj": 1},
        },
    ),
    "modules_to_save": (classifier, {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
    "a norm too": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]}),
    "all biases": (llama, {"target_modules": ["up_proj"], "bias": "all"}),
    "own biases": (llama, {"target_modules": ["q_proj", "up_proj"], "bias": "lora_only"}),
    "all biases and modules": (
        llama,
        {"target_modules": ["up_proj"], "bias": "all", "modules_to_save": ["1.self_attn"]},
    ),
    "dropout": (llama, {"target_modules": ["q_proj"], "lora_dropout": 0.5}),
}


@pytest.mark.parametrize(
    "name",
    thinned(
        CASES,
        [
            *("all-linear", "embedding", "head", "pattern", "Conv1D", "position", "convolutions"),
            *("in a Sequential", "patterns", "modules_to_save", "own biases"),
        ],
    ),
)
def test_a_folder_of_peft_computes_as_in_peft_and_goes_back(name: str, tmp_path: Path) -> None:
    make, fields = CASES[name]
    folder, theirs = peft_folder(tmp_path / "theirs", make, **fields)
    expected = output(theirs)
    config = theirs.peft_config["default"]

    model = base(make)
    ours = load_adapter(model, folder)

    assert ours is model
    assert (output(ours) - expected).abs().max() <= 1e-5
    assert (output(base(make)) - expected).abs().max() > 1e-3

    save_adapter(
        ours,
        tmp_path / "ours",
        bias=config.bias,
        modules_to_save=config.modules_to_save or [],
        task_type=config.task_type,
    )
    kept = {
        key: tensor
        for key, tensor in tensors_of(folder).items()
        # With bias = "all", PEFT stores those of a module it saves whole three times.
        if ".original_module." not in key and ".modules_to_save." not in key
    }
    assert_same(tensors_of(tmp_path / "ours"), kept)
    again = peft.PeftModel.from_pretrained(base(make), tmp_path / "ours")
    assert torch.equal(output(again), expected)


def test_a_lora_folder_becomes_the_dora_that_computes_the_same(tmp_path: Path) -> None:
    targets = ["q_proj", "embed_tokens"]
    folder, theirs = peft_folder(tmp_path / "a", llama, use_dora=False, target_modules=targets)

    model = load_adapter(base(llama), folder)
    save_adapter(model, tmp_path / "again", use_dora=False)

    assert (output(model) - output(theirs)).abs().max() <= 1e-5
    assert_same(tensors_of(tmp_path / "again"), tensors_of(folder))
    with torch.no_grad():
        model.model.embed_tokens.magnitude.mul_(1.5)
    with pytest.raises(ValueError, match="embed_tokens is not its norm"):
        save_adapter(model, tmp_path / "third", use_dora=False)


def test_a_folder_takes_the_place_of_another_adapter(tmp_path: Path) -> None:
    one, _ = peft_folder(tmp_path / "one", llama, target_modules=["q_proj", "up_proj"])
    two, theirs = peft_folder(
        tmp_path / "two", llama, seed=2, r=5, target_modules=["q_proj", "o_proj"]
    )

    model = load_adapter(load_adapter(base(llama), one), two)

    assert (output(model) - output(theirs)).abs().max() <= 1e-5
    fresh = load_adapter(base(llama), two)
    assert_same(model.state_dict(), fresh.state_dict())


def test_the_adapter_and_what_is_stored_whole_are_trainable(tmp_path: Path) -> None:
    make, fields = CASES["modules_to_save"]
    folder, _ = peft_folder(tmp_path, make, **fields)

    model = load_adapter(base(make), folder)

    for name, parameter in model.named_parameters():
        trained = name == "score.weight" or name.rpartition(".")[2] in (
            "lora_a",
            "lora_b",
            "magnitude",
        )
        assert parameter.requires_grad == trained, name


def test_activation_checkpointing_leaves_no_trace_in_a_folder(tmp_path: Path) -> None:
    make, fields = CASES["modules_to_save"]
    folder, theirs = peft_folder(tmp_path / "a", make, **fields)
    model = base(make)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))

    load_adapter(model, folder)
    save_adapter(model, tmp_path / "again", modules_to_save="score")

    assert (output(model) - output(theirs)).abs().max() <= 1e-5
    assert_same(tensors_of(tmp_path / "again"), tensors_of(folder))


def test_shared_modules_stay_shared(tmp_path: Path, caplog: Any) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    model = torch_dora.apply_dora(Shared(), torch_dora.DoRARule("first", rank=2, alpha=2))
    save_adapter(perturbed(model), tmp_path / "adapter")
    assert "PEFT adapts it under its first name only:\n  first, second" in caplog.text
    caplog.clear()

    loaded = load_adapter(copy.deepcopy(model), tmp_path / "adapter")

    assert "under its first name only:\n  first, second" in caplog.text
    assert loaded.first is loaded.second
    assert isinstance(loaded.first, torch_dora.DoRALinear)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    folder, _ = peft_folder(tmp_path / "theirs", llama, target_modules=["q_proj"])
    rewritten(folder, change=lambda tensor: tensor.to(dtype))

    model = load_adapter(base(llama).bfloat16(), folder)
    save_adapter(model, tmp_path / "ours", dtype=dtype)

    layer = model.model.layers[0].self_attn.q_proj
    assert layer.lora_a.dtype == layer.lora_b.dtype == dtype
    assert layer.weight.dtype == torch.bfloat16
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(folder))
    low = load_adapter(base(llama), folder, adapter_dtype=torch.bfloat16)
    assert low.model.layers[0].self_attn.q_proj.lora_a.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="adapter_dtype"):
        load_adapter(low, folder, adapter_dtype=torch.int8)


def test_a_configuration_of_ones_own_is_written_as_it_is(tmp_path: Path) -> None:
    fields = {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]}
    folder, _ = peft_folder(tmp_path / "theirs", llama, **fields)
    model = load_adapter(base(llama), folder)
    text = (folder / "adapter_config.json").read_text()
    config = torch_dora.peft.AdapterConfig.from_json(text)

    save_adapter(model, tmp_path / "ours", config=config)

    written = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert written == {key: value for key, value in json.loads(text).items() if key in written}
    other = torch_dora.peft.AdapterConfig.from_json(
        text.replace('"lora_alpha": 6', '"lora_alpha": 7')
    )
    with pytest.raises(ValueError, match="config gives model"):
        save_adapter(model, tmp_path / "third", config=other)


@pytest.mark.parametrize(
    ("field", "default", "value", "other"),
    [("rank_pattern", "r", 4, 2), ("alpha_pattern", "lora_alpha", 9.0, 100.0)],
)
def test_a_configuration_is_judged_by_what_its_file_will_say(
    field: str, default: str, value: float, other: float, tmp_path: Path
) -> None:
    """The first pattern that matches counts, and a file has them sorted."""
    model = base(llama)
    rule = torch_dora.DoRARule(r".*\.q_proj", rank=4, alpha=9.0)
    model = torch_dora.apply_dora(model, rule)
    plain = {"r": 4, "lora_alpha": 9.0, "target_modules": ("q_proj",), "use_dora": True}
    key = "layers.1.self_attn.q_proj"
    mistaken = AdapterConfig(**plain | {default: 3, field: {"q_proj": value, key: other}})
    with pytest.raises(ValueError, match=rf"layers\.1\..* by {field}\['{key}'\]"):
        save_adapter(model, tmp_path / "mistaken", config=mistaken)
    assert not (tmp_path / "mistaken").exists()

    exact = AdapterConfig(**plain | {default: 3, field: {"q_proj": value, "^x": other}})
    save_adapter(model, tmp_path / "exact", config=exact)
    again = load_adapter(base(llama), tmp_path / "exact")
    for layer in again.model.layers:
        assert (layer.self_attn.q_proj.rank, layer.self_attn.q_proj.alpha) == (4, 9.0)


def test_a_layer_alone_has_no_name_in_peft(tmp_path: Path) -> None:
    layer = torch_dora.DoRALinear(4, 5, rank=2, alpha=4)
    with pytest.raises(ValueError, match="names every layer by its path inside of a model"):
        save_adapter(layer, tmp_path / "adapter")
    config = AdapterConfig(r=2, lora_alpha=4, target_modules=("q",), use_dora=True)
    with pytest.raises(ValueError, match="put it into a module"):
        save_adapter(layer, tmp_path / "adapter", config=config)
    grouped = torch_dora.DoRAConv.from_base(nn.Conv1d(4, 6, 3, groups=2), rank=2, alpha=4)
    with pytest.raises(ValueError, match="put it into a module"):
        save_adapter(grouped, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: rewritten(f, lambda key: key.replace("layers.0", "layers.7")), "layers.7"),
        (lambda f: rewritten(f, lambda key: key.replace("q_proj", "k_proj", 1)), "does not select"),
        (lambda f: rewritten(f, change=lambda t: t.mT if t.ndim == 2 else t), "has shape"),
        (lambda f: reconfigured(f, use_dora=False), "use_dora is false"),
        (lambda f: reconfigured(f, modules_to_save=["lm_head"]), "lm_head.weight is missing"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\0" * 40), "not a whole"),
    ],
)
def test_a_folder_that_does_not_fit_changes_nothing(
    damage: Any, message: str, tmp_path: Path
) -> None:
    folder, _ = peft_folder(tmp_path, llama, target_modules=["q_proj"])
    for model in (base(llama), load_adapter(base(llama), folder)):
        before = snapshot(model)
        copied = tmp_path / str(id(model))
        copied.mkdir()
        for file in folder.glob("adapter_*"):
            (copied / file.name).write_bytes(file.read_bytes())
        damage(copied)

        with pytest.raises(ValueError, match=message):
            load_adapter(model, copied)

        assert_unchanged(before, snapshot(model))


def test_what_fails_while_it_is_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = peft_folder(tmp_path, llama, target_modules=["q_proj"])
    model = base(llama)
    before = snapshot(model)
    read, calls = torch_dora.peft.load.Folder.read, []

    def fail(self, key):
        calls.append(key)
        if len(calls) > 5:
            raise OSError("the disk is gone")
        return read(self, key)

    monkeypatch.setattr(torch_dora.peft.load.Folder, "read", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        load_adapter(model, folder)

    assert_unchanged(before, snapshot(model))


def test_a_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model has no adapter"):
        save_adapter(base(llama), tmp_path / "adapter")
    with pytest.raises(TypeError, match="model is a str"):
        load_adapter("model", tmp_path)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("error", "folder", "message"),
    [
        (TypeError, None, "folder is None, a NoneType; expected the path of a folder"),
        (ValueError, "", "folder is ''; expected the path of a folder; '.' is the current one"),
    ],
)
def test_what_is_no_folder_is_refused(error: Any, folder: Any, message: str) -> None:
    rule = torch_dora.DoRARule("0", 2, 2)
    model = torch_dora.apply_dora(nn.Sequential(nn.Linear(4, 4)), rule)
    for function in (save_adapter, load_adapter):
        with pytest.raises(error, match=message):
            function(model, folder)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"modules_to_save": 3}, "modules_to_save is 3, a int; expected a list"),
        ({"config": {}}, "config is {}, a dict; expected an AdapterConfig, or None"),
        ({"trainable_token_indices": 3}, "trainable_token_indices is 3, a int; expected rows"),
    ],
)
def test_options_of_another_type_are_named(option: Any, message: str, tmp_path: Path) -> None:
    rule = torch_dora.DoRARule("0", 2, 2)
    model = torch_dora.apply_dora(nn.Sequential(nn.Linear(4, 4)), rule)
    with pytest.raises(TypeError, match=message):
        save_adapter(model, tmp_path, **option)
    with pytest.raises(TypeError, match="adapter is 3, a int; expected a name, or None"):
        load_adapter(model, tmp_path, adapter=3)  # pyright: ignore[reportArgumentType]


def test_numbers_of_numpy_are_written(tmp_path: Path) -> None:
    numbers: Any = {"rank": np.int64(2), "alpha": np.float32(4), "dropout": np.float32(0.5)}
    rule = torch_dora.DoRARule("all-linear", **numbers)
    model = torch_dora.apply_dora(torch.nn.Sequential(torch.nn.Linear(4, 5)), rule)
    save_adapter(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 4.0, 0.5)


def test_a_scale_that_float32_cannot_square_names_the_file(tmp_path: Path) -> None:
    model = torch_dora.apply_dora(base(llama), torch_dora.DoRARule(".*q_proj", 2, 6))
    save_adapter(model, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 6', '"lora_alpha": 1e300'))
    with pytest.raises(ValueError, match=r"adapter_config\.json: alpha is 1e[+]300, a scale of"):
        load_adapter(base(llama), tmp_path)


def test_what_the_format_has_once_may_not_differ(tmp_path: Path) -> None:
    rules = [
        torch_dora.DoRARule(r".*q_proj", rank=2, alpha=2, dropout=0.5),
        torch_dora.DoRARule(r".*o_proj", rank=2, alpha=2),
    ]
    model = torch_dora.apply_dora(base(llama), rules)
    with pytest.raises(ValueError, match=r"dropout: .*q_proj has 0\.5, .*o_proj has 0\.0"):
        save_adapter(model, tmp_path / "adapter")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)


def small() -> nn.Module:
    rule = torch_dora.DoRARule("up", rank=2, alpha=2)
    return torch_dora.apply_dora(base(Attention), rule)


def test_what_is_trained_is_stored_or_refused(tmp_path: Path) -> None:
    model = small()
    model.up.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"would not be stored; .* modules_to_save.*\n  up\.bias$"):
        save_adapter(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    save_adapter(model, tmp_path / "a", bias="lora_only")
    loaded = load_adapter(base(Attention), tmp_path / "a")
    assert torch.equal(loaded.up.bias, model.up.bias)


def test_a_task_that_peft_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task_type is 'chat'; expected None or one of SEQ_CLS,"):
        save_adapter(small(), tmp_path / "a", task_type="chat")
    save_adapter(small(), tmp_path / "a", task_type=peft.TaskType.CAUSAL_LM)
    assert peft.LoraConfig.from_pretrained(tmp_path / "a").task_type == "CAUSAL_LM"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn, "float16"])
def test_a_dtype_that_would_destroy_the_adapter_is_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"dtype is .*; expected torch\.float16, bfloat16"):
        save_adapter(small(), tmp_path / "a", dtype=dtype)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("value", "dtype"), [(torch.nan, None), (torch.inf, None), (7e4, torch.float16)]
)
@pytest.mark.parametrize("name", ["lora_a", "lora_b", "magnitude", "bias"])
def test_what_is_not_finite_is_not_written(
    name: str, value: float, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model = small()
    key = {"lora_a": "lora_A", "lora_b": "lora_B", "magnitude": "lora_mag"}.get(name, "base_layer")
    with torch.no_grad():
        getattr(model.up, name).view(-1)[0] = value
    if name == "bias" and dtype is not None:
        save_adapter(model, tmp_path / "a", bias="lora_only", dtype=dtype)
        return
    with pytest.raises(ValueError, match=rf"model\.up\.{key}.* holds NaN or infinity, in 1 of"):
        save_adapter(model, tmp_path / "a", bias="lora_only", dtype=dtype)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_magnitude_keeps_its_values(dtype: torch.dtype, tmp_path: Path) -> None:
    model = perturbed(small())
    save_adapter(model, tmp_path / "a", dtype=dtype)
    magnitude = load_adapter(base(Attention), tmp_path / "a").up.magnitude

    assert magnitude.dtype == torch.float32
    assert torch.equal(magnitude, model.up.magnitude.to(dtype).float())
    rewritten(tmp_path / "a", change=lambda t: t.double() + 1e-12 if t.ndim == 1 else t)
    with pytest.raises(ValueError, match=r"is F64, and rounded in a magnitude of torch\.float32"):
        load_adapter(base(Attention), tmp_path / "a")
    load_adapter(base(Attention), tmp_path / "a", adapter_dtype=torch.float32)


# torch.compile of torch 2.11 imports what torch itself calls deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
def test_what_stands_around_a_model_is_refused(tmp_path: Path) -> None:
    folder, theirs = peft_folder(tmp_path / "a", llama, target_modules=["q_proj"])
    config = peft.LoraConfig(target_modules=["q_proj"])
    injected = peft.inject_adapter_in_model(config, base(llama))
    for model, told in (
        (injected, r"PEFT's own adapters(.|\n)*\n  model\.layers\.0\.self_attn\.q_proj\n"),
        (theirs, r"PeftModel, which wraps .* model\.unload\(\)"),
        (torch.compile(base(llama)), r"OptimizedModule, .* model\._orig_mod"),
        (nn.DataParallel(base(llama)), r"DataParallel, .* model\.module"),
        (nn.Sequential(torch.compile(base(llama))), r"model\.0 is a OptimizedModule"),
    ):
        with pytest.raises(TypeError, match=told):
            load_adapter(model, folder)
        with pytest.raises(TypeError, match=told):
            save_adapter(model, tmp_path / "b")
    with pytest.raises(TypeError, match="PEFT's own adapters"):
        torch_dora.apply_dora(injected, torch_dora.DoRARule("all-linear", rank=2, alpha=2))


def test_what_multihead_attention_holds_is_refused_where_it_is_selected(tmp_path: Path) -> None:
    save_adapter(small(), tmp_path / "a")
    load_adapter(base(Attention), tmp_path / "a")
    reconfigured(tmp_path / "a", target_modules="all-linear")
    with pytest.raises(NotImplementedError, match=r"attention\.out_proj is the out_proj of a Mult"):
        load_adapter(base(Attention), tmp_path / "a")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.experts = nn.Module()
        self.experts.down_proj = nn.Parameter(torch.randn(2, 4, 5))


def test_packed_experts_are_refused_by_name(tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=2, target_modules=["linear"], target_parameters=["experts.down_proj"]
    )
    peft.get_peft_model(Experts(), config).save_pretrained(tmp_path)
    match = r"experts\.down_proj, which target_parameters names, is no parameter with packed"
    with pytest.raises(ValueError, match=match):
        load_adapter(Experts(), tmp_path)


def test_parameters_that_cannot_be_adapted_are_named_before_their_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(15)))
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["weight"])
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path)

    match = (
        r"fit the model:\n- weight, which target_parameters names, is no .*\n"
        r"- 0, 1, 10 and 12 more have"
    )
    with pytest.raises(ValueError, match=match):
        load_adapter(model, tmp_path)


def test_an_adapter_is_merged_as_by_peft(tmp_path: Path) -> None:
    folder, theirs = peft_folder(tmp_path, Attention, target_modules=["up"])
    ours = torch_dora.merge_dora(load_adapter(base(Attention), folder)).up.weight
    assert (theirs.merge_and_unload().up.weight - ours).abs().max() <= 1e-6


def test_the_advice_for_a_model_of_pefts_loses_no_adapter(tmp_path: Path) -> None:
    config = peft.LoraConfig(use_dora=True, r=2, target_modules=["0"])
    model = peft.get_peft_model(nn.Sequential(nn.Linear(3, 3)), config)
    for function in (torch_dora.merge_dora, lambda model: save_adapter(model, tmp_path)):
        with pytest.raises(TypeError, match=r"drops PEFT's adapters: first .* by model\.save_pret"):
            function(model)
