"""Runs `jax-dora finetune` again and again under faults that a seed draws: killed or interrupted at
any file it touches, on a full disk, without memory, with damaged files, with flags that are wrong.

    python -m tests.jax_dora.finetune.soak --runs 200 --seed 0

After its faults each run is taken up by the corrected command, and has to end with the adapter of a
run that nothing has happened to, bit for bit. No traceback is ever printed.
"""

import argparse
import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import matplotlib.backends.backend_svg
import matplotlib.figure  # noqa: F401

import jax_dora.commands  # noqa: F401  so that no process imports it
from dora_common import start
from jax_dora.finetune import data, tiny

STEPS = 4
OPTIONS = (
    *("--rank", "2", "--dropout", "0.1", "--length", "16", "--steps", str(STEPS), "--samples", "0"),
    *("--batch", "2", "--accumulate", "2", "--learning-rate", "1e-2", "--eval-every", "2"),
    *("--checkpoint-every", "1", "--keep", "2"),
)
WRONG = (
    *(["--batch", "0"], ["--seed", "-1"], ["--target", "("], ["--target", ".*"], ["--keep", "0"]),
    *(["--rank", "-3"], ["--clip", "nan"], ["--steps", "0"], ["--unknown"], ["--data", "nowhere"]),
    *(["--warmup", str(STEPS)], ["--eval-data", "/"], ["--model", "/"], ["--alpha", "0"]),
)
WRITING = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate")


class Faults:
    """Counts what a process does to the files of one folder, and acts at one of these moments."""

    def __init__(self, folder: Path, at: int, act: Callable[[], None], *, stays: bool) -> None:
        self.folder, self.at, self.act, self.stays = str(folder), at, act, stays
        self.count = 0
        sys.addaudithook(self)

    def __call__(self, event: str, args: Any) -> None:
        if event == "open":
            flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
            touches = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else:
            touches = event in WRITING
        if not touches or not str(args[0]).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.at or (self.stays and self.count > self.at):
            self.act()


