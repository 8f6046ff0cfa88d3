"""Runs of the fine-tuning command under faults: `pytest -m slow --soak-runs 200` for more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_nothing_is_lost(request):
    runs = request.config.getoption("--soak-runs")
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax_dora.finetune.soak", "--runs", str(runs)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seed ") == runs
