"""Level `serve --torch`: what transformers answers the requests of level `serve` with.

A batch of as many requests as rows is generated as one, to its end, and the next begins then: that
is what `generate` has. A request's first token is counted from when its batch was asked for.

    transformers      the base alone
    torch_dora DoRA   the bank, one batch of all adapters
    PEFT LoRA         one batch by `adapter_names`
    PEFT DoRA         which refuses `adapter_names`: one adapter after the other, each with its rows
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import torch_dora
from benchmarks.bank_adapters import draw_ids
from benchmarks.bank_torch import by_peft, filled
from benchmarks.model.protocol import LLAMA3, QUICK, Protocol
from benchmarks.model.torch_model import random_model
from benchmarks.results import Row, attempted, over
from benchmarks.step_torch import llama


class Settings(NamedTuple):
    """The settings of the level: `rounds` batches are timed after one that is not."""

    sizes: Protocol = LLAMA3
    layers: int = LLAMA3.layers
    rows: int = 64
    prompt: int = 128
    answer: int = 128
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    adapters: tuple[int, ...] = (1, 8, 64)
    only: tuple[str, ...] = ("transformers", "torch_dora DoRA", "PEFT LoRA", "PEFT DoRA")
    rounds: int = 1


TINY = Settings(QUICK, QUICK.layers, rows=4, prompt=6, answer=3, ranks=(1, 5), adapters=(1, 3))


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement."""
    base = None
    for kind in settings.only:
        for count in (0,) if kind == "transformers" else settings.adapters:
            row: Row = {"kind": kind, "adapters": count, "rows": settings.rows}
            row["layers"] = settings.layers
            row = attempted(row, functools.partial(_served, settings, kind, count, device))
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            yield over(row, base, "of_base", "tokens_per_s")
            if kind == "transformers":
                base = row


def _answers(settings: Settings, kind: str, count: int, device: str) -> Any:
    """Returns a function of the adapters of a batch's rows, i64[rows], that gives (model, rows,
    options) for each `generate` that the batch takes."""
    model = random_model(llama(settings.sizes, settings.layers, use_cache=True), device).eval()
    if kind == "transformers":
        return lambda ids: [(model, np.arange(len(ids)), {})]
    if kind == "torch_dora DoRA":
        empty = torch_dora.AdapterBank(model, max(4, count), max(settings.ranks))
        bank = filled(empty, settings.ranks)
        return lambda ids: [(torch_dora.with_bank(model, bank, ids), np.arange(len(ids)), {})]
    options = {"task_type": "CAUSAL_LM", "use_dora": kind == "PEFT DoRA"}
    with torch.device(device):
        adapted = by_peft(model, settings.ranks, count, **options)
    if kind == "PEFT LoRA":
        return lambda ids: [
            (adapted, np.arange(len(ids)), {"adapter_names": [str(one) for one in ids]})
        ]

    def one_after_the_other(ids: np.ndarray) -> Iterator[Any]:
        for one in np.unique(ids):
            adapted.set_adapter(str(one))
            yield adapted, np.flatnonzero(ids == one), {}

    return one_after_the_other


class _FirstToken(StoppingCriteria):
    """Notes when the first token of a `generate` came, and stops nothing."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if self.at is None:
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.at = time.monotonic()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def _served(settings: Settings, kind: str, count: int, device: str) -> Row:
    """Returns the measurements of those who ask, in `settings.rounds` batches."""
    begin = time.monotonic()
    answers = _answers(settings, kind, count, device)
    build_s = time.monotonic() - begin
    seconds, first, calls = 0.0, [], 0
    for turn in range(settings.rounds + 1):
        generator = torch.Generator().manual_seed(turn)
        shape = (settings.rows, settings.prompt)
        tokens = torch.randint(settings.sizes.vocabulary, shape, generator=generator).to(device)
        drawn = draw_ids("zipf", settings.rows, count) if count else np.zeros(settings.rows, int)
        begin = time.monotonic()
        for model, rows, options in answers(drawn):
            noted = _FirstToken()
            prompt = tokens[torch.as_tensor(rows, device=device)]
            found = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=settings.answer,
                min_new_tokens=settings.answer,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([noted]),
                **options,
            )
            assert found.shape[1] == settings.prompt + settings.answer
            if turn and noted.at is not None:  # The first warms up.
                first += [noted.at - begin] * len(rows)
                calls += 1
        if device == "cuda":
            torch.cuda.synchronize()
        seconds += (time.monotonic() - begin) * (turn > 0)
    answered = settings.rounds * settings.rows
    return {
        "build_s": build_s,
        "answers": answered,
        "generates": calls,
        "tokens_per_s": answered * settings.answer / seconds,
        "first_token_ms": 1e3 * float(np.median(first)),
        "first_token_p90_ms": 1e3 * float(np.percentile(first, 90)),
    }