def run(command: list[str], prepare: Callable[[], Any] = lambda: None) -> tuple[int, str]:
    """Runs the command in a process of its own; returns its exit status, or minus a signal, and
    what it printed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading, errors="replace") as stream:
            printed = stream.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed
    for standard in (1, 2):
        os.dup2(writing, standard)
    status = 70
    try:
        prepared = prepare()
        sys.argv = ["jax-dora", "finetune", *command]
        try:
            start.jax_dora()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 70
        if isinstance(prepared, Faults):
            print(f"touched {prepared.count} times")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def lack_memory(at: int) -> None:
    original = data.batch

    def batch(rows: data.Rows, step: int, *rest: Any) -> data.Rows:
        if step == at:
            raise MemoryError("8 GiB asked for")
        return original(rows, step, *rest)

    data.batch = batch


def damage(folder: Path, chance: random.Random) -> str:
    """Changes one file of the checkpoints, or the metrics."""
    files = [one for one in sorted((folder / "checkpoints").rglob("*")) if one.is_file()]
    files += [folder / "metrics.jsonl"] * (len(files) // 8)
    files = [one for one in files if one.is_file()]
    if not files:
        return "nothing to damage"
    file = chance.choice(files)
    raw = bytearray(file.read_bytes())
    way = chance.choice(["flip", "cut", "remove", "zero"])
    if way == "remove":
        file.unlink()
    elif way == "cut":
        file.write_bytes(raw[: chance.randrange(len(raw) + 1)])
    elif raw:
        for _ in range(4 if way == "flip" else 1):
            place = chance.randrange(len(raw))
            raw[place] = raw[place] ^ (1 << chance.randrange(8)) if way == "flip" else 0
        file.write_bytes(raw)
    return f"{way} {file.relative_to(folder)}"


class Soak:
    """Runs from one seed.

    Attributes:
      touches: how often a run that nothing happens to touches its files.
      expected: the bytes of its adapter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inputs: list[str] = []
        tiny.make_tiny_data(folder / "data.jsonl", 60)
        tiny.make_tiny_data(folder / "eval.jsonl", 3)
        whole = ["--tiny", "--data", str(folder / "data.jsonl"), "--output", str(folder / "whole")]
        status, log = run([*whole, *OPTIONS])
        assert status == 0, log
        self.inputs = ["--model", str(folder / "whole" / "tiny-model")]
        self.inputs += ["--data", str(folder / "data.jsonl")]
        self.inputs += ["--eval-data", str(folder / "eval.jsonl"), *OPTIONS]
        again = folder / "again"
        count = lambda: Faults(again, -1, kill, stays=False)  # noqa: E731
        status, log = run([*self.inputs, "--output", str(again)], count)
        assert status == 0, log
        self.touches = int(log.rpartition("touched ")[2].split()[0])
        self.expected = adapter_of(again)

    def one(self, seed: int) -> str:
        """Lets one run suffer, and checks its end; returns what happened to it.

        Raises:
          AssertionError: a traceback, an exit status that the fault does not explain, or another
            adapter.
        """
        chance = random.Random(seed)
        output = self.folder / f"run{seed}"
        story = []
        damaged_metrics = False
        for _ in range(chance.randint(1, 3)):
            kind, command, prepare, allowed = self._fault(output, chance)
            resume = ["--resume"] * (chance.random() < 0.8)
            status, log = run([*command, *resume], prepare)
            story.append(f"{kind}{' --resume' * bool(resume)}: {status}")
            told = f"seed {seed}: {', '.join(story)}\n{log}"
            assert "Traceback" not in log, told
            # A run that is there is refused without --resume, and one with nothing sound.
            refused = "holds a run already" in log or "none of the checkpoints" in log
            assert status in ({*allowed, 2} if refused else allowed), told
            if output.exists() and chance.random() < 0.3:
                story.append(damage(output, chance))
                damaged_metrics |= "metrics" in story[-1]
        command = [*self.inputs, "--output", str(output), "--resume"]
        status, log = run(command)
        if status == 2 and "none of the checkpoints" in log:
            story.append("no sound checkpoint")
            shutil.rmtree(output)
            status, log = run(command)
        told = f"seed {seed}: {', '.join(story)}; then {status}\n{log}"
        assert status == 0, told
        assert adapter_of(output) == self.expected, told
        if not damaged_metrics:
            lines = (output / "metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line)["step"] for line in lines]
            assert steps == list(range(1, STEPS + 1)), told
        shutil.rmtree(output)
        return ", ".join(story)

    def _fault(
        self, output: Path, chance: random.Random
    ) -> tuple[str, list[str], Callable[[], Any], set[int]]:
        """Returns its name, the command, what to do in the process, and how that may end."""
        at = chance.randint(1, self.touches)
        command = [*self.inputs, "--output", str(output)]
        kind = chance.choice(
            ["kill", "kill", "interrupt", "twice", "full", "limit", "memory", "flag"]
        )
        if kind == "flag":
            wrong = chance.choice(WRONG)
            return f"flag {' '.join(wrong)}", [*command, *wrong], lambda: None, {2}
        if kind == "limit":
            size = int(10 ** chance.uniform(1, 5))
            return f"limit {size}", command, lambda: limit_files(size), {0, 1}
        if kind == "memory":
            step = chance.randrange(STEPS)
            return f"memory at {step}", command, lambda: lack_memory(step), {0, 1}
        act, stays, allowed = {
            "kill": (kill, False, {0, -signal.SIGKILL}),
            "interrupt": (interrupt, False, {0, 130}),
            "twice": (interrupt, True, {0, 130}),
            "full": (fill_disk, True, {0, 1}),
        }[kind]
        return f"{kind} at {at}", command, lambda: Faults(output, at, act, stays=stays), allowed


def adapter_of(run: Path) -> list[bytes]:
    """Returns the bytes of the adapter that a run has exported, and of its best one."""
    return [(run / one / "adapter_model.safetensors").read_bytes() for one in ("adapter", "best")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as folder:
        # Read by every process, so that only the first compiles.
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        soak = Soak(Path(folder))
        for seed in range(args.seed, args.seed + args.runs):
            print(f"seed {seed}: {soak.one(seed)}", flush=True)


if __name__ == "__main__":
    main()
