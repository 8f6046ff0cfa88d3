"""What all tests of the script run under."""

import pytest

from jax_dora.finetune import tiny


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
