"""The settings of a run, without the command."""

import dataclasses
import re
import sys
import types
from pathlib import Path
from typing import Any, get_type_hints

import jax
import numpy as np
import optax
import pytest
import torch
import transformers
from rich.console import Console

from jax_dora.lm import finetune
from jax_dora.lm.commands import main, parser
from jax_dora.lm.commands.flags import flags_of, make_settings
from jax_dora.lm.commands.main import parse
from jax_dora.lm.finetune import settings, training
from jax_dora.lm.finetune.log import Log, reporting
from tests.jax_dora.lm.finetune.runs import OPTIONS, assert_one_line, last_of, metrics

GIVEN = (Path("model"), [Path("data.jsonl")])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank=0: expected an integer from 1 to 1,048,576"),
        ({"rank": True}, "rank=True: expected an integer"),
        ({"method": "qlora"}, "method='qlora': expected 'dora' or 'lora'"),
        ({"layers": 1}, "layers=1: expected a list of indices"),
        ({"layers": [-1]}, "layers, modules_to_save: expected indices from 0"),
        ({"modules_to_save": "norm"}, "modules_to_save='norm': expected a list of names"),
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
        ({"optimizer": "adamv"}, "optimizer='adamv': expected 'adamw' or"),
        ({"optimizer": "sgd", "weight_decay": 0.1}, "weight_decay=0.1: expected 0, since optimi"),
        ({"schedule": "exponential"}, "schedule='exponential': expected a `final_rate` above 0"),
        ({"schedule": "constant", "final_rate": 0.1}, "final_rate=0.1: expected 0 for schedule"),
        ({"report_to": "x"}, "report_to='x': expected 'tensorboard' or 'wandb' or 'trackio'"),
    ],
)
def test_a_setting_that_is_wrong_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(finetune.Settings(*GIVEN), **changes)


def test_paths_may_be_texts_and_numbers_as_large_as_float32_holds():
    settings = finetune.Settings("model", ["data.jsonl"], learning_rate=1e30)
    assert settings == finetune.Settings(*GIVEN, learning_rate=1e30)


def commands():
    choices = (action.choices for action in parser()._actions)
    [found] = (one for one in choices if isinstance(one, dict))
    return found


def test_helps_name_flags_of_their_command():
    for command in commands().values():
        named = re.findall(r"--[a-z-]+|`", " ".join(one.help or "" for one in command._actions))
        assert {*named} <= {flag for one in command._actions for flag in one.option_strings}


def test_each_setting_has_one_flag_with_its_default():
    names = {field.name for field in dataclasses.fields(finetune.Settings)}
    assert names == get_type_hints(finetune.Settings).keys() - {"DOMAINS"}
    assert names <= flags_of(commands()["finetune"]).keys()
    args = parser().parse_args(["finetune", "--model", "model", "--data", "data.jsonl"])
    assert make_settings(finetune.Settings, args) == finetune.Settings(*GIVEN)


