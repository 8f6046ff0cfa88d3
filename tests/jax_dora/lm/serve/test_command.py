"""`jax-dora serve` as a process: SIGTERM drains, and bad flags end in one line."""

import concurrent.futures
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from unittest import mock

import httpx
import openai
import pytest

from jax_dora.lm.commands import main
from jax_dora.lm.models import generate, load_model, read_config
from jax_dora.lm.serve import Settings
from jax_dora.peft import load_adapter
from tests.jax_dora.lm.serve import serving
from tests.jax_dora.lm.serve.test_http import until


def waiting(client):
    """Returns how many requests wait for a row."""
    url = f"{str(client.base_url).removesuffix('/v1/')}/metrics"
    told = client._client.get(url, headers=client.auth_headers).text
    return sum(map(float, re.findall(r"^jax_dora_waiting{.*} (.*)$", told, re.MULTILINE)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_drain(model, adapters, tmp_path, number):
    """Who runs or waits is answered to the end, nobody else is, and the process ends well."""
    (tmp_path / "key").write_text("secret\n")
    flags = [f"--model={model}", f"--adapters={adapters}", "--port=0", "--batch=2", "--slots=2"]
    flags += [f"--api-key=@{tmp_path / 'key'}", "--max-length=400", "--chunk=16"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_dora", "serve", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        assert process.stderr
        while not (url := re.search(r"http://127\.0\.0\.1:\d+/v1", process.stderr.readline())):
            assert process.poll() is None
        with openai.OpenAI(base_url=url[0], api_key="secret", max_retries=0) as client:
            given = {"model": "french", "prompt": "a", "max_tokens": 390, "temperature": 0}
            stream = client.completions.create(**given, stream=True)
            text = next(stream).choices[0].text
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(client.completions.create, **given) for _ in range(8)]
                until(lambda: waiting(client) > 3)
                process.send_signal(number)
                events = list(stream)
                answers = [one.result() for one in asked]
            assert events[-1].choices[0].finish_reason == "length"  # not much sooner
            text += "".join(event.choices[0].text for event in events)
            assert {one.choices[0].text for one in answers} == {text}
            assert process.wait(60) == (0 if number == signal.SIGTERM else 130)
            with pytest.raises(openai.APIConnectionError):
                client.models.list()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_who_waits_longer_than_the_end_takes_is_told(settings):
    """In place of a connection that breaks off."""
    changes = {"adapters": None, "batch": 1, "chunk": 16, "max_length": 500, "drain_seconds": 0}
    with serving.serving(dataclasses.replace(settings, **changes)) as (server, client):
        stream = client.completions.create(
            model="tiny", prompt="1", max_tokens=490, temperature=0, stream=True
        )
        next(stream)
        server.stop()
        with pytest.raises(openai.APIError, match="the server has stopped"):
            list(stream)


@pytest.mark.slow
@pytest.mark.parametrize(
    "formats",
    [("nf4", None, None), ("float8_e4m3fn", "float8_e4m3fn", None), (None, None, "float8_e4m3fn")],
    ids=["nf4", "fp8", "kv_cache"],
)
def test_a_quantised_base(model, adapters, settings, formats):
    """Each adapter answers as it does alone over the quantised base."""
    *weights, kv_cache = formats
    given = dict(zip(("quantize", "act_qtype"), weights, strict=True))
    base = load_model(model, **given)
    changed = dataclasses.replace(settings, **given, kv_cache=kv_cache)
    with serving.serving(changed) as (server, client):
        tokenizer = server.service.texts.tokenizer
        prompt, answers = "12+30=", []
        tokens = tokenizer.encode(prompt).ids
        for name in ("tiny", "french", "lora"):
            alone = base if name == "tiny" else load_adapter(base, adapters / name)
            (wanted,) = generate(alone, [tokens], 12, ends=[256], kv_cache=kv_cache)
            given = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
            found = client.completions.create(model=name, **given).choices[0].text
            assert found == tokenizer.decode(wanted), name
            answers.append(found)
        assert len(set(answers)) == 3


@pytest.mark.slow
def test_a_key_is_asked_for(model, settings):
    changed = dataclasses.replace(settings, adapters=None, api_key="secret", batch=1, chunk=16)
    with serving.serving(changed) as (server, client):
        assert [one.id for one in client.models.list()] == ["tiny"]
        root = str(client.base_url).removesuffix("/v1/")
        for wrong in ("", "Bearer secre", "Bearer secret2", "secret"):
            for path in ("/v1/models", "/metrics", "/v1/completions"):
                answer = httpx.get(f"{root}{path}", headers={"authorization": wrong})
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert server.metrics.refused.labels(401)._value.get() == 12
        models = httpx.get(f"{root}/v1/models", headers={"authorization": "bearer secret"})
        assert models.status_code == 200
        assert httpx.get(f"{root}/health").status_code == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--adapters nowhere", "--adapters nowhere: expected a folder of adapters"),
        ("--max-length 600", "--max-length 600; expected at most config.json"),
        ("--port 70000", "--port 70000: expected an integer from 0 to 65,535"),
        ("--api-key @nowhere", "No such file"),
        ("--api-key @MODEL/model.safetensors", "model.safetensors' is not a text file"),
        ("--api-key=", "the key is empty"),
        ("--name= --batch 0", "--name '': expected a name"),
        ("--max-length 0", "--max-length 0: expected an integer from 2"),
        ("--batch 0", "--batch 0: expected an integer from 1"),
        ("--quantize int3", "argument --quantize: invalid choice: 'int3'"),
        ("--activations float8_e4m3fn", "the model is not quantised; expected --quantize '"),
        ("--slots 2", "--slots needs --adapters"),
        ("--max-rank 8", "--max-rank needs --adapters"),
        ("--host-gib 1", "--host-gib needs --adapters"),
        ("--host-gib -1", "'-1' is out of range: expected a number of at least 0"),
        ("--activations int8", "argument --activations: invalid choice: 'int8'"),
        ("--kv-cache int8", "argument --kv-cache: invalid choice: 'int8'"),
        ("--mesh foo=2", "expected auto, or sizes of tp of at least 1, as in tp=2"),
        ("--mesh dp=2", "--mesh {'dp': 2}: expected only tp"),
        ("--mesh dp=1,tp=2", "--mesh {'dp': 1, 'tp': 2}: expected only tp, not dp"),
        ("--mesh tp=3", "the mesh dp=1,fsdp=1,tp=3 has 3 devices"),
        ("--mesh auto", "num_attention_heads=4: expected a multiple of 8, since tp of the"),
    ],
)
def test_bad_flags(model, flags, message, capsys):
    assert read_config(model)["max_position_embeddings"] == 512
    flags = flags.replace("MODEL", str(model))
    assert main(["serve", "--model", str(model), *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "names"), [(1, "m0"), (5, "m0, m1, m2, m3, m4"), (7, "m0, m1, m2, m3, m4 and 2 more")]
)
def test_how_many_models_are_served_is_told(model, monkeypatch, capsys, count, names):
    fake = mock.Mock()
    fake.return_value.service.models.return_value = [f"m{number}" for number in range(count)]
    fake.return_value.bind.return_value = ("127.0.0.1", 80)
    monkeypatch.setattr("jax_dora.lm.serve.server.Server", fake)
    assert main(["serve", "--model", str(model), "--port", "0"]) == 0
    assert f"Serving {names} at http://127.0.0.1:80/v1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_length": 0}, "max_length=0: expected an integer from 2"),
        ({"name": ""}, "name='': expected a name"),
        ({"allowed_origins": ["https://a.example/"]}, "allowed_origins='https://a.example/': exp"),
        ({"allowed_origins": ["a.example"]}, r"allowed_origins='a.example': expected \* or a sch"),
        ({"batch": 0}, "batch=0: expected an integer from 1"),
        ({"chunk": 0}, "chunk=0: expected an integer from 1"),
        ({"queue": 0}, "queue=0: expected an integer from 1"),
        ({"slots": -1}, "slots=-1: expected an integer from 1"),
        ({"host_bytes": -1}, "host_bytes=-1: expected an integer from 0"),
    ],
)
def test_settings_that_are_empty_are_no_defaults(model, fields, message):
    with pytest.raises(ValueError, match=message):
        Settings(model, **fields)


def test_a_mesh_asks_the_file_for_no_dtype_that_a_flag_gives(model, tmp_path, capsys):
    config = read_config(model) | {"dtype": "float64"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(model / "tokenizer.json", tmp_path)
    given = ["--model", str(tmp_path), "--mesh", "auto", "--dtype", "float32"]
    assert main(["serve", *given]) == 2
    assert "tp of the mesh is 8" in capsys.readouterr().err


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded(model, monkeypatch, capsys):
    monkeypatch.setattr("jax_dora.lm.serve.server.load_model", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(model), "--port", str(port)]) == 2
    assert f"--port {port}: [Errno" in capsys.readouterr().err
