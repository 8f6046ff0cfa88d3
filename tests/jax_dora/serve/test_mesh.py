"""A server whose requests two devices share."""

import jax
import pytest

from jax_dora.models import DecoderSharding, load_model
from jax_dora.serve.request import Request
from jax_dora.serve.runner import ModelRunner, PromptPiece, make_bank
from tests.jax_dora.serve import serving

PROMPTS = ([7, 3, 99], [5], [12, 30, 61, 8, 8, 45, 2])
COUNT = 8


def answers(runner, adapters):
    """Returns the tokens that follow the prompts, each row with its slot's adapter."""
    parts = []
    for row, (prompt, slot) in enumerate(zip(PROMPTS, adapters, strict=True)):
        request = Request(tuple(prompt), COUNT, lambda _: None)
        runner.assign_row(row, request, slot)
        parts.append(PromptPiece(row, prompt, 0))
    texts = [[] for _ in PROMPTS]
    for row, part in enumerate(parts):
        texts[row].append(int(runner.prefill([part], 16).tokens[row]))
    for _ in range(COUNT - 1):
        drawn = runner.decode(range(3)).tokens
        for row, text in enumerate(texts):
            text.append(int(drawn[row]))
    for row in range(3):
        runner.free_row(row)
    return texts


@pytest.mark.slow
def test_two_devices_answer_as_one(model, adapters, reference):
    """Keys and values lie with their heads; after the first answers nothing is compiled."""
    sharding = DecoderSharding.over(tp=2, devices=jax.devices()[:2])
    loaded = load_model(model, sharding=sharding)
    bank = make_bank(loaded, 2, 8)
    french, lora = (bank.pin(n, bank.bank.read(adapters / n)) for n in ("french", "lora"))
    assert bank.bank.arrays["model/layers/mlp/up_proj"].lora_b.sharding.spec[-1] == "tp"
    runner = ModelRunner(loaded, bank, rows=3, capacity=32, chunk=16)
    found = answers(runner, (french, -1, lora))
    for prompt, name, text in zip(PROMPTS, ("french", None, "lora"), found, strict=True):
        (wanted,) = reference.tokens(name and adapters / name, [prompt], COUNT)
        assert text[: len(wanted)] == wanted  # which ends where a text does
    assert runner._arrays.cache.keys.sharding.is_equivalent_to(sharding.heads, 5)
    with serving.nothing_compiled():
        assert answers(runner, (french, -1, lora)) == found
