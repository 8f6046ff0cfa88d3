"""Two replicas behind Ray Serve, of which one is killed under load."""

import asyncio
import concurrent.futures
import dataclasses
import os
import signal
import time
from pathlib import Path
from unittest import mock

import httpx
import pytest
from starlette.requests import Request

from jax_dora.serve import Settings
from tests.jax_dora.serve import serving

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
NAMES = ("tiny", "one", "two", "three")


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_killed_replica_loses_no_request(tmp_path):
    import ray  # pyright: ignore[reportMissingImports]
    import serve_ray
    from ray import serve  # pyright: ignore[reportMissingImports]

    model, adapters = tmp_path / "tiny", tmp_path / "adapters"
    serving.make_model(model)
    for seed, name in enumerate(NAMES[1:]):
        serving.write_adapter(model, adapters / name, seed)
    settings = Settings(model, adapters, port=0, slots=2, max_rank=8, batch=4, max_length=64)
    settings = dataclasses.replace(settings, chunk=16)
    paths = f"{ROOT}:{ROOT / 'examples'}"
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8123})
        serve.run(serve_ray.application(settings, 2, 0), name="served", route_prefix="/")
        handle = serve.get_deployment_handle("Replica", "served")
        pids: set[int] = set()
        while len(pids) < 2:
            pids.add(handle.process.remote().result())
        url = "http://127.0.0.1:8123/v1/completions"

        def ask(number):
            body = {"model": NAMES[number % 4], "prompt": "12+30=", "temperature": 0}
            return httpx.post(url, json=body | {"max_tokens": 40}, timeout=200)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, number) for number in range(120)]
            while sum(one.done() for one in asked) < 20:
                time.sleep(0.01)
            os.kill(min(pids), signal.SIGKILL)
            answers = [one.result() for one in asked]
        assert [one.status_code for one in answers] == [200] * 120
        texts = [one.json()["choices"][0]["text"] for one in answers]
        for first in range(4):
            assert len(set(texts[first::4])) == 1
        assert len(set(texts)) == 4
        as_json = {"content-type": "application/json"}
        assert httpx.post(url, content=b"{", headers=as_json, timeout=60).status_code == 400
        assert httpx.post(url, content=b"{", timeout=60).status_code == 415
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream; charset=utf-8"])
def test_only_a_stream_ends_with_its_replica(kind):
    import serve_ray
    from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

    class Handle:
        """A replica that dies in the first answer."""

        def __init__(self):
            self.ask, self.asked = self, 0

        def options(self, **_):
            return self

        async def remote(self, *_):
            self.asked += 1
            yield 200, kind
            yield b"be"
            if self.asked == 1:
                raise RayError
            yield b"gun"

    async def answered():
        handle, request = Handle(), mock.Mock(method="POST")
        request.headers.raw = []
        _, _, first, rest = await serve_ray.Ingress(handle, 10)._ask(handle, request, b"")
        return first + b"".join([part async for part in rest])

    if kind == "application/json":
        assert asyncio.run(answered()) == b"begun"
    else:
        with pytest.raises(RayError):
            asyncio.run(answered())


class Recorder:
    """A replica that keeps what it is asked."""

    def __init__(self):
        self.ask, self.names, self.asked = self, [], []

    def options(self, multiplexed_model_id="", **_):
        self.names.append(multiplexed_model_id)
        return self

    async def remote(self, *asked):
        self.asked.append(asked)
        yield 200, "application/json"


def forward(handle, body, headers=()):
    """Returns the ingress's answer to a body that comes in two parts."""
    import serve_ray

    parts = [body[:9], body[9:]]
    messages = [{"type": "http.request", "body": one, "more_body": True} for one in parts]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    receive = mock.AsyncMock(side_effect=[*messages, {"type": "http.request"}])
    return asyncio.run(serve_ray.Ingress(handle, 10**4)(Request(scope, receive)))


@pytest.mark.filterwarnings("ignore")
def test_the_headers_that_a_server_checks_are_forwarded():
    handle = Recorder()
    headers = [(b"content-type", b"text/plain"), (b"authorization", b"Bearer s\xe9cret")]
    assert forward(handle, b'{"model": "one"}', [*headers, (b"cookie", b"x")]).status_code == 200
    assert handle.asked == [("POST", "/v1/completions", headers, b'{"model": "one"}')]
    assert handle.names[-1] == "one"


@pytest.mark.filterwarnings("ignore")
def test_a_body_that_is_nested_too_deeply_is_left_to_the_replica():
    handle = Recorder()
    assert forward(handle, b"[" * 10**4).status_code == 200
    assert handle.names[-1] == ""


@pytest.mark.filterwarnings("ignore")
def test_a_long_body_is_not_forwarded():
    handle = Recorder()
    answer = forward(handle, b"x" * 10001)
    assert answer.status_code == 413
    assert b"more than 10000 bytes" in answer.body
    assert not handle.asked
