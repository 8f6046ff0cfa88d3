"""The engine: rows and slots, what is compiled, and the effect of requests on each other."""

import contextlib
import dataclasses
import shutil
import threading
import time

import jax
import openai
import pytest
from safetensors.numpy import load_file

from jax_dora.bank import DECODING_OPTIONS, SlotsBusy, StoredAdapter
from jax_dora.lm.models import load_model
from jax_dora.lm.serve import engine as module
from jax_dora.lm.serve import programs
from jax_dora.lm.serve.engine import Engine, QueueFullError
from jax_dora.lm.serve.metrics import Metrics
from jax_dora.lm.serve.request import Request
from jax_dora.lm.serve.runner import (
    HEADER_BYTES,
    ModelRunner,
    PromptPiece,
    largest_file,
    make_store,
)
from tests.jax_dora.lm.serve import serving
from tests.jax_dora.lm.serve.test_answers import complete
from tests.jax_dora.lm.serve.test_http import until

PROMPT = "What is a slot, and who pins it? " * 2


@pytest.mark.ci
def test_nothing_is_compiled_after_the_start(settings):
    """Whatever is asked: lengths, adapters that come in, draws, probabilities, ends.

    Of a server of its own: other tests clear JAX's caches, also between two tests of one server.
    """
    with serving.serving(settings) as (_, client), serving.nothing_compiled():
        for name in ("french", "german", "lora", "small", "tiny"):
            for prompt in ("1", "a" * 32, PROMPT):
                complete(client, name, prompt)
                complete(client, name, prompt, temperature=1.1, top_p=0.8, logprobs=2)
                complete(client, name, prompt, echo=True, logprobs=2, presence_penalty=1)
        stream = client.completions.create(model="small", prompt="1", max_tokens=80, stream=True)
        next(stream)
        stream.close()
        complete(client, "german", "1")


@pytest.mark.ci
def test_a_step_for_the_same_rows_sends_nothing(model):
    runner = ModelRunner(load_model(model), None, 2, 16, 16)
    for going in ((0,), (0, 1)):
        runner.decode(going)
        with jax.transfer_guard_host_to_device("disallow"):
            runner.decode(going)


@pytest.mark.ci
def test_the_arrays_of_all_rows_keep_their_addresses(model):
    """Otherwise XLA would update its CUDA graphs in every step."""
    runner = ModelRunner(load_model(model), None, 3, 32, 16)

    def addresses():
        *arrays, drawn = runner._arrays
        return [
            [one.unsafe_buffer_pointer() for one in jax.tree.leaves(arrays)],
            {one.unsafe_buffer_pointer() for one in jax.tree.leaves(drawn)},
        ]

    before = addresses()
    runner.warm_up()
    for row in range(3):
        runner.assign_row(row, Request((5, row), 8, lambda _: None), -1, ())
        runner.prefill([PromptPiece(row, (5, row), 0)], 16)
        runner.decode(range(row + 1))
    runner.free_row(1)
    runner.decode((0, 2))
    assert addresses() == before


def test_the_start_draws_from_no_constant(model):
    """XLA would fold it when it compiles: 160 s for 64 rows and 128,256 tokens, without the
    barrier. (Tests compile without optimizations.)"""
    lowered = programs.empty_rows.lower(load_model(model).config, 4, 16, 16, None)
    assert "optimization_barrier" in lowered.as_text()


@pytest.mark.ci
def test_nothing_is_compiled_for_weights_committed_to_a_device(model):
    """As those are whose layout is not JAX's own: a program's results are so as well."""
    fp8 = "float8_e4m3fn"
    runner = ModelRunner(load_model(model, quantize=fp8, act_qtype=fp8), None, 2, 16, 16)
    runner.warm_up()
    with serving.nothing_compiled():
        runner.prefill([PromptPiece(0, (1,), 0)], 16)
        runner.decode((0,))


def test_steps_are_compiled_as_decoding_is(monkeypatch):
    """Which programs are handed the options that only a GPU heeds."""
    handed = {}

    def jit(function, **options):
        handed[function.func.__name__] = options.get("compiler_options")

    monkeypatch.setattr(jax, "jit", jit)
    programs.model_programs.__wrapped__(None, (("of the loop", 1),))
    assert handed["_decode"] == DECODING_OPTIONS
    assert handed["_prefill"] == {"of the loop": 1}


@pytest.mark.parametrize(("chunk", "concurrent"), [(256, True), (512, False)])
def test_small_prompts_are_compiled_as_decoding_is(model, monkeypatch, chunk, concurrent):
    given = []
    make = programs.model_programs
    monkeypatch.setattr(programs, "model_programs", lambda *one: given.append(one) or make(*one))
    ModelRunner(load_model(model), None, 2, 1024, chunk)
    ((_, options),) = given
    assert (DECODING_OPTIONS.items() <= dict(options).items()) == concurrent


