"""What all tests of the script run under."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """In place of the suite's: optax's Adam multiplies floats with integers."""


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Models this small take far longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
