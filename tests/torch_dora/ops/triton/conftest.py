import pytest


@pytest.fixture
def fresh_launches(monkeypatch):
    """Launches that were kept with other settings are not found, and none stays for other tests."""
    from torch_dora.ops import plan
    from torch_dora.ops.triton import expand_compose, one_pass_norm

    kept = one_pass_norm.prepared, one_pass_norm._passes, expand_compose.prepared
    kept += (expand_compose._same,)
    for launches in kept:
        launches.cache_clear()
    monkeypatch.setattr(plan, "_PLANS", {})
    yield
    for launches in kept:
        launches.cache_clear()
