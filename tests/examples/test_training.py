"""The short examples, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, *options: str, cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *options],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_layer(tmp_path):
    output = run("layer.py", cwd=tmp_path)
    assert "the new layer equals its base: True" in output
    assert "'magnitude': (256,)" in output


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("train.py", "40"), ("classify.py", "80")])
def test_adapter_learns(name, steps, tmp_path):
    output = run(name, "--steps", steps, cwd=tmp_path)
    first, last = map(float, re.findall(r"steps: ([\d.]+)$", output, re.MULTILINE))
    # Several times what the mean of four batches varies by.
    assert last < first - 0.1
    if name == "train.py":
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
