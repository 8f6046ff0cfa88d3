"""What the tests of the server share."""

from pathlib import Path

import pytest

from jax_dora.lm.serve import Settings
from tests.jax_dora.lm.serve import serving

NAMES = ("french", "german", "lora", "small")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The tiny model's folder."""
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    serving.make_model(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(model, tmp_path_factory) -> Path:
    """A folder of four adapters: DoRA, rsLoRA, LoRA, of several ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        serving.write_adapter(model, folder / name, seed)
    return folder


@pytest.fixture(scope="session")
def reference(model) -> serving.Reference:
    return serving.Reference(model)


@pytest.fixture(scope="session")
def settings(model, adapters) -> Settings:
    """Few slots and small sizes, so that what can overflow does."""
    return Settings(
        model,
        adapters,
        port=0,
        slots=3,
        max_rank=8,
        batch=4,
        max_length=96,
        chunk=32,
        queue=16,
        scan_seconds=0.05,
        body_bytes=2000,
    )


@pytest.fixture(scope="session")
def served(settings):
    """One server for all tests that do it no harm."""
    with serving.serving(settings) as both:
        yield both
