from collections.abc import Iterator

import jax
import pytest

from jax_dora.ops.mosaic.hopper import kernel_files
from jax_dora.tracing.registry import _BY_CLASS


@pytest.fixture(autouse=True)
def strict_jax() -> Iterator[None]:
    """Makes implicit promotion of dtypes or ranks an error in everything that a test traces."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True, scope="session")
def no_kernel_files() -> Iterator[None]:
    """Lowers every kernel anew with --keep-programs, too: a test may have changed a kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_files, "path", lambda name: None)
        yield


@pytest.fixture
def registrations() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = {key: dict(value) for key, value in _BY_CLASS.items()}
    yield
    _BY_CLASS.clear()
    _BY_CLASS.update(before)
