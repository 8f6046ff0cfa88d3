"""A server of a model's folder: what `jax-dora serve` runs."""

import asyncio
import contextlib
import dataclasses
import math
import signal
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jax_dora.models import DecoderConfig, DecoderSharding, load_model, read_config
from jax_dora.models.tokenizer import TextSettings
from jax_dora.serve.adapters import Adapters
from jax_dora.serve.engine import Engine
from jax_dora.serve.http import make_app
from jax_dora.serve.metrics import Metrics
from jax_dora.serve.service import Service
from jax_dora.serve.slots import Slots, make_bank, warm_up

# Longer than clients keep a connection that they do not use (OpenAI's and httpx: 5 s): otherwise a
# request may meet its end.
KEEP_ALIVE_SECONDS = 30
# Nobody waits longer for what a client that has connected asks first.
FIRST_REQUEST_SECONDS = 30
# Of those to end within, so many are for telling who is still waiting that nothing more comes.
LAST_SECONDS = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that a server is started with.

    Attributes:
      model: a Hugging Face folder.
      adapters: the folder of which every folder is an adapter, by its name; None for the base only.
      name: the base model's; its folder's by default.
      dtype: of the base; config.json's by default.
      mesh: devices that share every request, as {"tp": 2}, or "auto" for all; None for one alone.
      quantize, act_qtype: what the base's projections are quantised to as they are read, and what
        they take, as `load_model`'s.
      slots, max_rank: of the bank: so many adapters at a time, of ranks up to this.
      batch: requests that are answered at a time.
      max_length: tokens of a prompt and its answer together; 2048 by default, or the model's most
        if that is less.
      chunk: tokens of prompts that are read between two steps.
      queue: requests that may wait.
      api_key: what clients have to know.
      body_bytes: of a request.
      scan_seconds: between looks at the folder of adapters.
      drain_seconds: for answers that are under way when the server is told to end.

    Raises:
      ValueError: name is empty, or max_length has no room for a prompt and an answer.
    """

    model: Path
    adapters: Path | None = None
    name: str | None = None
    dtype: str | None = None
    mesh: dict[str, int] | Literal["auto"] | None = None
    quantize: str | None = None
    act_qtype: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 8
    max_rank: int = 64
    batch: int = 32
    max_length: int | None = None
    chunk: int = 256
    queue: int = 256
    api_key: str | None = None
    body_bytes: int = 1 << 20
    scan_seconds: float = 1.0
    drain_seconds: int = 60

    def __post_init__(self) -> None:
        if self.name == "":
            raise ValueError("name is ''; expected one, or None for that of the model's folder")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"max_length is {self.max_length}; expected 2 or more, for a token of a prompt and "
                "one of its answer, or None for the default"
            )


class _Connection(H11Protocol):
    """A client's connection, closed if no request comes."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST_SECONDS, self._close_unused)

    def _close_unused(self) -> None:
        if self.cycle is None:
            self.transport.close()


