"""Lets runs of `jax-dora finetune` suffer what a seed draws, and holds their ends to a run that
nothing has happened to."""

import contextlib
import random
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

from dora_common.disk import locked
from tests.jax_dora.lm.finetune import faults
from tests.jax_dora.lm.finetune.runs import metrics, without_speed

STEPS = 4
OPTIONS = (
    *("--rank", "2", "--dropout", "0.1", "--length", "16", "--steps", str(STEPS), "--samples", "0"),
    *("--batch", "4", "--accumulate", "2", "--learning-rate", "1e-2", "--schedule", "constant"),
    *("--eval-every", "2", "--checkpoint-every", "1", "--keep", "2"),
    *("--target", "model/layers/.*/(q|down)_proj"),
)
WRONG = (
    *(["--batch", "0"], ["--seed", "-1"], ["--target", "("], ["--target", ".*"], ["--keep", "0"]),
    *(["--rank", "-3"], ["--clip", "nan"], ["--steps", "0"], ["--unknown"], ["--data", "nowhere"]),
    *(["--warmup", str(STEPS)], ["--eval-data", "/"], ["--model", "/"], ["--alpha", "0"]),
    *(["--mesh", "tp=3"], ["--quantize", "int3"], ["--process", "1"], ["--epochs", "inf"]),
)
KINDS = (
    *("kill", "kill", "kill", "interrupt", "interrupt", "twice", "full", "limit", "memory"),
    *("flag", "shorter", "in use", "input"),
)


class Fault(NamedTuple):
    """What happens to a command.

    Attributes:
      flags: which it has beside those of the run.
      under: what it is run under.
      statuses: how it may end.
    """

    name: str
    flags: list[str]
    under: contextlib.AbstractContextManager[Any]
    statuses: set[int]


class Soak:
    """Runs with the same flags.

    Attributes:
      touches: how often a run that nothing happens to touches its files.
      expected: its metrics, and the bytes of its adapters.
    """

    def __init__(self, folder: Path, inputs: list[str], flags: list[str]) -> None:
        self.folder, (_, model, _, data) = folder, inputs
        self.model, self.data = Path(model), Path(data)
        self.flags = ["finetune", *inputs, "--eval-data", str(folder / "eval.jsonl")]
        self.flags += [*OPTIONS, *flags]
        (folder / "eval.jsonl").write_text('{"prompt": "3+4=", "completion": "7"}\n' * 5)
        whole = faults.Command(folder / "whole")
        with whole.watched(0, faults.interrupt) as watch:
            status, told = whole.run([*self.flags, "--output", str(whole.folder)])
        assert status == 0, told
        self.touches = watch.count
        self.expected = without_speed(metrics(whole.folder)), adapters_of(whole.folder)

    def suffer(self, seed: int) -> str:
        """Lets one run suffer, takes it up, and checks its end; returns what happened to it.

        Raises:
          AssertionError: a traceback, an exit status that the fault does not explain, or another
            result.
        """
        chance = random.Random(seed)
        command = faults.Command(self.folder / f"run{seed}")
        own = [*self.flags, "--output", str(command.folder)]
        story, damaged = [], False
        for _ in range(chance.randint(1, 2)):
            fault = self._fault(command, chance)
            resume = ["--resume"] * (chance.random() < 0.8)
            with fault.under:
                status, told = command.run([*own, *fault.flags, *resume])
            story.append(f"{fault.name}{' --resume' * bool(resume)}: {status}")
            # A run that is there is refused without --resume, one with nothing sound too, and one
            # that has gone further than it is to go.
            refused = ("already contains a run", "none of the checkpoints", "after the last of")
            may_refuse = status == 2 and any(one in told for one in refused)
            assert status in fault.statuses or may_refuse, f"seed {seed}: {story}\n{told}"
            if chance.random() < 0.3 and (files := files_of(command.folder)):
                file = chance.choice(files)
                story.append(faults.damage(file, chance))
                damaged |= file.name == "metrics.jsonl"
        status, told = command.run([*own, "--resume"])
        if status == 2 and "none of the checkpoints" in told:
            story.append("no sound checkpoint")
            shutil.rmtree(command.folder)
            damaged = False
            status, told = command.run([*own, "--resume"])
        story.append(f"then {status}")
        assert status == 0, f"seed {seed}: {story}\n{told}"
        expected, adapters = self.expected
        assert adapters_of(command.folder) == adapters, f"seed {seed}: {story}\n{told}"
        if not damaged:
            assert without_speed(metrics(command.folder)) == expected, (
                f"seed {seed}: {story}\n{told}"
            )
        shutil.rmtree(command.folder)
        return ", ".join(story)

    def _fault(self, command: faults.Command, chance: random.Random) -> Fault:
        at, nothing = chance.randint(1, self.touches), contextlib.nullcontext()
        match kind := chance.choice(KINDS):
            case "kill":
                under = command.watched(at, command.kill)
                return Fault(f"kill at {at}", [], under, {0, -signal.SIGKILL})
            case "interrupt" | "twice":
                under = command.watched(at, faults.interrupt, stays=kind == "twice")
                return Fault(f"{kind} at {at}", [], under, {0, 130})
            case "full":
                under = command.watched(at, faults.fill_disk, stays=True)
                return Fault(f"full at {at}", [], under, {0, 1})
            case "limit":
                size = int(10 ** chance.uniform(1, 5))
                return Fault(f"limit {size}", [], faults.limit_files(size), {0, 1})
            case "memory":
                step = chance.randrange(STEPS)
                return Fault(f"memory at {step}", [], faults.lack_memory(step), {0, 1})
            case "flag":
                wrong = chance.choice(WRONG)
                return Fault(" ".join(wrong), wrong, nothing, {2})
            case "shorter":
                return Fault("shorter", ["--steps", "2"], nothing, {0})
            case "in use":
                command.folder.mkdir(exist_ok=True)
                return Fault("in use", [], locked(command.folder), {2})
            case _:
                return self._damaged_input(chance)

    def _damaged_input(self, chance: random.Random) -> Fault:
        """A file that is read, as it stands or not; no step is taken with it."""
        model = self.folder / "model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(self.model, model)
        data = Path(shutil.copy(self.data, self.folder / "damaged.jsonl"))
        file = chance.choice([data, *sorted(model.iterdir())])
        told = faults.damage(file, chance)
        flags = ["--model", str(model), "--data", str(data), "--dry-run"]
        return Fault(told, flags, contextlib.nullcontext(), {0, 2})


def files_of(run: Path) -> list[Path]:
    """Returns the files that a run is taken up from."""
    files = sorted(one for one in (run / "checkpoints").rglob("*") if one.is_file())
    return files + [one for one in (run / "metrics.jsonl",) if one.is_file()]


def adapters_of(run: Path) -> list[bytes]:
    """Returns the bytes of the adapter that a run has exported, and of its best one."""
    return [(run / one / "adapter_model.safetensors").read_bytes() for one in ("adapter", "best")]
