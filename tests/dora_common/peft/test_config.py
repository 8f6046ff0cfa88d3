"""adapter_config.json: matched as PEFT matches, refused by name, written as PEFT writes."""

import json
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.numpy import save_file

from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import CONFIG, TENSORS, open_folder
from dora_common.peft.names import patterns_for, targets_for

MODULES = [
    f"{stem}.{index}.{part}"
    for stem in ("model.layers", "model.decoder.h", "blocks")
    for index in (0, 1, 2, 10)
    for part in (
        "self_attn.q_proj",
        "self_attn.my_q_proj",
        "mlp.experts.1.up_proj",
        "q_proj",
        "score.q_proj",
    )
] + ["lm_head", "score", "model.score", "q_proj", "a.q_proj"]


def described(**fields: Any) -> str:
    return json.dumps(
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]} | fields
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["self_attn.q_proj", "up_proj"]},
        {"target_modules": ["model.layers.1.q_proj", "lm_head"]},
        {"target_modules": r".*\.(0|10)\..*q_proj"},
        {"target_modules": "q_proj"},
        {"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj"], "modules_to_save": ["score"]},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 10]},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "layers_pattern": "h"},
        {"target_modules": ["q_proj"], "layers_to_transform": [2], "layers_pattern": ["x", "h"]},
    ],
    ids=str,
)
def test_layers_are_selected_as_peft_selects_them(fields: dict[str, Any]) -> None:
    ours, theirs = AdapterConfig.from_json(described(**fields)), LoraConfig(**fields)

    selected = [name for name in MODULES if ours.selects(name, is_linear=True)]

    assert selected == [name for name in MODULES if check_target_module_exists(theirs, name)]
    assert 0 < len(selected) < len(MODULES)


def test_all_linear_selects_linear_layers_that_nothing_excludes() -> None:
    config = AdapterConfig.from_json(
        described(target_modules="all-linear", exclude_modules=["b"], modules_to_save=["head"])
    )

    assert [config.selects(name, is_linear=True) for name in ("a", "x.b", "head")] == [1, 0, 0]
    assert not config.selects("a", is_linear=False)


def test_ranks_and_alphas_are_matched_as_peft_matches_them() -> None:
    patterns = {"q_proj": 2, r"^model\.layers\.1\..*": 3, "layers.*up_proj": 4, "score|lm_head": 5}
    config = AdapterConfig.from_json(described(rank_pattern=patterns, alpha_pattern=patterns))

    for name in MODULES:
        expected = patterns.get(get_pattern_key(list(patterns), name))
        assert config.rank_of(name) == (expected or 8)
        assert config.alpha_of(name) == (expected or 16)
    assert {config.rank_of(name) for name in MODULES} == {2, 3, 4, 5, 8}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"layer_replication": [[0, 4]]}, ["layer_replication"]),
        ({"lora_bias": True, "use_qalora": True}, ["lora_bias", "use_qalora"]),
        ({"alora_invocation_tokens": [1]}, ["alora_invocation_tokens"]),
        ({"a_field_of_the_future": 0.5}, ["a_field_of_the_future = 0.5"]),
        ({"init_lora_weights": "pissa_niter_16"}, ["init_lora_weights", "pissa_niter_16"]),
        ({"peft_type": "LOHA"}, ["peft_type", "LOHA"]),
        ({"peft_type": "IA3", "r": None, "lora_alpha": None}, ["peft_type", "IA3"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(NotImplementedError) as refusal:
        AdapterConfig.from_json(described(**fields))

    assert all(name in str(refusal.value) for name in names)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", True),
        ("r", 2.0),
        ("lora_alpha", "16"),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("target_modules", []),
        ("target_modules", ["a", 1]),
        ("target_modules", "(["),
        ("target_modules", "[[a]"),
        ("target_modules", {"a": 1}),
        ("exclude_modules", 3),
        ("rank_pattern", {"a": 0}),
        ("rank_pattern", {"(": 4}),
        ("rank_pattern", ["a"]),
        ("alpha_pattern", {"a": None}),
        ("use_dora", 1),
        ("use_rslora", "yes"),
        ("use_rslora", [""]),
        ("lora_alpha", ""),
        ("bias", "some"),
        ("lora_dropout", 1.0),
        ("layers_to_transform", [-1]),
        ("layers_pattern", ["h"]),
        ("modules_to_save", [["a"]]),
        ("fan_in_fan_out", "no"),
        ("task_type", 3),
    ],
)
def test_a_malformed_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=field.replace("layers_pattern", "layers_")):
        AdapterConfig.from_json(described(**{field: value}))


def test_indices_beside_an_expression_are_refused() -> None:
    with pytest.raises(ValueError, match="layers_to_transform"):
        AdapterConfig.from_json(described(target_modules=".*", layers_to_transform=[0]))