def listen(settings: Settings) -> socket.socket:
    """Returns a socket at the address that the settings name.

    Raises:
      OSError: it is taken, or not to be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=1024)


class Server:
    """Loads and compiles what it serves when it is made; `run` serves until a signal or `stop`."""

    def __init__(self, settings: Settings, *, tell: Callable[[str], None] = print) -> None:
        """
        Args:
          tell: is called with every line that the one who runs it should read.

        Raises:
          FileNotFoundError, ValueError, NotImplementedError: the model's folder cannot be served.
        """
        self.settings, self._tell = settings, tell
        folder = settings.model
        if settings.adapters is not None and not settings.adapters.is_dir():
            raise FileNotFoundError(f"{settings.adapters} is no folder; expected one of adapters")
        config = read_config(folder)
        texts = TextSettings.of(folder, config)
        length = settings.max_length
        if length is None:
            length = min(2048, texts.max_tokens or 2048)
        texts.check_length(length, f"max_length is {length}")
        model = load_model(
            folder,
            sharding=_sharding(settings, config),
            quantize=settings.quantize,
            act_qtype=settings.act_qtype,
            dtype=settings.dtype,
        )
        self.metrics = metrics = Metrics()
        bank = make_bank(model, settings.slots, settings.max_rank) if settings.adapters else None
        slots = Slots(model, bank, settings.batch, length, settings.chunk)
        name = folder.resolve().name if settings.name is None else settings.name
        read = bank and (lambda folder: bank.bank.read(folder))
        self.adapters = Adapters(settings.adapters, read, taken=name, metrics=metrics, tell=tell)
        tokenizer = texts.tokenizer
        options = {"queue": settings.queue, "metrics": metrics}
        self.engine = Engine(slots, bank, tokenizer, texts.end_tokens, **options)
        known = min(tokenizer.get_vocab_size(), model.config.vocab_size)
        self.service = Service(name, self.engine, self.adapters, tokenizer, texts.template, known)
        # In a thread, as the engine runs: whatever JAX is told in this one alone, such as a context
        # manager's precision, makes other programs.
        with ThreadPoolExecutor(1) as thread:
            if bank is not None:
                thread.submit(warm_up, bank, model).result()
            thread.submit(slots.warm_up).result()
        self.adapters.scan(settle=False)
        self.failed = ""
        self._ends = threading.Event()
        app = make_app(
            self.service,
            lifespan=self._lifespan,
            ready=lambda: not self.failed,
            api_key=settings.api_key,
            body_bytes=settings.body_bytes,
        )
        # Bounds what is open and not answered: bodies under way, and clients yet to ask.
        most = 2 * (settings.queue + settings.batch) + 64
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_Connection,
                lifespan="on",
                log_level="warning",
                limit_concurrency=most,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(settings.drain_seconds, LAST_SECONDS),
            )
        )
        self._drains_until = math.inf
        self._socket: socket.socket | None = None

    def bind(self) -> tuple[str, int]:
        """Takes the address, and returns it; with port 0 the system chooses one.

        Raises:
          OSError: it is taken, or not to be had.
        """
        self._socket = listen(self.settings)
        return self._socket.getsockname()[:2]

    def run(self) -> bool:
        """Serves until SIGTERM, SIGINT or `stop`; returns whether it ended in good order.

        Answers that are under way are finished first, for at most `drain_seconds`.
        """
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        on_main = threading.current_thread() is threading.main_thread()
        # Uvicorn sends itself the signal again when it has ended, to whoever had it before.
        before = signal.signal(signal.SIGTERM, lambda *_: None) if on_main else None
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            if on_main:
                signal.signal(signal.SIGTERM, before)
        return not self.failed

    def stop(self) -> None:
        """Ends `run`, from any thread."""
        self._uvicorn.should_exit = True

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        thread = threading.Thread(target=self._answer, name="engine")
        thread.start()
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            self._ends.set()
            await asyncio.to_thread(thread.join)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.settings.scan_seconds)
            try:
                await asyncio.to_thread(self.adapters.scan)
            except Exception:  # the next look may go better
                self._tell(f"the folder of adapters: {traceback.format_exc()}")

    def _answer(self) -> None:
        try:
            while not self._ends.is_set() and not self._is_drained():
                if not self.engine.turn():
                    self.engine.wait(0.05)
            self.engine.fail("the server ends")
        except Exception as error:  # the arrays may be gone: nothing can be answered any more
            self.failed = f"{type(error).__name__}: {error}"
            self._tell(traceback.format_exc())
            self.engine.fail("the engine has failed; see the server's log")
            self.stop()

    def _is_drained(self) -> bool:
        """Returns whether the server is ending, and answers under way have had their time."""
        if self._uvicorn.should_exit and self._drains_until == math.inf:
            seconds = self.settings.drain_seconds - LAST_SECONDS
            self._drains_until = time.monotonic() + seconds
        return time.monotonic() >= self._drains_until


def _sharding(settings: Settings, config: dict[str, Any]) -> DecoderSharding | None:
    """Returns how the model lies on several devices; None for one alone."""
    mesh = settings.mesh
    if mesh is None:
        return None
    sizes: dict[str, Any] = {"tp": jax.device_count()} if mesh == "auto" else mesh
    if others := {name: size for name, size in sizes.items() if name != "tp" and size > 1}:
        raise ValueError(
            f"--mesh has {others}; expected tp alone, over which the devices of a server share "
            "every request: for more requests, run more servers"
        )
    sharding = DecoderSharding.over(**sizes)
    sharding.check(DecoderConfig.from_hf(config, dtype=settings.dtype), 1)
    return sharding
