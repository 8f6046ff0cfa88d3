"""One run in a process of its own: `python -m parity.training.worker SPEC.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from parity.sides import SIDES
from parity.training import adapter as adapters
from parity.training.settings import Settings
from parity.training.variants import Variant

PROGRESS_LINES = 8


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    given = spec["settings"]
    settings = Settings(**given | {"betas": tuple(given["betas"])})
    device, base = spec["device"], Path(spec["base"])
    if spec["variant"] is None:
        _set_up_jax(device)
        from parity.sides.jax.training import make_base

        losses = make_base(settings, base, _progress("base", settings.base_steps))
        Path(spec["result"]).write_text(json.dumps(losses))
        return

    variant, seed = Variant(**spec["variant"]), spec["seed"]
    start = adapters.initial(settings, base, seed)
    if variant.perturbed:
        start = adapters.one_ulp_off(start, seed)
    progress = _progress(f"seed {seed}, {variant.label}", settings.steps)
    if variant.framework == "jax":
        _set_up_jax(device)
    else:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
    train = SIDES[variant.framework].training.train
    run = train(settings, base, start, seed, variant.implementation, progress, device)
    run.save(Path(spec["result"]))


def _set_up_jax(device: str) -> None:
    import jax

    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        sys.exit("--device cuda: jax sees no GPU; pip install 'jax-dora[cuda13]'")


def _progress(label: str, steps: int):
    every = max(1, steps // PROGRESS_LINES)
    told = 0

    def progress(step: int, loss: float) -> None:
        nonlocal told
        if step // every > told or step == steps:
            told = step // every
            print(f"{label}: step {step} of {steps}, loss {loss:.4f}", file=sys.stderr, flush=True)

    return progress


if __name__ == "__main__":
    # The largest library's threads are many enough.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
