"""`vllm serve` with adapters, and the plugin as vLLM finds it: by its entry point."""

import concurrent.futures
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.torch_dora.vllm.engines import PROMPTS, TOKENS, Zoo

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SECONDS = 240  # to start


class Client:
    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def post(self, path, **fields):
        """Returns the status and the text of an answer."""
        body = json.dumps(fields).encode()
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def tokens(self, model, prompt):
        options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        options["skip_special_tokens"] = False  # such as t0
        status, text = self.post("/v1/completions", model=model, prompt=list(prompt), **options)
        assert status == 200, text
        return [
            int(word.removeprefix("t")) for word in json.loads(text)["choices"][0]["text"].split()
        ]

    def is_ready(self):
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return Zoo("Llama", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def client(zoo):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(zoo.folder)]
    command += ["--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]
    command += ["--enable-lora", "--max-loras", "8", "--max-cpu-loras", "9"]
    command += ["--max-lora-rank", "16", "--fully-sharded-loras", "--lora-modules"]
    command += [f"{name}={zoo.path(name)}" for name in ("dora", "lora", "some")]
    (zoo.root / "resolved").mkdir()
    environment = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(zoo.root / "resolved"),
    }
    log = zoo.root / "log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            made, end = Client(port), time.monotonic() + SECONDS
            while not made.is_ready():
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.5)
            yield made
        finally:
            server.terminate()
            server.wait(60)


def check(zoo, client, names):
    """Asks for all adapters at the same time."""
    pairs = [(name, tuple(prompt)) for prompt in PROMPTS for name in names]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda pair: client.tokens(*pair), pairs))
    for (name, prompt), tokens in zip(pairs, found, strict=True):
        adapter = None if name == "base" else name
        assert tokens == zoo.expected(adapter, prompt)[0], name


def test_adapters_of_the_command_line_answer_together(zoo, client):
    check(zoo, client, ["base", "dora", "lora", "some"])


def test_a_resolver_finds_an_adapter_that_a_request_names(zoo, client):
    folder = zoo.root / "resolved" / "found"
    shutil.copytree(zoo.path("rslora"), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(zoo.folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prompt = PROMPTS[0]
    assert client.tokens("found", prompt) == zoo.expected("rslora", tuple(prompt))[0]
    assert client.post("/v1/unload_lora_adapter", lora_name="found")[0] == 200

    config.pop("use_dora")
    refused = zoo.root / "resolved" / "refused"
    shutil.copytree(folder, refused)
    (refused / "adapter_config.json").write_text(json.dumps(config))
    assert client.post("/v1/completions", model="refused", prompt=[1])[0] == 400


def test_adapters_come_and_go_while_requests_for_others_run(zoo, client):
    load, prompt, turns = "/v1/load_lora_adapter", PROMPTS[0], ("rslora", "patterns") * 3
    expected = {name: zoo.expected(name, tuple(prompt))[0] for name in turns}
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        others = beside.submit(check, zoo, client, ["base", "dora", "lora", "some"] * 4)
        answered = 0
        for name in turns:
            how = {"lora_path": str(zoo.path(name)), "load_inplace": True}
            status, text = client.post(load, lora_name="other", **how)
            assert status == 200, text
            assert client.tokens("other", prompt) == expected[name]
            answered += not others.done()
        others.result()
    assert answered > 1  # Those were not answered before.
    assert client.post("/v1/unload_lora_adapter", lora_name="other")[0] == 200


def test_adapters_are_loaded_replaced_refused_and_removed(zoo, client):
    load, path = "/v1/load_lora_adapter", str(zoo.path("rslora"))
    status, text = client.post(load, lora_name="rslora", lora_path=path)
    assert status == 200, text
    check(zoo, client, ["dora", "rslora", "base"])

    damaged = zoo.root / "damaged"
    shutil.copytree(zoo.path("dora"), damaged)
    config = json.loads((damaged / "adapter_config.json").read_text())
    (damaged / "adapter_config.json").write_text(json.dumps(config | {"use_dora": False}))
    status, text = client.post(load, lora_name="damaged", lora_path=str(damaged))
    assert status >= 400
    assert "adapter_config.json has no use_dora, but the folder has magnitudes" in text
    assert client.post("/v1/completions", model="damaged", prompt=[1])[0] == 404

    path = str(zoo.path("patterns"))
    status, text = client.post(load, lora_name="rslora", lora_path=path, load_inplace=True)
    assert status == 200, text
    assert client.tokens("rslora", PROMPTS[0]) == zoo.expected("patterns", tuple(PROMPTS[0]))[0]
    status, text = client.post("/v1/unload_lora_adapter", lora_name="rslora")
    assert status == 200, text
    assert client.post("/v1/completions", model="rslora", prompt=[1])[0] == 404
    check(zoo, client, ["base", "dora", "lora", "some"])
