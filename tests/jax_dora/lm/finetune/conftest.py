"""What all tests of the script run under."""

import pytest

from jax_dora.lm.finetune import tiny
from tests.jax_dora.lm.finetune.runs import OPTIONS, finetune


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """In place of the suite's: optax's Adam multiplies floats with integers."""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> list[str]:
    """The flags for what --tiny makes, made once."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny.make_tiny_model(folder / "model")
    tiny.make_tiny_data(folder / "data.jsonl")
    return ["--model", str(folder / "model"), "--data", str(folder / "data.jsonl")]


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run that nothing interrupted, with its evaluation and both exports."""
    output = tmp_path_factory.mktemp("finished")
    eval_data = output / "eval.jsonl"
    eval_data.write_text('{"prompt": "3+4=", "completion": "7"}\n' * 5)
    command = ["--tiny", *OPTIONS, "--output", str(output), "--eval-data", str(eval_data)]
    command += ["--eval-every", "3"]
    assert (
        finetune([*command, "--merge", str(output / "merged"), "--report-to", "tensorboard"]) == 0
    )
    return output


@pytest.fixture
def command(finished, tmp_path):
    """The same run from the files that the first one made."""
    return [
        *("--model", str(finished / "tiny-model"), "--data", str(finished / "tiny.jsonl")),
        *("--eval-data", str(finished / "eval.jsonl"), "--eval-every", "3"),
        *OPTIONS,
        *("--output", str(tmp_path / "run")),
    ]
