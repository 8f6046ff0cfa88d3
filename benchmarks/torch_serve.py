"""Level `serve --torch`: what transformers answers the requests of level `serve` with.

A batch of as many requests as rows is generated as one, to its end, and the next begins then: that
is what `generate` has. A request's first token is counted from when its batch was asked for.

    transformers      the base alone
    torch_dora DoRA   the bank, one batch of all adapters
    PEFT LoRA         one batch by `adapter_names`
    PEFT DoRA         which refuses `adapter_names`: one adapter after the other, each with its rows
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

import torch_dora
from benchmarks.bank_adapters import draw_ids
from benchmarks.model.protocol import PROJECTIONS
from benchmarks.results import Row
from benchmarks.torch_bank import filled
from benchmarks.torch_step import TINY as TINY_MODEL
from benchmarks.torch_step import Settings as Model


class Settings(NamedTuple):
    """What is measured: nothing is started after `seconds`; `rounds` batches are timed after one
    that is not."""

    model: Model = Model()
    rows: int = 64
    prompt: int = 128
    answer: int = 128
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    adapters: tuple[int, ...] = (1, 8, 64)
    kinds: tuple[str, ...] = ("transformers", "torch_dora DoRA", "PEFT LoRA", "PEFT DoRA")
    rounds: int = 1
    seconds: float = 420.0


TINY = Settings(TINY_MODEL, rows=4, prompt=6, answer=3, ranks=(1, 5), adapters=(1, 3))


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement."""
    started = time.monotonic()
    base = None
    for kind in settings.kinds:
        for count in (0,) if kind == "transformers" else settings.adapters:
            left = settings.seconds - (time.monotonic() - started)
            if left < 0:
                return
            row: Row = {"kind": kind, "adapters": count, "rows": settings.rows}
            row["layers"] = settings.model.layers
            begin = time.monotonic()
            try:
                answers = _answers(settings, kind, count, device)
                row["build_s"] = time.monotonic() - begin
                row |= _served(settings, answers, count, device)
            except Exception as error:  # One that has no room costs no other its measurement.
                yield row | {"failed": f"{type(error).__name__}: {error}"[:600]}
                continue
            finally:
                answers = None
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
            if kind == "transformers":
                base = row["tokens_per_s"]
            elif base:
                row["of_base"] = row["tokens_per_s"] / base
            yield row


def _answers(settings: Settings, kind: str, count: int, device: str) -> Any:
    """Returns a function of the adapters of a batch's rows, i64[rows], that gives (model, rows,
    options) for each `generate` that the batch takes."""
    torch.manual_seed(0)
    config = settings.model.config()
    config.use_cache = True
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if kind == "transformers":
        return lambda ids: [(model, np.arange(len(ids)), {})]
    if kind == "torch_dora DoRA":
        empty = torch_dora.AdapterBank(model, max(4, count), max(settings.ranks))
        bank = filled(empty, settings.ranks)
        return lambda ids: [(torch_dora.with_bank(model, bank, ids), np.arange(len(ids)), {})]
    adapted: Any = None
    for number in range(count):
        rank = settings.ranks[number % len(settings.ranks)]
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=rank // 2 or 1,
            target_modules=list(PROJECTIONS),
            use_dora=kind == "PEFT DoRA",
            init_lora_weights=False,
        )
        if adapted is None:
            adapted = get_peft_model(model, config, str(number), autocast_adapter_dtype=False)
        else:
            adapted.add_adapter(str(number), config, autocast_adapter_dtype=False)
    adapted.eval()
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
def _served(settings: Settings, answers: Any, count: int, device: str) -> Row:
    """Returns what those who ask saw, in `settings.rounds` batches."""
    vocabulary = settings.model.config().vocab_size
    seconds, first, calls = 0.0, [], 0
    for turn in range(settings.rounds + 1):
        generator = torch.Generator().manual_seed(turn)
        shape = (settings.rows, settings.prompt)
        tokens = torch.randint(vocabulary, shape, generator=generator).to(device)
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
        "answers": answered,
        "generates": calls,
        "tokens_per_s": answered * settings.answer / seconds,
        "first_token_ms": 1e3 * float(np.median(first)),
        "first_token_p90_ms": 1e3 * float(np.percentile(first, 90)),
    }


def line(row: Row) -> str:
    """Returns a row as a line to read."""
    if "failed" in row:
        return f"{row['kind']:15} {row['adapters']:5} adapters failed: {row['failed'][:150]}"
    ratio = f"  {row['of_base']:.3f} of the base's" if "of_base" in row else ""
    return (
        f"{row['kind']:15} {row['adapters']:5} adapters  {row['tokens_per_s']:8,.0f} tokens/s  "
        f"first token {row['first_token_ms']:7.0f} ms, 90 % within "
        f"{row['first_token_p90_ms']:7.0f} ms  {row['generates']:3} batches{ratio}"
    )
