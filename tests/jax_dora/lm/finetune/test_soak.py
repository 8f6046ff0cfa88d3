"""Runs of the fine-tuning command under faults: `pytest -m slow --soak-runs 2000` for more."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jax_dora.lm.commands import main
from tests.jax_dora.lm.finetune.soak import Soak

ROOT = Path(__file__).parents[4]
# Shares of the runs.
WAYS = {
    "one device": (0.35, []),
    "one device, other seeds": (0.35, []),
    "nf4": (0.15, ["--quantize", "nf4"]),
    "mesh": (0.15, ["--mesh", "dp=2,fsdp=2,tp=2"]),
}
# The installed command, sent a signal as it begins to import one of its 1500 modules.
STARTING = """
import os, sys
left, signal = int(sys.argv.pop(1)), int(sys.argv.pop(1))
def hear(event, _):
    global left
    left -= event == "import"
    if not left:
        left = -1
        os.kill(os.getpid(), signal)
sys.addaudithook(hear)
from jax_dora_command import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_lost(way, inputs, tmp_path, request):
    share, flags = WAYS[way]
    soak = Soak(tmp_path, inputs, flags)
    first = 10_000 * list(WAYS).index(way)
    for seed in range(first, first + round(share * request.config.getoption("--soak-runs"))):
        print(f"seed {seed}: {soak.suffer(seed)}", flush=True)
        if not seed % 10:
            # A process may map only so many pieces of memory, of which every program has some.
            jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "number", "status"),
    [
        (7, signal.SIGKILL, -9),
        (1400, signal.SIGKILL, -9),
        *((at, signal.SIGINT, 130) for at in (12, 200, 700, 1100, 1440)),
    ],
)
def test_stopped_while_it_starts(at, number, status, tmp_path):
    command = ["finetune", "--tiny", "--output", str(tmp_path / "run"), "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", STARTING, str(at), str(int(number)), *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.strip() == ("Interrupted." if status == 130 else "")
    assert main(command) == 0
