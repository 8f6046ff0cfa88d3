"""The run of the fine-tuning command that most of its tests look at, and what it says."""

import json

import numpy as np
from rich.console import Console
from safetensors.numpy import load_file

from jax_dora.lm.commands import main, parser
from jax_dora.lm.commands.flags import make_settings
from jax_dora.lm.finetune import Settings
from jax_dora.lm.finetune.plan import Plan

FP8 = "float8_e4m3fn"


STEPS = 6


OPTIONS = (
    *("--rank", "4", "--dropout", "0.1", "--length", "32", "--batch", "2", "--accumulate", "2"),
    *("--steps", str(STEPS), "--learning-rate", "1e-2", "--weight-decay", "0.1", "--warmup", "2"),
    *("--checkpoint-every", "2"),
)


def finetune(options):
    return main(["finetune", *last_of(options)])


def plan_of(options, *, every=False, quiet=True):
    """The plan of a run; with `every`, of options that are given several times."""
    args = parser().parse_args(["finetune", *(options if every else last_of(options))])
    return Plan(make_settings(Settings, args), Console(quiet=quiet))


def last_of(options):
    """The options without those that later ones replace. The command refuses to take both."""
    found, name = {None: []}, None
    for option in options:
        if option.startswith("--"):
            name = option.partition("=")[0]
            found[name] = []
        found[name].append(option)
    return [word for words in found.values() for word in words]


def told(capsys):
    """What was printed, on one line."""
    return " ".join("".join(capsys.readouterr()).split())


def assert_one_line(capsys, message):
    """Of what was said on standard error."""
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_speed(lines):
    return [{name: x for name, x in line.items() if name != "tokens_per_second"} for line in lines]


def same_adapter(a, b, best="adapter"):
    ours = load_file(a / "adapter" / "adapter_model.safetensors")
    theirs = load_file(b / best / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])
