"""Connections by which processes that train one model hear when one of them ends.

A killed process leaves the others in a collective operation that fails or never ends, and JAX
notices after a minute or more, and aborts. But the operating system closes a killed process's
connections at once: each process keeps one to the first, which tells all.
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

# After so many seconds without a sign of life a machine is taken to be gone.
IDLE, INTERVAL, PROBES = 10, 5, 3
LONGEST = 64  # bytes of a line


class Lifeline:
    """The connections of one process to others, and what happens when one of them is gone.

    What is sent is a line: "ended" in good order, "stopped" by an error that it tells itself, or
    "gone", and which process.

    Attributes:
      advice: says what to do then.
    """

    NEWS, GRACE, LAST = 2.0, 10.0, 0.5  # seconds

    def __init__(
        self,
        index: int,
        others: Mapping[int, socket.socket],
        stop: Callable[[str], Any] | None = None,
    ) -> None:
        """
        Args:
          index: of this process.
          others: the connections, by the process at the other end.
          stop: called with one line, or "" where this process has said why; by default it is
            printed, and the process exits with status 1.
        """
        self.index, self.others = index, others
        self.advice: Callable[[], str] = lambda: "Start all processes again with the same command"
        self._stop = stop or _exit
        self._lock, self._news = threading.Lock(), threading.Event()
        self._how = self._told = ""
        self._is_over: str | None = None
        for number, connection in others.items():
            _keep_alive(connection)
            threading.Thread(target=self._watch, args=(number, connection), daemon=True).start()

    @contextlib.contextmanager
    def held(self) -> Iterator["Lifeline"]:
        """Tells the others how the block has ended. An error of a connection that another process's
        end has led to ends this process with what is known of that."""
        try:
            yield self
        except BaseException as error:
            self._is_over = "stopped"
            self._say(f"stopped {self.index}")
            # That a process is gone is known a moment later than that its data do not come.
            if self.others and _is_of_a_connection(error) and self._news.wait(self.NEWS):
                # Where all have stopped for one reason, each says it.
                here = f" Here: {str(error).splitlines()[0]}" if self._how == "stopped" else ""
                self._stop(self._told + here)
            raise
        self._is_over = "ended"
        self._say(f"ended {self.index}")
        self.close()

    def close(self) -> None:
        for connection in self.others.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _watch(self, number: int, connection: socket.socket) -> None:
        how = ""
        while how not in ("ended", "gone"):
            found = _read(connection)
            # A process that has stopped closes its connections too.
            if self._is_over == "ended" or (found is None and how == "stopped"):
                return
            how, who = found or ("gone", number)
            if how != "ended":
                self._hear(how, who)

    def _hear(self, how: str, who: int) -> None:
        """Tells the others at once, and ends this process: at once, or where a process has stopped
        by an error after a while, since most errors are the same in all, which tell their own."""
        if who == self.index:
            return
        reason = "has stopped, and says why" if how == "stopped" else "is gone: killed, or lost"
        with self._lock:
            # That one is gone explains the errors of others, whichever is heard first.
            if self._how == "gone" or self._how == how:
                return
            self._how, self._told = how, f"Stopped: process {who} {reason}. {self.advice()}"
        self._say(f"{how} {who}")
        self._news.set()
        # The first is the last to end: JAX's clients abort without it.
        last = self.LAST if len(self.others) > 1 else 0.0
        seconds = last + (self.GRACE if how == "stopped" else 0.0)
        try:
            threading.Thread(target=self._end, args=(seconds,), daemon=True).start()
        except RuntimeError:  # Python is ending, and starts no thread any more.
            self._end(seconds)

    def _end(self, seconds: float) -> None:
        time.sleep(seconds)
        with self._lock:
            over, self._is_over = self._is_over, self._is_over or "told"
        if over == "stopped":
            time.sleep(self.NEWS)  # in which the error is printed
            self._stop("")
        elif over is None:
            self._stop(self._told)

    def _say(self, line: str) -> None:
        for connection in self.others.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())


def open_to(count: int, host: str) -> tuple[str, Callable[[float], dict[int, socket.socket]]]:
    """Opens the first process's end.

    Args:
      count: of processes.
      host: by which the others find this one.

    Returns:
      What `connect` takes, and what waits so many seconds for the others and returns their
      connections, as many as have come.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    server = socket.create_server(
        ("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=count
    )
    token = secrets.token_hex(8)  # strangers do not know it

    def accept(seconds: float) -> dict[int, socket.socket]:
        others: dict[int, socket.socket] = {}
        end = time.monotonic() + seconds
        with server, contextlib.suppress(OSError):
            while len(others) < count - 1:
                server.settimeout(max(0.01, end - time.monotonic()))
                connection, _ = server.accept()
                word, number = _read(connection, end) or ("", 0)
                if word == token:
                    connection.settimeout(None)
                    others[number] = connection
                else:
                    connection.close()
        return others

    return f"{host} {server.getsockname()[1]} {token}", accept


def connect(address: str, index: int, seconds: float) -> dict[int, socket.socket]:
    """Returns the connection of process `index` to the first, at what `open_to` has returned;
    nothing where it cannot be reached, or has opened nothing."""
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


def _read(connection: socket.socket, end: float | None = None) -> tuple[str, int] | None:
    """Returns a word and a number that were sent, by the time `end` if that is given; None at the
    end of the connection, and of what is no such line."""
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < LONGEST:
            if end is not None:
                connection.settimeout(max(0.01, end - time.monotonic()))
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


def _is_of_a_connection(error: BaseException) -> bool:
    """Returns whether an error is what JAX raises where another process does not answer, whose type
    is that of many others."""
    words = r"\b([Gg]loo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED)\b"
    return isinstance(error, (RuntimeError, ValueError)) and bool(re.search(words, str(error)))


def _exit(line: str) -> None:
    """Prints a line, and ends the process at once: JAX would wait for the others."""
    if line:
        cursor = b"\x1b[?25h\n" if os.isatty(2) else b""  # which a progress bar hides
        os.write(2, cursor + f"{line}\n".encode())
    os._exit(1)
