"""What a terminal shows while a run compiles and trains."""

import io
import re

import jax.numpy as jnp
import pytest
from rich.console import Console

from jax_dora.lm.commands import finetune, main
from jax_dora.lm.finetune import training
from jax_dora.lm.finetune.run import Run

STEPS = 3
OPTIONS = (
    *("--rank", "2", "--length", "24", "--batch", "2", "--accumulate", "1", "--samples", "0"),
    *("--target", "model/layers/mlp/down_proj", "--steps", str(STEPS)),
)


@pytest.mark.slow
def test_a_line_tells_of_compiling_then_of_loss_speed_and_the_time_left(
    inputs, tmp_path, monkeypatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(
        finetune, "_Console", lambda *_, **__: Console(file=shown, force_terminal=True, width=120)
    )
    losses = iter([9.5, 8.25, 7.125])

    def step(*_: object) -> training.Metrics:
        return training.Metrics(jnp.float32(next(losses)), jnp.float32(1), jnp.bool_(True))

    monkeypatch.setattr(Run, "_step", step)
    assert main(["finetune", *inputs, *OPTIONS, "--output", str(tmp_path / "run")]) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    lines = [line.strip("━╸╺ ") for line in re.split(r"[\r\n]+", plain) if f"/{STEPS} " in line]
    assert re.fullmatch(rf"0/{STEPS} compiling\s+-:--:--", lines[0])
    last = rf"{STEPS}/{STEPS} loss 7\.1250 [\d,]+ tokens/s \d:\d\d:\d\d"
    assert re.fullmatch(last, lines[-1])
