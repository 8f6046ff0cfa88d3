"""Serving with transformers, measured."""

import pytest

from benchmarks import __main__ as command
from benchmarks import results, torch_serve


@pytest.mark.parametrize(
    ("only", "ratios"), [((), [None, 2, 2, 2]), (("PEFT LoRA", "PEFT DoRA"), [None, None])]
)
def test_a_ratio_is_over_transformers(only, ratios, tmp_path, monkeypatch) -> None:
    """And left out where that is not measured."""
    shown = {"first_token_ms": 1.0, "first_token_p90_ms": 2.0, "generates": 1}
    monkeypatch.setattr(torch_serve, "TINY", torch_serve.TINY._replace(adapters=(1,)))
    monkeypatch.setattr(
        torch_serve,
        "_served",
        lambda settings, kind, count, device: shown | {"tokens_per_s": 5.0 * (1 + count)},
    )
    out = tmp_path / "torch.jsonl"
    level = ["serve", "--torch", "--quick", "--device", "cpu", "--out", str(out)]
    assert command.main(level + [word for kind in only for word in ("--only", kind)]) == 0
    assert [row.get("of_base") for row in results.read(out)[1]] == ratios