@pytest.mark.parametrize("field", ["peft_type", "r", "lora_alpha"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        AdapterConfig.from_json(described(**{field: None}))


@pytest.mark.parametrize("fields", [{}, {"target_modules": None}])
def test_what_a_configuration_lacks_is_as_in_peft(fields: dict[str, Any], tmp_path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2} | fields))
    save_file({"x.a.lora_A.weight": np.ones((2, 3), np.float32)}, tmp_path / TENSORS)

    with open_folder(tmp_path, "np") as source:
        assert source.config.lora_alpha == LoraConfig().lora_alpha
        assert source.config.target_modules == ("x.a",)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"r": 1, "r": 2}', "[" * 100_000, "nul", '{"r": NaN}']
)
def test_what_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        AdapterConfig.from_json(text)


def test_nvlabs_configuration_is_dora() -> None:
    nvlabs = {"peft_type": "DORA", "dora_simple": True, "merge_weights": False, "enable_lora": None}

    assert AdapterConfig.from_json(described(**nvlabs)).use_dora
    with pytest.raises(NotImplementedError, match="Wdecompose_target_modules"):
        AdapterConfig.from_json(described(**nvlabs, Wdecompose_target_modules=["q_proj"]))


@pytest.mark.parametrize("exclude", [None, ("a", "b"), ".*head"])
def test_peft_reads_what_is_written(exclude: Any, tmp_path) -> None:
    config = AdapterConfig(
        r=4,
        lora_alpha=9,
        target_modules=("q_proj", "v_proj"),
        use_dora=True,
        use_rslora=True,
        rank_pattern={"^a\\.q_proj": 3},
        alpha_pattern={"v_proj": 2.5},
        exclude_modules=exclude,
        layers_to_transform=(0, 2),
        layers_pattern=("h",),
        modules_to_save=("score",),
        bias="lora_only",
        lora_dropout=0.25,
        base_model_name_or_path="base",
        task_type="CAUSAL_LM",
    )
    text = config.to_json()
    (tmp_path / "adapter_config.json").write_text(text)

    theirs = LoraConfig.from_pretrained(str(tmp_path))

    assert AdapterConfig.from_json(text) == config
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    for name, value in json.loads(text).items():
        found = getattr(theirs, name)
        assert (sorted(found) if isinstance(found, set) else found) == value, name


def test_what_peft_writes_is_read(tmp_path) -> None:
    LoraConfig(
        r=4, use_dora=True, target_modules=["b", "a"], rank_pattern={"a": 2}, task_type="CAUSAL_LM"
    ).save_pretrained(str(tmp_path))

    config = AdapterConfig.from_json((tmp_path / "adapter_config.json").read_text())

    assert (config.r, config.lora_alpha, config.use_dora) == (4, 8, True)
    assert set(config.target_modules) == {"a", "b"}
    assert config.rank_of("x.a") == 2


@pytest.mark.parametrize("version", [None, "", "x", "0.18", "0.19", "0.19.0", "0.9.9.dev0"])
def test_square_experts_of_an_old_or_unknown_peft_are_refused(version: str | None) -> None:
    config = AdapterConfig.from_json(described(peft_version=version))
    assert f"peft_version is {version or 'absent'}, and" in config.square_experts_refusal


@pytest.mark.parametrize("version", ["0.19.1", "0.20", "0.21.2.dev0", "1.0"])
def test_square_experts_of_a_new_peft_are_not(version: str) -> None:
    assert not AdapterConfig.from_json(described(peft_version=version)).square_experts_refusal


def test_patterns_give_every_layer_its_own() -> None:
    values = {"a.q": 4, "b.a.q": 8, "c": 4, "aXq": 16, "a.q+": 2}
    default, pattern = patterns_for(values)
    config = AdapterConfig(r=default, lora_alpha=1, target_modules=(".",), rank_pattern=pattern)

    assert default == 4
    assert {name: config.rank_of(name) for name in values} == values


@pytest.mark.parametrize(
    ("adapted", "others", "expected"),
    [
        (["a.q", "b.q", "a.v"], ["a.k", "a"], ("q", "v")),
        (["a.q"], ["b.q"], ("a.q",)),
        (["q"], ["b.q"], "q"),
        (["a.q", "c"], ["b.a.q"], r"a\.q|c"),
        (["q"], ["a.q.0"], "q"),
    ],
)
def test_targets_select_the_adapted_layers_alone(
    adapted: list[str], others: list[str], expected: Any
) -> None:
    targets = targets_for(adapted, [*adapted, *others])
    config = AdapterConfig(r=1, lora_alpha=1, target_modules=targets)
    theirs = LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets))

    assert targets == expected
    containers = {name.rpartition(".")[0] for name in others if "." in name}
    for name in [*adapted, *others, *containers]:
        assert config.selects(name, is_linear=True) == (name in adapted)
        assert bool(check_target_module_exists(theirs, name)) == (name in adapted)
