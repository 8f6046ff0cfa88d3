"""What is wrong with a folder is named once, with the likely cause and what to do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import open_folder
from dora_common.peft.keys import key_of
from dora_common.peft.layers import Architecture, Layer
from dora_common.peft.writing import write

LAYERS = [
    Layer(f"layers.{index}.{name}_proj", "linear", 3, 4) for index in range(12) for name in "qkv"
]


def problems(
    folder: Path,
    *,
    drop: str = "nothing",
    targets: str = "qv",
    model: list[Layer] = LAYERS,
    **fields: Any,
) -> str:
    """Returns the error of a folder with adapters of the layers `targets`, without the tensors of
    the role `drop`, in a model with the layers `model`."""
    config = AdapterConfig(**({"r": 2, "use_dora": True, "lora_alpha": 4} | fields))
    tensors = {
        key_of(layer.name, role): np.ones(shape, np.float32)
        for layer in LAYERS
        if layer.name[-6] in targets
        for role, shape in layer.shapes(2).items()
        if role != drop
    }
    write(folder, config, lambda path: save_file(tensors, path), overwrite=False)
    with open_folder(folder, "np") as source:
        try:
            source.destinations(Architecture(model, {}, {}))
        except ValueError as error:
            return str(error)
    return ""


def test_a_misspelt_target_is_one_line(tmp_path):
    message = problems(tmp_path, target_modules=("q_pro", "v_proj"))
    assert len(message.splitlines()) == 2
    assert (
        "layers.0.q_proj, layers.1.q_proj, layers.10.q_proj and 9 more have tensors, but" in message
    )
    assert "target_modules has 'q_pro', which names no layer; the nearest are q_proj" in message


def test_another_target_is_two_lines(tmp_path):
    message = problems(tmp_path, target_modules=("k_proj", "v_proj"))
    first, second = message.splitlines()[1:]
    assert first.endswith("does not select them; target_modules is ('k_proj', 'v_proj')")
    assert "layers.0.k_proj, layers.1.k_proj, layers.10.k_proj and 9 more have no tensors" in second


def test_ends_of_names_as_one_expression_are_told_apart_from_a_list(tmp_path):
    message = problems(tmp_path, target_modules="q_proj|v_proj")
    assert len(message.splitlines()) == 2
    assert r"expected '.*\\.(q_proj|v_proj)', or a list" in message
    assert not problems(tmp_path / "corrected", target_modules=r".*\.(q_proj|v_proj)")
    message = problems(tmp_path / "flags", target_modules="(?i)Q_proj|V_proj")
    assert r"expected '(?i).*\\.(Q_proj|V_proj)', or a list" in message


def test_a_module_that_is_stored_whole_too_is_told(tmp_path):
    targets, saved = ("q_proj", "v_proj"), ("q_proj",)
    message = problems(tmp_path, target_modules=targets, modules_to_save=saved)
    assert message.splitlines()[1].endswith(
        f"target_modules is {targets}, modules_to_save is {saved}"
    )


@pytest.mark.parametrize("is_part", [True, False])
def test_an_adapter_of_a_part_or_of_the_whole_is_one_line(is_part, tmp_path):
    old, new = ("layers", "a.b.layers") if is_part else ("layers.", "")
    model = [replace(layer, name=layer.name.replace(old, new, 1)) for layer in LAYERS]
    message = problems(tmp_path, target_modules=("q_proj", "v_proj"), model=model)
    assert len(message.splitlines()) == 2
    expected = (
        "is of the part 'a.b' of this model, where layers.0.q_proj is a.b.layers.0.q_proj;"
        if is_part
        else "has this one as its part 'layers', so that layers.0.q_proj is 0.q_proj here;"
    )
    assert expected in message


def test_layers_that_are_in_no_part_are_listed(tmp_path):
    model = [replace(layer, name=f"a.{layer.name}") for layer in LAYERS[2:]]
    message = problems(tmp_path, target_modules=("q_proj", "v_proj"), model=model)
    assert "layers.0.q_proj.lora_A.weight finds no layer that can be adapted; the near" in message
    assert message.endswith(" more")


def test_missing_magnitudes_say_what_to_do(tmp_path):
    message = problems(tmp_path, drop="magnitude", target_modules=("q_proj", "v_proj"))
    assert len(message.splitlines()) == 2
    assert "base_model.model.layers.0.q_proj.lora_magnitude_vector, base_model.model." in message
    assert "and 21 more are missing; use_dora is true" in message
    assert "set use_dora to false" in message
    assert "docs/magnitudes.md" in message
    assert (Path(__file__).parents[3] / "docs" / "magnitudes.md").exists()
    other = problems(tmp_path / "other", drop="lora_b", target_modules=("q_proj", "v_proj"))
    assert "use_dora" not in other


def test_a_missing_factor_says_what_to_do(tmp_path):
    message = problems(tmp_path, drop="lora_b", target_modules=("q_proj", "v_proj"))
    assert len(message.splitlines()) == 2
    assert "q_proj.lora_B.weight and 21 more are missing; expected lora_A and lora_B of" in message
    assert "save or copy the adapter again" in message
    # The other way out that it names, with the layer's other tensors left out too.
    assert not problems(tmp_path / "other", targets="v", target_modules=("v_proj",))


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_an_unused_pattern_is_named(field, tmp_path, caplog):
    targets = ("q_proj", "v_proj")
    pattern = {"q_prj": 2, r"^layers\.0\.k_proj": 2, ".*v_proj": 2, r"layers.1.v_proj": 2}
    assert not problems(tmp_path, target_modules=targets, **{field: pattern})
    found = "\n".join(caplog.messages)
    assert len(caplog.messages) == 3
    assert f"{field} has the key 'q_prj', which is ignored: it matches no adapted layer; " in found
    assert "the nearest are q_proj, " in found
    assert (
        "k_proj', which is ignored: it matches no adapted layer; the nearest are layers.0." in found
    )
    assert "'layers.1.v_proj', which is ignored: earlier keys match" in found
    caplog.clear()
    used = {"q_proj": 2, r"layers\.\d\.v_proj": 2}
    assert not problems(tmp_path / "used", target_modules=targets, **{field: used})
    assert not caplog.messages


def test_an_unused_rank_explains_the_shapes_that_follow(tmp_path):
    fields: dict[str, Any] = {"r": 1, "rank_pattern": {"q_proj": 2, "v_prj": 2}}
    fields["alpha_pattern"] = {"typo": 3}
    message = problems(tmp_path, target_modules=("q_proj", "v_proj"), **fields)
    assert len(message.splitlines()) == 3
    assert "the key 'v_prj'" in message.splitlines()[1]
    assert "v_proj and 9 more have tensors of rank 2; expected rank 1, by r " in message


def test_magnitudes_without_use_dora_are_one_line(tmp_path):
    fields = {"use_dora": False, "rank_pattern": {"typo": 3}}
    message = problems(tmp_path, target_modules=("q_proj", "v_proj"), **fields)
    assert len(message.splitlines()) == 2
    assert "and 21 more are magnitudes; expected none, since use_dora is false: if" in message


def test_a_misspelt_field_gets_its_name():
    with pytest.raises(
        NotImplementedError, match=r"lora_alfa = 4: .*; PEFT's name is 'lora_alpha'$"
    ):
        AdapterConfig.from_json('{"peft_type": "LORA", "r": 2, "lora_alfa": 4}')
    with pytest.raises(NotImplementedError, match=r"computes$"):
        AdapterConfig.from_json('{"peft_type": "LORA", "r": 2, "something": 4}')


def test_the_folder_of_a_model_is_told(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with (
        pytest.raises(FileNotFoundError, match="the folder is a model's"),
        open_folder(tmp_path, "np"),
    ):
        pass
