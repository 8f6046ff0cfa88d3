"""The server that `jax-dora serve` runs."""

import asyncio
import contextlib
import math
import signal
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jax_dora.lm.models import DecoderConfig, DecoderSharding, load_model, read_config
from jax_dora.lm.models.tokenizer import TextSettings
from jax_dora.lm.serve.adapter_folder import AdapterTexts, read_arrays
from jax_dora.lm.serve.adapters import Adapters
from jax_dora.lm.serve.engine import Engine
from jax_dora.lm.serve.http import make_app
from jax_dora.lm.serve.metrics import Metrics
from jax_dora.lm.serve.runner import ModelRunner, largest_file, make_store, warm_up
from jax_dora.lm.serve.service import Service
from jax_dora.lm.serve.settings import Settings

# A connection is closed if its next request does not arrive, or if its client reads none of the
# output, within this time. It has to be longer than clients keep idle connections (OpenAI's client
# and httpx: 5 s), or a client may send a request while the server closes the connection.
KEEP_ALIVE_SECONDS = 30
# The time to read some of the output when the server is stopping.
LAST_READ_SECONDS = 5
# The part of the drain time that is reserved for sending errors to the remaining clients.
LAST_SECONDS = 1


class Connection(H11Protocol):
    """A client's connection, which is closed if the client keeps the server waiting.

    Uvicorn limits only how long a connection is idle. Here, the same time also limits how long a
    request takes to arrive, and how long a client reads nothing although there is output for it.
    """

    _request_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # `pause_writing` is then called for any output that the client does not take.
        transport.set_write_buffer_limits(high=0)
        self._read_seconds = self.timeout_keep_alive
        self._limit_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._request_timer)
        _cancel(self._read_timer)

    def on_response_complete(self) -> None:
        self._limit_request()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._read_timer)

    def shutdown(self) -> None:
        super().shutdown()
        self._read_seconds = min(self._read_seconds, LAST_READ_SECONDS)
        if self.flow.write_paused:
            self._limit_reading()
        if (limit := self.config.timeout_graceful_shutdown) is not None:
            # At the limit, uvicorn cancels what is still running, and logs it as an error.
            self.loop.call_later(limit - LAST_SECONDS, self.transport.abort)

    def _limit_request(self) -> None:
        _cancel(self._request_timer)
        self._request_timer = self.loop.call_later(
            self.timeout_keep_alive, self._close_unused, self.cycle
        )

    def _close_unused(self, last: Any) -> None:
        if self.cycle is last:  # no request has arrived since then
            self.transport.close()

    def _limit_reading(self) -> None:
        _cancel(self._read_timer)
        left = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self._read_seconds, self._drop_unread, left)

    def _drop_unread(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._limit_reading()
        else:
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def listen(settings: Settings) -> socket.socket:
    """Returns a socket that listens at the address in the settings.

    Raises:
      OSError: the address is in use or not available.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=1024)


class Server:
    """A server. The constructor loads and compiles the model; `run` serves until `stop`."""

    def __init__(self, settings: Settings, *, tell: Callable[[str], None] = print) -> None:
        """
        Args:
          settings: the settings.
          tell: a function that is called with lines of text for the operator of the server.

        Raises:
          FileNotFoundError, ValueError, NotImplementedError: the model cannot be served.
        """
        self.settings, self._tell = settings, tell
        folder = settings.model
        if settings.adapters is not None and not settings.adapters.is_dir():
            raise FileNotFoundError(f"adapters={settings.adapters}: expected a folder of adapters")
        config = read_config(folder)
        texts = TextSettings.of(folder, config, end_tokens=settings.end_tokens)
        length = settings.max_length
        if length is None:
            length = min(2048, texts.max_tokens or 2048)
        texts.check_length(length, f"max_length={length}")
        model = load_model(
            folder,
            sharding=_sharding(settings, config),
            quantize=settings.quantize,
            act_qtype=settings.act_qtype,
            dtype=settings.dtype,
        )
        self.metrics = metrics = Metrics()
        store = None
        if settings.adapters is not None:
            store = make_store(model, settings.slots, settings.max_rank, settings.host_bytes)
        rows = settings.batch, length, settings.chunk
        runner = ModelRunner(model, store, *rows, settings.kv_cache)
        name = settings.base_name
        self.adapters = Adapters(
            settings.adapters,
            store,
            None if store is None else lambda folder: read_arrays(store.bank, folder),
            read_texts=AdapterTexts(texts).read,
            base_name=name,
            metrics=metrics,
            tell=tell,
            file_bytes=None if store is None else largest_file(store.bank),
        )
        texts.template  # noqa: B018  a template that cannot be read is reported now
        options = {"queue": settings.queue, "metrics": metrics}
        self.engine = Engine(runner, store, texts.tokenizer, texts.end_tokens, **options)
        vocab_size = model.config.vocab_size
        self.service = Service(name, self.engine, self.adapters, texts, vocab_size)
        # In another thread, like the engine's: JAX settings of this thread, such as a context
        # manager's precision, would compile other programs than those that the engine uses.
        with ThreadPoolExecutor(1) as thread:
            if store is not None:
                thread.submit(warm_up, store, model).result()
            thread.submit(runner.warm_up).result()
        self.adapters.scan(settle=False)
        self.failed = ""
        self._stopped = threading.Event()
        app = make_app(
            self.service,
            lifespan=self._lifespan,
            ready=lambda: not self.failed,
            api_key=settings.api_key,
            allowed_origins=settings.allowed_origins,
            body_bytes=settings.body_bytes,
        )
        # Also bounds requests whose bodies are incomplete, and connections without a request.
        max_connections = 2 * (settings.queue + settings.batch) + 64
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                http=Connection,
                lifespan="on",
                log_level="warning",
                limit_concurrency=max_connections,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(settings.drain_seconds, LAST_SECONDS) + LAST_SECONDS,
            )
        )
        self._drains_until = math.inf
        self._socket: socket.socket | None = None

    def bind(self) -> tuple[str, int]:
        """Opens the socket, and returns its address. With port 0, the system chooses a port.

        Raises:
          OSError: the address is in use or not available.
        """
        self._socket = listen(self.settings)
        return self._socket.getsockname()[:2]

    def run(self) -> bool:
        """Serves until SIGTERM, SIGINT or `stop`; returns False if the engine has failed.

        Before it returns, running requests are finished, for at most `drain_seconds`.
        """
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        on_main = threading.current_thread() is threading.main_thread()
        # Uvicorn raises the signal again at its end, for the handler from before. This handler
        # ignores it, so that SIGTERM does not kill the process.
        previous = signal.signal(signal.SIGTERM, lambda *_: None) if on_main else None
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            if on_main:
                signal.signal(signal.SIGTERM, previous)
        return not self.failed

    def stop(self) -> None:
        """Makes `run` return. This may be called from any thread."""
        self._uvicorn.should_exit = True

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        thread = threading.Thread(target=self._run_engine, name="engine")
        thread.start()
        scans = asyncio.create_task(self._scan_adapters())
        try:
            yield
        finally:
            scans.cancel()
            self._stopped.set()
            await asyncio.to_thread(thread.join)

    async def _scan_adapters(self) -> None:
        while True:
            await asyncio.sleep(self.settings.scan_seconds)
            try:
                await asyncio.to_thread(self.adapters.scan)
            except Exception:  # the next scan may succeed
                self._tell(f"the scan of the adapters failed: {traceback.format_exc()}")

    def _run_engine(self) -> None:
        try:
            while not self._stopped.is_set() and not self._is_drained():
                if not self.engine.turn():
                    self.engine.wait(0.05)
            self.engine.fail("the server has stopped")
        except Exception as error:  # donated arrays may be lost, so the engine cannot continue
            self.failed = f"{type(error).__name__}: {error}"
            self._tell(traceback.format_exc())
            self.engine.fail("the engine has failed; see the server's log")
            self.stop()

    def _is_drained(self) -> bool:
        """Returns whether the server is stopping and the time for running requests is over."""
        if self._uvicorn.should_exit and self._drains_until == math.inf:
            seconds = self.settings.drain_seconds - LAST_SECONDS
            self._drains_until = time.monotonic() + seconds
        return time.monotonic() >= self._drains_until


def _sharding(settings: Settings, config: dict[str, Any]) -> DecoderSharding | None:
    """Returns how the model is sharded over several devices; None for a single device."""
    mesh = settings.mesh
    if mesh is None:
        return None
    sizes: Mapping[str, Any] = {"tp": jax.device_count()} if mesh == "auto" else mesh
    if others := [name for name in sizes if name != "tp"]:
        raise ValueError(
            f"mesh={settings.mesh}: expected only tp, not {', '.join(others)}, since the devices "
            "of a server compute every request together: for more requests, run more servers"
        )
    sharding = DecoderSharding.over(**sizes)
    DecoderConfig.from_hf(config, dtype=settings.dtype, sharding=sharding)  # checks the sizes
    return sharding
