"""The settings of a run, without the command."""

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest
from rich.console import Console

from jax_dora.lm import finetune
from jax_dora.lm.commands import parser
from jax_dora.lm.commands.flags import flags_of, make_settings
from tests.jax_dora.lm.finetune.runs import OPTIONS, last_of, metrics

GIVEN = (Path("model"), [Path("data.jsonl")])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank=0: expected an integer from 1 to 1,048,576"),
        ({"rank": True}, "rank=True: expected an integer"),
        ({"rank": None}, "rank=None: expected an integer"),
        ({"alpha": float("nan")}, "alpha=nan: expected a number above 0"),
        ({"learning_rate": "1e-4"}, "learning_rate='1e-4': expected a number above 0"),
        ({"split": "some"}, "split='some': expected 'text' or 'all' or 'none'"),
        ({"mesh": {"ep": 2}}, r"mesh={'ep': 2}: expected 'auto', or sizes of dp, fsdp, tp"),
        ({"mesh": {}}, "mesh={}: expected 'auto'"),
        ({"target": "("}, r"target='\(': expected a regular expression"),
        ({"steps": 2, "epochs": 1}, "epochs=1: expected `steps` or `epochs`, not both"),
        ({"patience": 2}, "patience=2: expected `eval_data` as well"),
        ({"data": "data.jsonl"}, "data='data.jsonl': expected a list of files"),
        ({"data": []}, r"data=\(\): expected a file of examples"),
        ({"merge": ""}, "merge='': expected a path"),
    ],
)
def test_a_setting_that_is_wrong_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(finetune.Settings(*GIVEN), **changes)


def test_paths_may_be_texts_and_numbers_as_large_as_float32_holds():
    settings = finetune.Settings("model", ["data.jsonl"], learning_rate=1e30)
    assert settings == finetune.Settings(*GIVEN, learning_rate=1e30)


def test_each_setting_has_one_flag_with_its_default():
    choices = (action.choices for action in parser()._actions)
    [commands] = (one for one in choices if isinstance(one, dict))
    names = {field.name for field in dataclasses.fields(finetune.Settings)}
    assert names == get_type_hints(finetune.Settings).keys() - {"DOMAINS"}
    assert names <= flags_of(commands["finetune"]).keys()
    args = parser().parse_args(["finetune", "--model", "model", "--data", "data.jsonl"])
    assert make_settings(finetune.Settings, args) == finetune.Settings(*GIVEN)


@pytest.mark.slow
def test_a_run_from_a_program_is_that_of_the_command(inputs, tmp_path):
    options = [*inputs, *OPTIONS, "--eval-data", inputs[3], "--output", str(tmp_path / "run")]
    args = parser().parse_args(["finetune", *last_of(options)])
    result = finetune.run(make_settings(finetune.Settings, args), console=Console(quiet=True))
    assert result.metrics == metrics(tmp_path / "run")
    assert (result.adapter, result.best) == (tmp_path / "run/adapter", tmp_path / "run/best")
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()
    assert not result.is_interrupted
