"""Level `serve --torch`: how fast transformers' `generate` answers the requests of level `serve`.

    transformers      the base alone
    torch_dora DoRA   torch_dora's bank, one batch of all adapters
    PEFT LoRA         one batch with `adapter_names`
    PEFT DoRA         one `generate` for each adapter with its rows, because PEFT rejects
                      `adapter_names` with DoRA

The model, the prompts, the answers and the choice of adapters are those of level `serve`. A batch
of 64 requests is generated to its end before the next one begins.

One line is one kind with one number of adapters: answered tokens per second of wall time, `of_base`
(the same divided by that of transformers alone), the median and the upper tenth of the time from
the start of a batch to a request's first token, and the number of calls of `generate`.
"""

import functools
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
from benchmarks.results import Row, attempt, with_ratio
from benchmarks.torch_decoder import free, random_llama


class Settings(NamedTuple):
    """The settings of the level; `rounds` batches are timed after one that is not."""

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
    """Yields one row for each kind and number of adapters."""
    base = None
    for kind in settings.only:
        for count in (0,) if kind == "transformers" else settings.adapters:
            row: Row = {"kind": kind, "adapters": count, "rows": settings.rows}
            row["layers"] = settings.layers
            row = attempt(row, functools.partial(_served, settings, kind, count, device))
            free()
            yield with_ratio(row, base, "of_base", "tokens_per_s")
            if kind == "transformers":
                base = row


def _calls(settings: Settings, kind: str, count: int, device: str) -> Any:
    """Returns a function from the adapters of a batch's rows, i64[rows], to the model, the rows and
    the options of each call of `generate`."""
    model = random_llama(settings.sizes, settings.layers, device, use_cache=True).eval()
    every = np.arange(settings.rows)
    if kind == "transformers":
        return lambda ids: [(model, every, {})]
    if kind == "torch_dora DoRA":
        empty = torch_dora.AdapterBank(model, max(4, count), max(settings.ranks))
        bank = filled(empty, settings.ranks)
        return lambda ids: [(torch_dora.with_bank(model, bank, ids), every, {})]
    options = {"task_type": "CAUSAL_LM", "use_dora": kind == "PEFT DoRA"}
    with torch.device(device):
        adapted = by_peft(model, settings.ranks, count, **options)
    if kind == "PEFT LoRA":
        return lambda ids: [(adapted, every, {"adapter_names": [str(one) for one in ids]})]

    def adapter_by_adapter(ids: np.ndarray) -> Iterator[Any]:
        for one in np.unique(ids):
            adapted.set_adapter(str(one))
            yield adapted, np.flatnonzero(ids == one), {}

    return adapter_by_adapter


class _FirstToken(StoppingCriteria):
    """Records the time of the first token of a `generate`, and stops nothing."""

    def __init__(self) -> None:
        self.time: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if self.time is None:
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.time = time.monotonic()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def _served(settings: Settings, kind: str, count: int, device: str) -> Row:
    """Returns the throughput and the latency of all requests."""
    begin = time.monotonic()
    calls_of = _calls(settings, kind, count, device)
    build_s = time.monotonic() - begin
    seconds, first, calls = 0.0, [], 0
    for turn in range(settings.rounds + 1):
        generator = torch.Generator().manual_seed(turn)
        shape = (settings.rows, settings.prompt)
        tokens = torch.randint(settings.sizes.vocabulary, shape, generator=generator).to(device)
        ids = draw_ids("zipf", settings.rows, count) if count else np.zeros(settings.rows, int)
        begin = time.monotonic()
        for model, rows, options in calls_of(ids):
            criterion = _FirstToken()
            prompt = tokens[torch.as_tensor(rows, device=device)]
            answers = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=settings.answer,
                min_new_tokens=settings.answer,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([criterion]),
                **options,
            )
            assert answers.shape[1] == settings.prompt + settings.answer
            if not turn:
                break  # The first turn is warm-up, for which one call is enough.
            assert criterion.time is not None
            first += [criterion.time - begin] * len(rows)
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