@contextlib.contextmanager
def another_adapter(server, model, folder, seed, **options):
    """One more in the folder of adapters, for a while."""
    try:
        serving.write_adapter(model, folder, seed, **options)
        until(lambda: server.adapters.get(folder.name))
        yield
    finally:
        shutil.rmtree(folder)
        until(lambda: server.adapters.get(folder.name) is None)


def test_a_running_request_keeps_the_adapter_it_began_with(served, model, adapters):
    """While its folder gets another one, and then goes."""
    server, client = served
    folder = adapters / "changing"
    with another_adapter(server, model, folder, 1):
        first = server.adapters.get("changing")
        before = complete(client, "changing", "12+30=", max_tokens=60).text
        stream = client.completions.create(
            model="changing", prompt="12+30=", max_tokens=60, temperature=0, stream=True
        )
        text = next(stream).choices[0].text
        serving.write_adapter(model, folder, 5)
        until(lambda: server.adapters.get("changing") is not first)
        after = complete(client, "changing", "12+30=", max_tokens=60).text
        text += "".join(one.choices[0].text for one in stream)
        assert text == before != after


def test_what_is_not_finite_stays_with_its_request(served, model, adapters):
    """An adapter that makes NaN of everything costs the others nothing, nor its row's next."""
    server, client = served
    expected = complete(client, "french", PROMPT, logprobs=1)
    with another_adapter(server, model, adapters / "wild", 2, size=1e20):
        for _ in range(5):  # more than there are rows
            with pytest.raises(openai.InternalServerError, match="logits are not finite"):
                client.completions.create(model="wild", prompt=PROMPT, max_tokens=5)
        for _ in range(5):  # before anybody has seen what it makes
            with contextlib.suppress(openai.APITimeoutError, openai.InternalServerError):
                hasty = client.with_options(timeout=0.01)
                hasty.completions.create(model="wild", prompt=PROMPT, max_tokens=5)
        for _ in range(5):
            found = complete(client, "french", PROMPT, logprobs=1)
            assert found.text == expected.text
            assert found.logprobs.token_logprobs == expected.logprobs.token_logprobs


def test_the_largest_file_of_an_adapter_is_one_in_fp64(model, adapters):
    bank = make_store(load_model(model), 1, 8).bank
    tensors = load_file(adapters / "german" / "adapter_model.safetensors")  # DoRA of rank 8, fp32
    in_fp64 = 2 * sum(one.nbytes for one in tensors.values())
    assert largest_file(bank) == in_fp64 + HEADER_BYTES


@pytest.mark.ci
def test_adapters_beyond_the_host_s_memory_are_read_again(served, settings):
    """And answer as they do elsewhere; those in slots are not."""
    names = ("french", "german", "lora", "small")
    expected = {name: complete(served[1], name, PROMPT).text for name in names}
    assert len(set(expected.values())) == 4
    with serving.serving(dataclasses.replace(settings, host_bytes=1)) as (server, client):
        reads = server.metrics.reads._value
        for name in names * 2:
            assert complete(client, name, PROMPT).text == expected[name]
        before = reads.get()
        assert before >= 2 * 4 - settings.slots
        assert complete(client, names[-1], PROMPT).text == expected[names[-1]]
        assert complete(client, names[-2], PROMPT).text == expected[names[-2]]
        assert reads.get() == before
        assert not server.adapters.damaged()


class Recorder:
    """A model runner that computes nothing and always draws token 1."""

    rows, capacity, widths, prompts_per_call = 2, 50, (8,), {8: 2}

    def __init__(self):
        self.taken, self.calls = [], []

    def width(self, left):
        return 8

    def assign_row(self, row, request, slot, ends):
        self.taken.append((request.adapter and request.adapter.name, slot))

    def free_row(self, row):
        pass

    def prefill(self, parts, width):
        self.calls.append(("prefill", [(part.row, part.start) for part in parts]))
        return self.drawn()

    def decode(self, going):
        self.calls.append(("decode", list(going)))
        return self.drawn()

    def drawn(self):
        ones = jax.numpy.ones(2, jax.numpy.int32)
        return module.Drawn(ones, ones > 0, ones, ones, ones)


class OneSlot:
    """Adapters that share one slot, and of which one called "bad" cannot be loaded."""

    def __init__(self):
        self.inside, self.users, self.loads = None, 0, 0

    def acquire(self, adapter):
        if adapter.name == "bad":
            raise ValueError("no place")
        if adapter is not self.inside:
            if self.users:
                raise SlotsBusy
            self.inside, self.loads = adapter, self.loads + 1
        self.users += 1
        return 0

    def release(self, adapter):
        assert adapter is self.inside
        self.users -= 1


@pytest.fixture
def fake(served):
    runner, bank = Recorder(), OneSlot()
    tokenizer = served[0].service.texts.tokenizer
    engine = Engine(runner, bank, tokenizer, [256], queue=20, metrics=Metrics())
    return engine, runner, bank


