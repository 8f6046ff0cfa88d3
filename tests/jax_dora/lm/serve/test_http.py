"""What clients get who ask wrongly, too much, or leave; and that it costs no row."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import socket
import time

import httpx
import openai
import pytest

import jax_dora
from jax_dora.lm.serve.body import chat, completion
from jax_dora.lm.serve.errors import ApiError
from jax_dora.lm.serve.http import make_app
from jax_dora.lm.serve.runner import largest_file

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
OPTIONS = {"prompt": "12", "max_tokens": 2, "temperature": 0}


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def post(served):
    _, client = served
    base = str(client.base_url)

    def send(path="completions", **options):
        return httpx.post(f"{base}{path}", timeout=60, **options)

    return send


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    [told] = answer.json().values()
    assert told.keys() == {"message", "type", "param", "code"}
    return told


def test_unknown_models_are_told_the_near_ones(served):
    _, client = served
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="frensh", **OPTIONS)
    assert caught.value.code == "model_not_found"
    assert "'frensh' does not exist; the nearest are 'french'" in caught.value.message
    with pytest.raises(openai.NotFoundError, match=r"'FRENCH' does not exist; .* 'french'"):
        client.models.retrieve("FRENCH")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("../../etc/passwd")
    assert client.models.retrieve("french").parent == "tiny"


def test_a_file_that_no_adapter_can_need_is_not_read(served, adapters):
    server, client = served
    folder, limit = adapters / "huge", largest_file(server.engine._adapters.bank)
    try:
        shutil.copytree(adapters / "french", folder)
        os.truncate(folder / "adapter_model.safetensors", limit + 1)  # takes no space on the disk
        until(lambda: "huge" in server.adapters.damaged())
        with pytest.raises(openai.NotFoundError, match=f"has {limit + 1:,} bytes; expected at"):
            client.models.retrieve("huge")
    finally:
        shutil.rmtree(folder)
        until(lambda: "huge" not in server.adapters.damaged())


def test_too_long_is_told_in_numbers(served):
    _, client = served
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 90, max_tokens=7)
    assert caught.value.code == "context_length_exceeded"
    assert (
        "90 tokens and the answer up to 7 (max_tokens), together 97; this server's maximum is 96"
        in str(caught.value)
    )
    answer = client.completions.create(model="tiny", prompt="x" * 90, max_tokens=6, temperature=0)
    assert answer.usage.total_tokens == 96


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_a_list_of_one_prompt_is_that_prompt(served, prompt):
    _, client = served
    alone, listed = (
        client.completions.create(model="tiny", **OPTIONS | {"prompt": one, "max_tokens": 5})
        for one in (prompt, [prompt])
    )
    assert listed.choices[0].text == alone.choices[0].text
    assert listed.usage == alone.usage


MESSAGE = {"role": "user", "content": "x"}
CHAT = {"messages": [MESSAGE], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("completions", {"n": 0}, "n is 0; expected an integer from 1 to 128"),
        ("completions", {"n": 17}, "n: 17 answers are asked for; this server's maximum is 16"),
        ("completions", {"prompt": ["a"] * 9, "n": 2}, "prompt: 18 answers are asked for"),
        ("completions", {"best_of": 3}, "best_of is 3"),
        ("completions", {"suffix": "x"}, "suffix is 'x'"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias is {'x': 1}; expected an object"),
        (
            "completions",
            {"logit_bias": {"5": 101}},
            "logit_bias={5: 101}: expected a token id, and",
        ),
        ("completions", {"logit_bias": {"257": 1}}, "logit_bias has token 257; expected 0 to 256"),
        ("completions", {"presence_penalty": 2.5}, "presence_penalty is 2.5; expected a number fr"),
        ("completions", {"repetition_penalty": 0}, "repetition_penalty is 0; expected a number ab"),
        ("completions", {"min_tokens": 3}, "min_tokens is 3; expected at most max_tokens, which i"),
        ("completions", {"temprature": 1}, "Unrecognized request argument: 'temprature'"),
        ("completions", {"prompt": ["a", 1]}, "expected a text, a list of tokens, or a list of t"),
        ("completions", {"prompt": ""}, "prompt is ''"),
        ("completions", {"prompt": [[1], []]}, "none of them empty"),
        ("completions", {"prompt": []}, "none of them empty"),
        ("completions", {"prompt": [257]}, "prompt has token 257; expected 0 to 256"),
        ("completions", {"prompt": [-1]}, "prompt has token -1"),
        ("completions", {"prompt": "\ud800"}, "prompt is '\\ud800'; expected valid Unicode"),
        ("completions", {"stop": ["a", "\ud800"]}, "stop is '\\ud800'; expected valid Unicode"),
        ("completions", {"n": True}, "n is True; expected an integer from 1"),
        ("completions", {"echo": 0}, "echo is 0; expected true or false"),
        ("completions", {"safety_identifier": 3}, "safety_identifier is 3; expected a string"),
        ("completions", {"service_tier": "flex"}, "service_tier is 'flex'; expected 'auto'"),
        ("completions", {"user": 3}, "user is 3; expected a string"),
        ("completions", {"metadata": "x"}, "metadata is 'x'; expected an object"),
        ("completions", {"stream_options": {"include_usage": True}}, "unless stream is true"),
        ("completions", {"model": None}, "model is None"),
        ("completions", {"model": 5}, "model is 5"),
        ("completions", {"max_tokens": -1}, "max_tokens is -1; expected an integer from 0"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens is 0; expected an integer from 1"),
        ("completions", {"max_tokens": 1.5}, "max_tokens is 1.5"),
        ("completions", {"temperature": 2.5}, "temperature is 2.5; expected a number from 0"),
        ("completions", {"temperature": 10**400}, "temperature is 1000"),
        ("completions", {"temperature": True}, "temperature is True"),
        ("completions", {"temperature": float("nan")}, "temperature is nan"),
        ("completions", {"top_p": 0}, "top_p is 0; expected a number above 0"),
        ("completions", {"top_k": -2}, "top_k is -2; expected an integer from -1"),
        ("completions", {"min_p": 1.5}, "min_p is 1.5; expected a number from 0 to 1"),
        ("completions", {"seed": 2**63}, "seed is 9223372036854775808"),
        ("completions", {"stop": ["a"] * 17}, "stop is"),
        ("completions", {"stop": [""]}, "expected strings of 1 to 256"),
        ("completions", {"stop": 3}, "stop is 3"),
        ("completions", {"stop_token_ids": [0, 257]}, "stop_token_ids has token 257; expected 0 "),
        (
            "completions",
            {"stop_token_ids": [-1]},
            "stop_token_ids is [-1]; expected a list of up t",
        ),
        ("completions", {"stop_token_ids": [True]}, "stop_token_ids is [True]"),
        ("chat/completions", {"stop_token_ids": 3}, "stop_token_ids is 3"),
        ("completions", {"ignore_eos": 1}, "ignore_eos is 1; expected true or false"),
        ("completions", {"logprobs": 21}, "logprobs is 21"),
        ("completions", {"stream": 1}, "stream is 1; expected true or false"),
        ("completions", {"stream_options": {"x": 1}}, "stream_options is"),
        (
            "completions",
            {"stream": True, "stream_options": {"include_obfuscation": 5}},
            "include_obfuscation is 5; expected true or false",
        ),
        ("chat/completions", {"messages": []}, "messages is []"),
        ("chat/completions", {"messages": ["x"]}, "objects with role and content"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "content that is a text"),
        (
            "chat/completions",
            {"messages": [MESSAGE | {"content": None, "tool_calls": []}]},
            "content that is a text",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages is ['tool_calls']; expected only role, content and name",
        ),
        ("chat/completions", {"messages": [MESSAGE | {"name": 5}]}, "a name that is a string"),
        ("chat/completions", {"messages": [MESSAGE | {"role": "\ud800"}]}, "messages is '\\ud800"),
        ("chat/completions", {"messages": [MESSAGE | {"audio": {}}]}, "messages is ['audio']"),
        ("chat/completions", {"top_logprobs": 2}, "expected true, since top_logprobs"),
        ("chat/completions", {"tools": [{"type": "function"}]}, "no such field: jax-dora serve ha"),
        ("chat/completions", {"tool_choice": "auto"}, "vLLM with the plugin of this package does"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "vLLM with the plugin"),
        ("chat/completions", {"structured_outputs": {}}, "expected no such field: jax-dora serve "),
        ("chat/completions", {"chat_template_kwargs": 1}, "chat_template_kwargs is 1; expected an"),
        (
            "chat/completions",
            {"chat_template_kwargs": {"enable_thinking": False}},
            "has 'enable_thinking', which the chat template does not read; expected some of none",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'parts of the form {"type": "text"',
        ),
    ],
)
def test_what_is_wrong_is_named(post, path, changes, message):
    body = {"model": "tiny"} | (CHAT if path.startswith("chat") else OPTIONS) | changes
    answer = post(
        path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert message in error_of(answer, 400)["message"]


def test_a_chat_goes_on_with_the_messages_of_answers(served):
    """These have fields that are null."""
    _, client = served
    told = client.chat.completions.create(model="tiny", **CHAT).choices[0].message
    assert "refusal" in told.model_fields_set
    messages = [MESSAGE, told, MESSAGE]
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)


@pytest.mark.parametrize(
    "reply",
    [{"content": None, "tool_calls": []}, {"tool_calls": None}, {"content": "", "annotations": []}],
)
def test_a_reply_without_text_is_empty(reply):
    """As OpenAI's and vLLM's clients send one back."""
    messages = [MESSAGE, {"role": "assistant", "refusal": None} | reply, MESSAGE]
    _, [parsed] = chat({"model": "tiny", "messages": messages})
    assert parsed[1] == {"role": "assistant", "content": ""}


def test_an_option_of_a_stream_that_is_null_is_none():
    body = {"model": "tiny", "prompt": "x", "stream": True}
    fields, _ = completion(body | {"stream_options": {"include_usage": None}})
    assert fields.stream
    assert not fields.include_usage


def test_tokens_that_the_model_does_not_know_are_named(served):
    """Of a tokenizer that has more than the model."""
    service = dataclasses.replace(served[0].service, vocab_size=50)
    with pytest.raises(ApiError, match=r"prompt has token .*; expected 0 to 49"):
        service.tokens("x", service.texts)
    with pytest.raises(ApiError, match=r"messages has token .*; expected 0 to 49"):
        service.tokens([MESSAGE], service.texts)


def test_bodies_that_are_none(post, served):
    server, _ = served
    as_json = {"content-type": "application/json"}
    twice = b'{"model": "tiny", "prompt": "a", "prompt": "b", "max_tokens": 1}'
    numbers = b'{"a": ' + b"9" * 1500 + b"5e"
    for content in (b"", b"{", b"\xff", b"[" * 900, numbers, twice, b"null", b"7"):
        error_of(post(content=content, headers=as_json), 400)
    told = error_of(post(content=b"{}", headers={"content-type": "text/plain"}), 415)
    assert "expected application/json" in told["message"]
    body = json.dumps({"model": "tiny", "prompt": "x" * 2000})
    for content in (body.encode(), iter([body.encode()] * 5)):
        told = error_of(post(content=content, headers=as_json), 413)
        assert "more than 2000 bytes" in told["message"]
    error_of(post("nothing"), 404)
    wrong_method = httpx.get(f"{served[1].base_url}completions")
    error_of(wrong_method, 405)
    assert wrong_method.headers["allow"] == "POST"
    assert len(server.engine.free_rows) == 4


def test_a_body_without_end_is_cut_off(served):
    """Long after the limit the server stops reading."""
    _, client = served
    connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=20)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(10**12))
    connection.endheaders()
    sent = 0
    with contextlib.suppress(OSError), contextlib.closing(connection):
        while sent < 10**9:
            connection.send(b" " * 10**4)
            sent += 10**4
    # What the system's buffers take on both sides.
    assert sent < 10**8


def test_clients_that_hang_up_free_their_rows(served):
    server, client = served
    body = {
        "model": "tiny",
        "prompt": "1",
        "max_tokens": 90,
        "temperature": 1.0,
        "stop": "\x01\x02",
    }
    for stream in (False, True):
        text = json.dumps(body | {"stream": stream}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(text)
        )
        before = cancelled(server)
        while cancelled(server) == before:
            with socket.create_connection(("127.0.0.1", client.base_url.port)) as one:
                one.sendall(head + text)
            time.sleep(0.05)
    until(lambda: len(server.engine.free_rows) == 4 and not server.engine.waiting)


def cancelled(server):
    return server.metrics.answers.labels("tiny", "abort")._value.get()


@pytest.mark.slow
def test_a_full_queue_refuses(served):
    """Requests beyond rows and queue get 429 at once; the others are answered."""
    server, client = served
    streams, codes = [], []
    # Rows that are not read on stay busy for as long as their answers are.
    while not codes and len(streams) < 200:
        try:
            streams.append(
                client.completions.create(
                    model="tiny", prompt="1", max_tokens=90, temperature=1.2, stream=True
                )
            )
        except openai.RateLimitError as error:
            codes.append(error.code)
    assert codes == ["queue_full"]
    for stream in streams:
        *_, last = stream
        assert last.choices[0].finish_reason in ("length", "stop")
    until(lambda: len(server.engine.free_rows) == 4)


@pytest.mark.slow
def test_an_idle_connection_outlives_the_clients_patience(served):
    """OpenAI's client keeps one for five seconds: were the server's end at the same time, a request
    could meet it."""
    _, client = served
    connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port)
    with contextlib.closing(connection):
        for seconds in (0, 6):
            time.sleep(seconds)
            connection.request("GET", "/health")
            sock = connection.sock
            assert connection.getresponse().read()
            assert connection.sock is sock


@pytest.mark.parametrize(
    "first",
    [b"", GET, GET.replace(b"Host", b"Content-Length: 99\r\nHost")],
    ids=["first", "next", "body"],
)
@pytest.mark.parametrize("part", [b"", GET[:-2]], ids=["silent", "half"])
def test_a_request_that_does_not_arrive_closes_its_connection(served, first, part, monkeypatch):
    server, client = served
    monkeypatch.setattr(server._uvicorn.config, "timeout_keep_alive", 0.2)
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=20) as sock:
        if first:
            sock.sendall(first)
            assert sock.recv(10**4).startswith(b"HTTP/1.1 200")
        sock.sendall(part)
        assert sock.recv(1) == b""


def test_tokens_of_texts_and_chats(post, served):
    """The server's own prompts, and of an adapter's tokenizer."""
    tokenizer = served[0].service.texts.tokenizer

    def ask(path, **body):
        return post(f"../{path}", json=body)

    text = "12+30= ä"
    told = ask("tokenize", prompt=text).json()
    assert told == {"count": 9, "max_model_len": 96, "tokens": tokenizer.encode(text).ids}
    assert ask("tokenize", model="french", prompt=text, add_special_tokens=False).json() == told
    assert ask("detokenize", model="tiny", tokens=told["tokens"]).json() == {"prompt": text}
    chat = ask("tokenize", messages=[MESSAGE]).json()
    assert ask("detokenize", tokens=chat["tokens"]).json() == {"prompt": "user: x\n"}
    for path, body, message in (
        ("tokenize", {}, "prompt is None; expected a text, or messages"),
        ("tokenize", {"prompt": "a", "x": 1}, "Unrecognized request argument: 'x'"),
        ("tokenize", {"prompt": "a", "model": 5}, "model is 5; expected the name of a model"),
        ("detokenize", {"tokens": "a"}, "tokens is 'a'; expected a list of token ids"),
        ("detokenize", {"tokens": [257]}, "tokens has token 257; expected 0 to 256"),
    ):
        assert message in error_of(ask(path, **body), 400)["message"]
    error_of(ask("tokenize", model="none", prompt="a"), 404)


def test_version(served):
    answer = httpx.get(f"http://127.0.0.1:{served[1].base_url.port}/version")
    assert answer.json() == {"version": jax_dora.__version__}


@pytest.mark.parametrize("origins", [(), ("https://page.example",)])
def test_pages_of_other_origins_may_ask_only_if_they_are_named(served, origins):
    """Their browsers first ask without the key."""
    options = {"lifespan": contextlib.nullcontext, "ready": lambda: True, "body_bytes": 99}
    app = make_app(served[0].service, allowed_origins=origins, api_key="secret", **options)

    async def ask(origin):
        head = {"origin": origin, "authorization": "bearer secret"}
        first = {"access-control-request-method": "POST", "origin": origin}
        first["access-control-request-headers"] = "authorization,content-type"
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            asked = await client.options("/v1/completions", headers=first)
            return asked, await client.get("/v1/models", headers=head)

    for origin in ("https://page.example", "https://other.example"):
        asked, answer = asyncio.run(ask(origin))
        is_allowed = origin in origins
        assert (asked.status_code == 200) is is_allowed
        assert answer.status_code == 200
        name = "access-control-allow-origin"
        assert (answer.headers.get(name) == origin) is is_allowed
        assert (name in answer.headers) is is_allowed


def test_metrics_and_health(served):
    _, client = served
    root = f"http://127.0.0.1:{client.base_url.port}"
    client.completions.create(model="german", **OPTIONS)
    answer = httpx.get(f"{root}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    text = httpx.get(f"{root}/metrics").text
    values = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
    )
    assert values["jax_dora_adapters"] == "4.0"
    # Each adapter's, under two names.
    labels, reason = '{model_name="german"}', '{finished_reason="length",model_name="german"}'
    for ours, vllm, least in (
        (f"answers_total{reason}", f"request_success_total{reason}", 1),
        (f"first_token_seconds_count{labels}", f"time_to_first_token_seconds_count{labels}", 1),
        (f"inter_token_seconds_count{labels}", f"inter_token_latency_seconds_count{labels}", 1),
        (f"tokens_total{labels}", f"generation_tokens_total{labels}", 2),
        (f"prompt_tokens_total{labels}", f"prompt_tokens_total{labels}", 2),
        (f"seconds_count{labels}", f"e2e_request_latency_seconds_count{labels}", 1),
        (f"queued_seconds_count{labels}", f"request_queue_time_seconds_count{labels}", 1),
    ):
        assert float(values[f"jax_dora_{ours}"]) >= least
        assert values[f"vllm:{vllm}"] == values[f"jax_dora_{ours}"]
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert values[name + labels] == "0.0"
