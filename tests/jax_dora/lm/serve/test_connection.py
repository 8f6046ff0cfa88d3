"""Clients that do not read: their connections are dropped, and do not hold the server's end."""

import contextlib
import logging
import socket
import threading
import time

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from jax_dora.lm.serve import server
from tests.jax_dora.lm.serve.test_http import GET, until

ANSWER = PlainTextResponse("x" * 10**7)


@pytest.fixture(params=["asyncio", "auto"])
def start(request):
    """Starts a server of large answers, and returns it with its port and its thread."""
    with contextlib.ExitStack() as stack:

        def start(**options):
            listener = socket.create_server(("127.0.0.1", 0))
            # So that little that is read makes room for more.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
            config = uvicorn.Config(
                ANSWER,
                http=server.Connection,
                lifespan="off",
                log_config=None,
                loop=request.param,
                **options,
            )
            made = uvicorn.Server(config)
            thread = threading.Thread(target=made.run, args=([listener],))
            thread.start()
            stack.callback(thread.join, 60)
            stack.callback(setattr, made, "should_exit", True)
            return made, listener.getsockname()[1], thread

        yield start


@pytest.fixture
def logged(caplog):
    """What uvicorn logs, even if another server has told its logger not to pass it on."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@contextlib.contextmanager
def client_that_does_not_read(made, port):
    """A client that sends several requests, and reads none of the answers."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", port))
        sock.sendall(GET * 100)
        until(lambda: any(one.flow.write_paused for one in list(made.server_state.connections)))
        yield sock


def test_who_does_not_read_is_dropped(start):
    made, port, _ = start(timeout_keep_alive=0.3, timeout_graceful_shutdown=50)
    with client_that_does_not_read(made, port):
        until(lambda: not made.server_state.connections and not made.server_state.tasks)


@pytest.mark.ci
def test_who_reads_slowly_is_not(start):
    """An answer may take longer than the limit, as long as some of it is read meanwhile."""
    made, port, _ = start(timeout_keep_alive=1, timeout_graceful_shutdown=50)
    with client_that_does_not_read(made, port) as sock:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            assert sock.recv(10**5)
            time.sleep(0.01)
        assert made.server_state.connections


@pytest.mark.parametrize(("last_read", "graceful"), [(0.3, 50), (5, 2)])
@pytest.mark.ci
def test_who_does_not_read_does_not_hold_the_end(start, monkeypatch, logged, last_read, graceful):
    """Neither until the last moment, when uvicorn would log a traceback."""
    monkeypatch.setattr(server, "LAST_READ_SECONDS", last_read)
    made, port, thread = start(timeout_keep_alive=30, timeout_graceful_shutdown=graceful)
    with client_that_does_not_read(made, port):
        made.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
    assert not logged.records