def ask(engine, name=None, count=3, made=None):
    pieces = []
    made = {} if made is None else made
    adapter = None if name is None else made.setdefault(name, StoredAdapter(name, None))
    [answer] = engine.submit(Request((1, 2, 3), count, pieces.append, adapter=adapter))
    return answer, pieces


def run(engine, turns=200):
    for _ in range(turns):
        if not engine.turn():
            return
    raise AssertionError("it never ends")


def test_who_waits_for_a_slot_is_overtaken_as_often_as_there_are_rows(fake):
    engine, runner, bank = fake
    made = {}
    asked = [ask(engine, "a", 40, made), *[ask(engine, name, 3, made) for name in "baaaa"]]
    run(engine)
    # "b" lets two others pass, and no more.
    assert [name for name, _ in runner.taken] == ["a", "a", "a", "b", "a", "a"]
    assert all(pieces[-1].finish == "length" for _, pieces in asked)
    assert bank.users == 0
    assert len(engine.free_rows) == 2


def test_an_adapter_that_cannot_be_loaded_costs_its_request_alone(fake):
    engine, _, bank = fake
    (_, bad), (_, good) = ask(engine, "bad"), ask(engine, "good")
    run(engine)
    assert (bad[-1].finish, good[-1].finish) == ("error", "length")
    assert "no place" in bad[-1].error
    assert (bank.users, len(engine.free_rows)) == (0, 2)


@pytest.mark.parametrize(
    ("options", "adapter_ends", "finish"),
    [
        ({}, None, "length"),
        ({"stop_token_ids": (5, 1)}, None, "stop"),
        ({"stop_token_ids": (5,)}, [1], "stop"),
        ({"ignore_eos": True}, [1], "length"),
        ({"ignore_eos": True, "stop_token_ids": (1,)}, [1], "stop"),
    ],
)
def test_ends_of_a_request(options, adapter_ends, finish, served, fake):
    """The device draws token 1; the engine's own end is another."""
    engine, _, _ = fake
    pieces, adapter = [], None
    if adapter_ends is not None:
        texts = dataclasses.replace(served[0].service.texts, end_tokens=adapter_ends)
        adapter = StoredAdapter("a", None, texts)
    engine.submit(Request((1, 2, 3), 4, pieces.append, adapter=adapter, **options))
    run(engine)
    assert pieces[-1].finish == finish
    assert sum(len(one.tokens) for one in pieces) == (4 if finish == "length" else 1)


def test_cancelled_requests_leave_wherever_they_are(fake):
    engine, _, bank = fake
    asked = [ask(engine, "a", 40) for _ in range(4)]
    engine.turn()
    for answer, _ in asked[1:]:
        engine.cancel(answer)
    engine.cancel(asked[1][0])
    run(engine)
    assert [pieces[-1].finish for _, pieces in asked] == ["length"] + ["abort"] * 3
    assert (bank.users, len(engine.free_rows), engine.waiting) == (0, 2, 0)


def test_a_turn_that_reads_a_piece_of_a_prompt_has_done_something(fake):
    """Or the server would wait for requests between the pieces."""
    engine, _, _ = fake
    pieces = []
    engine.submit(Request((1,) * 30, 1, pieces.append))
    run(engine)
    assert [one.finish for one in pieces] == ["length"]


def test_running_rows_decode_between_the_pieces_of_a_long_prompt(fake):
    engine, runner, _ = fake
    _, pieces = ask(engine, count=20)
    engine.turn()
    engine.turn()
    runner.calls, before = [], len(pieces)
    engine.submit(Request((1,) * 30, 5, lambda _: None))
    for _ in range(4):
        engine.turn()
    prompt, steps = runner.calls[::2], runner.calls[1::2]
    assert prompt == [("prefill", [(1, start)]) for start in (0, 8, 16, 24)]
    assert steps == [("decode", [0])] * 3 + [("decode", [0, 1])]
    assert len(pieces) == before + 4


def test_the_queue_is_bounded_and_ends(fake):
    engine, _, _ = fake
    asked = [ask(engine) for _ in range(20)]
    with pytest.raises(QueueFullError, match="20 requests wait, of 20"):
        ask(engine)
    engine.turn()
    engine.fail("over")
    assert all(pieces[-1].error == "over" for _, pieces in asked)
    with pytest.raises(RuntimeError, match="over"):
        ask(engine)


@pytest.mark.parametrize(("prompt", "count"), [((), 1), ((1,), -1), ((1,) * 40, 11)])
def test_what_fits_into_no_row(fake, prompt, count):
    with pytest.raises(ValueError, match="and 50 together at most"):
        fake[0].submit(Request(prompt, count, print))


def test_waiting_ends_when_a_request_comes(fake):
    engine, _, _ = fake
    thread = threading.Timer(0.1, ask, (engine,))
    begin = time.monotonic()
    thread.start()
    engine.wait(30)
    assert time.monotonic() - begin < 20
    thread.join()
