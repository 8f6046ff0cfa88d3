"""Many clients at once, of which some do everything wrong, and what became of the server."""

import asyncio
import collections
import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np

PROMPTS = ("12+30=", "What is a slot, and who pins it? ")
TOKENS = 10
SWAPPED = "swapped"
# Of 20 requests so many are of a kind.
FAULTS = ["hangs up early", "hangs up late", "malformed", "oversized", "unknown", *[SWAPPED] * 2]


class Load:
    """Clients of one server.

    `expected` has the texts that may follow each prompt: one for an adapter that stands still, two
    for the one that is swapped all the time.

    Attributes:
      wrong: answers that are of no adapter that they may be of.
      counts: of requests by kind.
      seconds: that answers took, from the request that was not refused on.
    """

    def __init__(self, url: str, expected: Mapping[str, Sequence[set[str]]], seed: int = 0) -> None:
        self._url, self._expected = url, expected
        self._names = [name for name in expected if name != SWAPPED]
        self._random = random.Random(seed)
        self.wrong: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        latency = np.percentile(self.seconds, (50, 90, 99)).round(3)
        return f"{counts}; seconds at 50, 90 and 99 %: {', '.join(map(str, latency))}"

    async def run(self, count: int, at_a_time: int) -> None:
        limits = httpx.Limits(max_connections=at_a_time)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client:
            turns = iter(range(count))

            async def one_after_the_other() -> None:
                for number in turns:
                    await self._one(client, (FAULTS + [""] * 13)[number % 20])

            await asyncio.gather(*(one_after_the_other() for _ in range(at_a_time)))

    async def _one(self, client: httpx.AsyncClient, kind: str) -> None:
        # As Zipf would: few adapters have most of the requests.
        rank = int(self._random.paretovariate(0.5))
        name = SWAPPED if kind == SWAPPED else self._names[rank % len(self._names)]
        prompt = self._random.randrange(len(PROMPTS))
        body = {"model": name, "prompt": PROMPTS[prompt], "max_tokens": TOKENS, "temperature": 0}
        if kind == "malformed":
            answer = await client.post("completions", content=b'{"model": ', headers=JSON)
            self._count(answer, 400, kind)
        elif kind == "oversized":
            answer = await client.post("completions", json=body | {"prompt": "x" * 5000})
            self._count(answer, 413, kind)
        elif kind == "unknown":
            answer = await client.post("completions", json=body | {"model": f"{name}x"})
            self._count(answer, 404, kind, f"{name}x' does not exist; the nearest are '{name}'")
        elif kind.startswith("hangs up"):
            await self._hang_up(client, body | {"max_tokens": 60}, kind)
        else:
            await self._answered(client, body, self._expected[name][prompt], kind or "answered")

    def _count(self, answer: httpx.Response, status: int, kind: str, message: str = "") -> None:
        self.counts[kind] += 1
        if answer.status_code != status or message not in answer.text:
            self.wrong.append(f"{kind}: {answer.status_code} {answer.text}")

    async def _hang_up(self, client: httpx.AsyncClient, body: dict, kind: str) -> None:
        self.counts[kind] += 1
        if kind == "hangs up early":
            try:
                await client.post("completions", json=body, timeout=self._random.random() / 10)
            except httpx.TimeoutException:
                return
        async with client.stream("POST", "completions", json=body | {"stream": True}) as answer:
            async for _ in answer.aiter_lines():
                return

    async def _answered(
        self, client: httpx.AsyncClient, body: dict, expected: set[str], kind: str
    ) -> None:
        streams = self._random.random() < 0.5
        while True:
            begin = time.monotonic()
            text, status = await self._text(client, body | {"stream": streams})
            if status not in (429, 503):
                break
            self.counts[f"refused with {status}"] += 1
            await asyncio.sleep(0.05)
        self.seconds.append(time.monotonic() - begin)
        self.counts[kind] += 1
        if status != 200 or text not in expected:
            self.wrong.append(f"{body['model']}: {status} {text!r}, not in {expected}")

    async def _text(self, client: httpx.AsyncClient, body: dict) -> tuple[str, int]:
        if not body["stream"]:
            answer = await client.post("completions", json=body)
            told = answer.json()
            is_told = answer.status_code == 200
            return told["choices"][0]["text"] if is_told else answer.text, answer.status_code
        text = ""
        async with client.stream("POST", "completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    told = json.loads(line.removeprefix("data: "))
                    text += told["choices"][0]["text"] if "choices" in told else line
        return text, answer.status_code


JSON = {"content-type": "application/json"}


async def swap(folder: Path, versions: Sequence[Path], seconds: float) -> None:
    """Puts one version after the other into `folder`, and a damaged adapter beside it, until it is
    cancelled."""
    number = 0
    while True:
        await asyncio.sleep(seconds)
        number += 1
        put(versions[number % len(versions)], folder / SWAPPED)
        damaged = folder / f"damaged-{number % 3}"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(versions[0], damaged)
        file = damaged / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[: 100 * (number % 7)])


def put(version: Path, folder: Path) -> None:
    """Copies an adapter, one file after the other, as people do."""
    shutil.copytree(version, folder, copy_function=shutil.copy, dirs_exist_ok=True)


def resident() -> int:
    """Returns this process's memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
