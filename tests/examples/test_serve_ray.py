"""Two replicas behind Ray Serve: where requests go, and one that is killed under load."""

import asyncio
import concurrent.futures
import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from unittest import mock

import httpx
import pytest
from starlette.requests import Request

from jax_dora.lm.serve import Settings
from tests.jax_dora.lm.serve import serving

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
NAMES = ("tiny", "one", "two", "three")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The URL and the replicas of a cluster with two replicas, each on a mesh."""
    import ray  # pyright: ignore[reportMissingImports]
    import serve_ray
    from ray import serve  # pyright: ignore[reportMissingImports]

    folder = tmp_path_factory.mktemp("ray")
    model, adapters = folder / "tiny", folder / "adapters"
    serving.make_model(model)
    for seed, name in enumerate(NAMES[1:]):
        serving.write_adapter(model, adapters / name, seed)
    settings = Settings(model, adapters, slots=2, max_rank=8, batch=4, max_length=64, chunk=16)
    settings = dataclasses.replace(settings, mesh={"tp": 2})
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environment})
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8123})
        serve.run(serve_ray.application(settings, 2, 0), name="served", route_prefix="/")
        yield "http://127.0.0.1:8123/v1", serve.get_deployment_handle("Replica", "served")
    finally:
        serve.shutdown()
        ray.shutdown()


def complete(url, name, **options):
    body = {"model": name, "prompt": "12+30=", "temperature": 0, "max_tokens": 40} | options
    return httpx.post(f"{url}/completions", json=body, timeout=200)


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_requests_for_an_adapter_go_to_one_replica(cluster):
    """While both are idle. Requests for the base model go to both."""
    url, _ = cluster

    def replicas(name, count=12):
        answers = [complete(url, name, max_tokens=1) for _ in range(count)]
        assert {one.status_code for one in answers} == {200}
        return {one.headers["x-replica"] for one in answers}

    for name in NAMES[1:]:
        complete(url, name)
    time.sleep(3)  # Replicas tell the ingress what they have used, after a while.
    assert [len(replicas(name)) for name in NAMES[1:]] == [1, 1, 1]
    assert len(replicas(NAMES[0], 24)) == 2


@pytest.mark.filterwarnings("ignore")
def test_errors_are_those_of_a_server(cluster):
    url, _ = cluster
    answer = complete(url, "thre")
    assert answer.status_code == 404
    assert "the nearest are 'three'" in answer.json()["error"]["message"]
    as_json = {"content-type": "application/json"}
    answers = [
        httpx.post(f"{url}/completions", content=b"{", headers=headers, timeout=60)
        for headers in (as_json, {})
    ]
    assert [one.status_code for one in answers] == [400, 415]


@pytest.mark.filterwarnings("ignore")
def test_a_killed_replica_loses_no_request(cluster):
    url, replicas = cluster
    pids: set[int] = set()
    while len(pids) < 2:
        pids.add(replicas.process.remote().result())
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(complete, url, NAMES[number % 4]) for number in range(120)]
        while sum(one.done() for one in asked) < 20:
            time.sleep(0.01)
        os.kill(min(pids), signal.SIGKILL)
        answers = [one.result() for one in asked]
    assert [one.status_code for one in answers] == [200] * 120
    texts = [one.json()["choices"][0]["text"] for one in answers]
    for first in range(4):
        assert len(set(texts[first::4])) == 1
    assert len(set(texts)) == 4


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
            yield 200, {"content-type": kind}
            yield b"be"
            if self.asked == 1:
                raise RayError
            yield b"gun"

    async def answered():
        handle, request = Handle(), mock.Mock(method="POST")
        request.headers.raw = []
        ingress = serve_ray.Ingress(handle, Settings(Path("tiny")))
        _, _, first, rest = await ingress._ask(handle, request, b"")
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
        yield 200, {"content-type": "application/json"}


def forward(handle, body, headers=(), adapters=None):
    """Returns the ingress's answer to a body that comes in two parts."""
    import serve_ray

    parts = [body[:9], body[9:]]
    messages = [{"type": "http.request", "body": one, "more_body": True} for one in parts]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    receive = mock.AsyncMock(side_effect=[*messages, {"type": "http.request"}])
    settings = Settings(Path("tiny"), adapters, body_bytes=10**4)
    return asyncio.run(serve_ray.Ingress(handle, settings)(Request(scope, receive)))


@pytest.mark.filterwarnings("ignore")
def test_ray_learns_of_a_failed_server():
    import serve_ray

    def health(status):
        replica = object.__new__(serve_ray.Replica)
        transport = httpx.MockTransport(
            lambda request: httpx.Response(status if request.url.path == "/health" else 404)
        )
        replica._client = httpx.AsyncClient(base_url="http://replica", transport=transport)
        return asyncio.run(replica.check_health())

    health(200)
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        health(503)


@pytest.mark.filterwarnings("ignore")
def test_the_headers_that_a_server_checks_are_forwarded():
    handle = Recorder()
    headers = [(b"content-type", b"text/plain"), (b"authorization", b"Bearer s\xe9cret")]
    assert forward(handle, b'{"model": "one"}', [*headers, (b"cookie", b"x")]).status_code == 200
    assert handle.asked == [("POST", "/v1/completions", headers, b'{"model": "one"}')]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "routed"),
    [("one", "one"), ("tiny", ""), ("two", ""), ("../one", ""), ("one/", ""), (5, ""), ([], "")],
)
def test_ray_gets_the_names_of_adapters_only(tmp_path, name, routed):
    """It would remember every name, and send all requests for the base model to one replica."""
    for folder in ("one", "tiny"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").touch()
    handle = Recorder()
    assert forward(handle, json.dumps({"model": name}).encode(), (), tmp_path).status_code == 200
    assert handle.names[-1] == routed
    assert len(handle.asked) == 1


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("flags", "gpus"),
    [("", 1), ("--mesh tp=2", 2), ("--mesh tp=2 --gpus 0", 0), ("--mesh auto --gpus 4", 4)],
)
def test_a_replica_has_the_gpus_of_its_mesh(flags, gpus):
    import serve_ray

    given = serve_ray.parse(["--model", "tiny", *flags.split()])
    assert given.gpus == gpus
    app = serve_ray.application(serve_ray.server_settings(given), 1, given.gpus)
    (replica, settings) = app._bound_deployment.init_args
    assert replica._bound_deployment.ray_actor_options["num_gpus"] == gpus
    assert settings.mesh == given.mesh


@pytest.mark.filterwarnings("ignore")
def test_flags_of_a_server_are_the_replicas(capsys):
    import serve_ray

    flags = "--slots 3 --max-rank 16 --quantize nf4 --api-key secret --host ::1 --port 1 --batch 7"
    given = serve_ray.parse(["--model", "tiny", "--adapters", "a", *flags.split()])
    with mock.patch.object(serve_ray.serve, "multiplexed") as multiplexed:
        app = serve_ray.application(serve_ray.server_settings(given), 2, 0)
    multiplexed.assert_called_once_with(max_num_models_per_replica=3)
    replica = app._bound_deployment.init_args[0]._bound_deployment
    (settings,) = replica.init_args
    expected = Settings(Path("tiny"), Path("a"), slots=3, max_rank=16, quantize="nf4", batch=7)
    assert settings == dataclasses.replace(expected, api_key="secret", port=0)
    assert (replica.num_replicas, replica.max_ongoing_requests) == (2, 7 + 256)
    with pytest.raises(SystemExit):
        serve_ray.parse(["--model", "tiny", "--mesh", "auto"])
    assert "--mesh auto needs --gpus" in capsys.readouterr().err
