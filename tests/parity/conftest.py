import pytest

from parity.report import Report


@pytest.fixture
def report():
    """A report in memory alone."""
    return Report(None, "test", {})
