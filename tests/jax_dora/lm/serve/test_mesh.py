"""A server whose requests two devices share."""

import dataclasses
import functools

import jax
import pytest

from jax_dora.lm.models import DecoderSharding, load_model
from jax_dora.lm.serve.request import Request
from jax_dora.lm.serve.runner import ModelRunner, PromptPiece, make_store
from tests.jax_dora.lm.serve import serving
from tests.jax_dora.lm.serve.test_answers import complete, together

PROMPTS = ([7, 3, 99], [5], [12, 30, 61, 8, 8, 45, 2])
COUNT = 8


def answers(runner, adapters):
    """Returns the tokens that follow the prompts, each row with its slot's adapter."""
    parts = []
    for row, (prompt, slot) in enumerate(zip(PROMPTS, adapters, strict=True)):
        request = Request(tuple(prompt), COUNT, lambda _: None)
        runner.assign_row(row, request, slot, ())
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


def check_answers(loaded, adapters, reference):
    """Checks a model on two devices, with two adapters and without, against the reference.

    Keys and values lie with their heads; after the first answers nothing is compiled.
    """
    sharding = loaded.config.sharding
    store = make_store(loaded, 2, 8)
    for name in ("french", "lora"):
        store.add(name, adapters / name)
    french, lora = map(store.acquire, ("french", "lora"))
    assert store.bank.arrays["model/layers/mlp/up_proj"].lora_b.sharding.spec[-1] == "tp"
    runner = ModelRunner(loaded, store, rows=3, capacity=32, chunk=16)
    found = answers(runner, (french, -1, lora))
    for prompt, name, text in zip(PROMPTS, ("french", None, "lora"), found, strict=True):
        (wanted,) = reference.tokens(name and adapters / name, [prompt], COUNT)
        assert text[: len(wanted)] == wanted  # which ends where a text does
    assert runner._arrays.cache.keys.sharding.is_equivalent_to(sharding.heads, 5)
    with serving.nothing_compiled():
        assert answers(runner, (french, -1, lora)) == found


@pytest.mark.parametrize(
    "platform",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpus)],
)
def test_two_devices_answer_as_one(model, adapters, reference, platform):
    sharding = DecoderSharding.over(tp=2, devices=jax.devices(platform)[:2])
    with jax.default_matmul_precision("highest"):
        check_answers(load_model(model, sharding=sharding), adapters, reference)


@pytest.mark.slow
def test_two_devices_answer_as_one_with_a_cache_in_fp8(model):
    sharding = DecoderSharding.over(tp=2, devices=jax.devices()[:2])
    with jax.default_matmul_precision("highest"):
        alone, together = (
            ModelRunner(load_model(model, sharding=one), None, 3, 32, 16, "float8_e4m3fn")
            for one in (None, sharding)
        )
        assert answers(together, (-1,) * 3) == answers(alone, (-1,) * 3)
    assert together._arrays.cache.keys.codes.sharding.is_equivalent_to(sharding.heads, 5)


@pytest.mark.slow
def test_a_server_answers_on_a_mesh_as_without_one(served, settings, monkeypatch):
    """Requests for all adapters at once, more than there are rows and slots."""
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    names = ("tiny", "french", "german", "lora", "small")
    asked = [(name, prompt) for prompt in ("12+30=", "a" * 40) for name in names]

    def answers(client):
        more = {}, {"presence_penalty": 1.5, "echo": True, "logprobs": 2}
        given = [
            functools.partial(complete, client, *one, **more[number % 2])
            for number, one in enumerate(asked)
        ]
        return [one.text for one in together(given)]

    with serving.serving(dataclasses.replace(settings, mesh={"tp": 2})) as (server, client):
        keys = server.engine._runner._arrays.cache.keys
        assert {one.data.shape[2] for one in keys.addressable_shards} == {keys.shape[2] // 2}
        found = answers(client)
        with serving.nothing_compiled():
            assert answers(client) == found
    assert found == answers(served[1])
    assert len(set(found)) == len(found)
