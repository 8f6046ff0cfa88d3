from collections.abc import Iterator

import pytest

from jax_dora.weights.registry import _BY_CLASS


@pytest.fixture
def registrations() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = {key: dict(value) for key, value in _BY_CLASS.items()}
    yield
    _BY_CLASS.clear()
    _BY_CLASS.update(before)
