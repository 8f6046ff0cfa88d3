"""Detects when one of several processes that train one model ends.

When a process is killed, the others wait in a collective operation that fails late or never ends.
JAX notices after a minute or more and aborts. The operating system closes the connections of a
killed process at once. So each process keeps a connection to the first process, and the first
process forwards the news to all others.
"""

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# TCP keep-alive settings, in seconds: a peer that is silent for IDLE + INTERVAL * PROBES is
# considered dead.
IDLE, INTERVAL, PROBES = 10, 5, 3
MAX_LINE = 64  # bytes


class PeerMonitor:
    """The connections of one process to its peers. It ends the process when a peer is gone.

    A message is a line with an event and the number of the process that it is about:

    - "ended": the process has finished normally.
    - "stopped": the process has stopped with an error, which it prints itself.
    - "gone": the process has closed its connection without a message.

    Attributes:
      advice: returns what the user can do next. It is printed when this process ends.
    """

    # In seconds: how long to wait for news of another process after an error of a connection, and
    # for an error to be printed; how long a process keeps running after another one has stopped;
    # and how much longer the first process keeps running.
    NEWS_WAIT, GRACE, FIRST_DELAY = 2.0, 10.0, 0.5

    def __init__(
        self,
        index: int,
        others: Mapping[int, socket.socket],
        stop: Callable[[str], Any] | None = None,
    ) -> None:
        """
        Args:
          index: the number of this process.
          others: the connections, by the number of the process at the other end.
          stop: ends the process. It is called with the line to print, or with "" if this process
            has printed an error already. By default, it exits with status 1.
        """
        self.index, self.others = index, others
        self.advice: Callable[[], str] = lambda: "Start all processes again with the same command"
        self._stop = stop or _exit
        self._lock, self._has_news = threading.Lock(), threading.Event()
        self._event = self._message = ""  # what has happened to another process
        self._end: str | None = None  # how this process has ended
        for number, connection in others.items():
            _keep_alive(connection)
            threading.Thread(target=self._watch, args=(number, connection), daemon=True).start()

    @contextlib.contextmanager
    def reporting(self) -> Iterator["PeerMonitor"]:
        """Tells the peers how the block has ended.

        If the block raises an error of a connection because another process has ended, this process
        prints what happened to the other process and ends.
        """
        try:
            yield self
        except BaseException as error:
            self._end = "stopped"
            self._send(f"stopped {self.index}")
            # The error can be raised shortly before the news arrives.
            if self.others and _is_connection_error(error) and self._has_news.wait(self.NEWS_WAIT):
                # If all processes have stopped for the same reason, each prints its own error.
                here = f" Here: {str(error).splitlines()[0]}" if self._event == "stopped" else ""
                self._stop(self._message + here)
            raise
        self._end = "ended"
        self._send(f"ended {self.index}")
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        for connection in self.others.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _watch(self, number: int, connection: socket.socket) -> None:
        """Reads the messages of one peer until the peer ends."""
        event = ""
        while event not in ("ended", "gone"):
            message = _read(connection)
            # A process that has stopped with an error closes its connections as well.
            if self._end == "ended" or (message is None and event == "stopped"):
                return
            event, who = message or ("gone", number)
            if event != "ended":
                self._handle(event, who)

    def _handle(self, event: str, who: int) -> None:
        """Forwards the news of process `who` to the other peers, and ends this process.

        If `who` has stopped with an error, this process waits first: most errors occur in all
        processes, and then each process prints its own.
        """
        if who == self.index:
            return
        reason = (
            "has stopped and printed the reason" if event == "stopped" else "was killed or lost"
        )
        with self._lock:
            # A process that is gone explains errors of others, even if those were reported before.
            if self._event == "gone" or self._event == event:
                return
            self._event = event
            self._message = f"Stopped: process {who} {reason}. {self.advice()}"
        self._send(f"{event} {who}")
        self._has_news.set()
        # The first process ends last, since JAX aborts the other processes when it ends.
        delay = self.FIRST_DELAY if len(self.others) > 1 else 0.0
        seconds = delay + (self.GRACE if event == "stopped" else 0.0)
        try:
            threading.Thread(target=self._stop_after, args=(seconds,), daemon=True).start()
        except RuntimeError:  # Python is shutting down and starts no more threads.
            self._stop_after(seconds)

    def _stop_after(self, seconds: float) -> None:
        time.sleep(seconds)
        with self._lock:
            end, self._end = self._end, self._end or "stopping"
        if end == "stopped":
            time.sleep(self.NEWS_WAIT)  # the error is printed meanwhile
            self._stop("")
        elif end is None:
            self._stop(self._message)

    def _send(self, line: str) -> None:
        for connection in self.others.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())


def listen_for_peers(
    count: int, host: str
) -> tuple[str, Callable[[float], dict[int, socket.socket]]]:
    """Opens a port for the connections of the other processes.

    Args:
      count: the number of processes.
      host: the name or address of this host for the others.

    Returns:
      The address for `connect`, and a function that waits up to the given number of seconds and
      returns the connections made by then, by the number of the process.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    server = socket.create_server(
        ("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=count
    )
    token = secrets.token_hex(8)  # rejects connections of other programs

    def accept(seconds: float) -> dict[int, socket.socket]:
        others: dict[int, socket.socket] = {}
        deadline = time.monotonic() + seconds
        with server, contextlib.suppress(OSError):
            while len(others) < count - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                connection, _ = server.accept()
                word, number = _read(connection, deadline) or ("", 0)
                if word == token:
                    connection.settimeout(None)
                    others[number] = connection
                else:
                    connection.close()
        return others

    return f"{host} {server.getsockname()[1]} {token}", accept


def connect(address: str, index: int, seconds: float) -> dict[int, socket.socket]:
    """Connects process `index` to the first process.

    Args:
      address: an address returned by `listen_for_peers`, or "".

    Returns:
      The connection by the number of the first process, 0; empty if there is no address or the
      first process cannot be reached.
    """
    if not address:
        return {}
    host, port, token = address.split()
    try:
        connection = socket.create_connection((host, int(port)), seconds)
        connection.sendall(f"{token} {index}\n".encode())
    except OSError:
        return {}
    connection.settimeout(None)
    return {0: connection}


def _read(connection: socket.socket, deadline: float | None = None) -> tuple[str, int] | None:
    """Returns the word and the number of the next line.

    Returns None at the end of the connection, after `deadline` (of `time.monotonic`), or if the
    line does not have this form.
    """
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < MAX_LINE:
            if deadline is not None:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
            byte = connection.recv(1)
            if not byte:
                break
            line += byte
    word, _, number = line.decode(errors="replace").partition(" ")
    return (word, int(number)) if number.strip().isdecimal() else None


def _keep_alive(connection: socket.socket) -> None:
    if connection.family == getattr(socket, "AF_UNIX", None):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE),
        ("TCP_KEEPINTVL", INTERVAL),
        ("TCP_KEEPCNT", PROBES),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_connection_error(error: BaseException) -> bool:
    """Returns whether JAX raised `error` because another process does not answer.

    JAX raises general types for such errors, so this function searches the message.
    """
    words = r"\b([Gg]loo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED)\b"
    return isinstance(error, (RuntimeError, ValueError)) and bool(re.search(words, str(error)))


def _exit(line: str) -> None:
    """Prints a line and ends the process at once. A normal exit waits for the others in JAX."""
    if line:
        show_cursor = b"\x1b[?25h\n" if os.isatty(2) else b""  # progress bars hide the cursor
        os.write(2, show_cursor + f"{line}\n".encode())
    os._exit(1)