def test_a_file_of_settings(tmp_path):
    """It is what its lines would be as flags, which come before it."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: model\ndata: [a.jsonl, b.csv]\nlearning_rate: 1e-3\nrank: 8\nrslora: true\n"
        "end-token: <|end|>\nmesh: fsdp=2,tp=4\ncolumns: {prompt: question}\nact_qtype:\n"
        "eval_data: b.csv\nweight-decay: 1\nmethod: lora\nlayers: [1, 0]\nmodules_to_save: norm\n"
        "from-adapter: run\n"
    )
    flags = "--model model --data c.jsonl --learning-rate 1e-3 --rank 64 --rslora --weight-decay 1"
    flags += " --end-token <|end|> --mesh fsdp=2,tp=4 --columns prompt=question --eval-data b.csv"
    flags += " --method lora --layers 0 1 --modules-to-save norm --from-adapter run"
    given = ["finetune", "--settings", str(file), "--rank", "64", "--data", "c.jsonl"]
    ours = make_settings(finetune.Settings, parse(given))
    assert ours == make_settings(finetune.Settings, parse(["finetune", *flags.split()]))
    assert make_settings(finetune.Settings, parse(given[:3])).data == (
        Path("a.jsonl"),
        Path("b.csv"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1", "lerning_rate is unknown; did you mean learning_rate?"),
        ("rank: 4\nrank: 5", "rank given twice"),
        ("rslora: 1\nuse_rslora: 1", "rslora: it is 1; expected true or false"),
        ("rslora: true\nuse_rslora: true", "use_rslora is given twice"),
        ("learning_rate: fast", "learning_rate: could not convert string to float: 'fast'"),
        ("mesh: x", "mesh: 'x' is not a mesh: expected auto"),
        ("- 1", "expected a mapping"),
        ("a: [", "while parsing"),
    ],
)
def test_a_file_of_settings_that_is_wrong(text, message, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert main(["finetune", "--settings", str(file)]) == 2
    assert_one_line(capsys, f"Error: --settings {file}: {message}")


def test_schedules_are_those_of_transformers():
    peak, steps = 0.5, 8
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    theirs = {
        "polynomial": transformers.get_polynomial_decay_schedule_with_warmup(
            optimizer, 0, steps, lr_end=0.1 * peak, power=2
        ),
        "cosine": transformers.get_scheduler(
            "cosine_with_min_lr", optimizer, 0, steps, {"min_lr_rate": 0.1}
        ),
    }
    ours = {
        name: training.make_schedule(
            finetune.Settings(*GIVEN, schedule=name, learning_rate=peak, final_rate=0.1), steps
        )
        for name in (*theirs, "exponential")
    }
    for name, schedule in theirs.items():
        expected = [peak * schedule.lr_lambdas[0](step) for step in range(steps + 1)]
        rates = [ours[name](step) for step in range(steps + 1)]
        np.testing.assert_allclose(rates, expected, rtol=1e-6)
    rates = [ours["exponential"](step) for step in (0, 4, 8)]
    np.testing.assert_allclose(rates, [peak, peak * 0.1**0.5, peak * 0.1], rtol=1e-6)


@pytest.mark.parametrize("name", settings.OPTIMIZERS)
def test_optimizers_are_those_of_optax(name):
    decays = name in settings.DECAYING
    decay = 0.1 if decays else 0.0
    ours = training.make_optimizer(name, lambda _: 0.5, clip=1.0, weight_decay=decay)
    arrays = {"lora_b": np.full((2, 3), 0.2, np.float32), "magnitude": np.ones(3, np.float32)}
    gradients = jax.tree.map(lambda x: 0.1 * x, arrays)
    updates: Any = ours.update(gradients, ours.init(arrays), arrays)[0]
    for key, array in arrays.items():
        options = {"weight_decay": decay * (key == "lora_b")} if decays else {}
        plain = getattr(optax, name)(0.5, **options)
        expected, _ = plain.update(gradients[key], plain.init(array), array)
        np.testing.assert_allclose(updates[key], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_metrics_go_to_a_package(name, monkeypatch, tmp_path):
    calls = []
    stub = types.SimpleNamespace(
        init=lambda **options: calls.append(options),
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, name, stub)
    line = {"step": 3, "loss": 1.0}
    with reporting(name, tmp_path / "run", 2, {"rank": 4}) as callbacks:
        with Log(None, 2, *callbacks) as log:
            log.add(line)
    begin = {"project": "jax-dora", "name": "run", "config": {"rank": 4}}
    assert calls == [begin, (3, {"loss": 1.0}), "finish"]


@pytest.mark.slow
def test_a_run_from_a_program_is_that_of_the_command(inputs, tmp_path):
    options = [*inputs, *OPTIONS, "--eval-data", inputs[3], "--output", str(tmp_path / "run")]
    args = parser().parse_args(["finetune", *last_of(options)])
    result = finetune.run(make_settings(finetune.Settings, args), console=Console(quiet=True))
    assert result.metrics == metrics(tmp_path / "run")
    assert (result.adapter, result.best) == (tmp_path / "run/adapter", tmp_path / "run/best")
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()
    assert not result.is_interrupted
