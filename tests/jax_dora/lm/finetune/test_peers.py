"""How processes notice that another process has ended."""

import contextlib
import queue
import socket
import threading

import pytest

from jax_dora.lm.finetune.peers import PeerMonitor, connect, listen_for_peers

ADVICE = "Go on."
LOST = "Gloo AllGather failed: Connection reset by peer"


class Three:
    """Three processes: two with a monitor, and a third that the tests control."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(PeerMonitor, "NEWS_WAIT", 0.2)
        monkeypatch.setattr(PeerMonitor, "GRACE", 0.4)
        monkeypatch.setattr(PeerMonitor, "FIRST_DELAY", 0.1)
        self.sockets = (first, end, ours, self.last) = *socket.socketpair(), *socket.socketpair()
        self.told = [queue.Queue(), queue.Queue()]
        self.monitors = [
            PeerMonitor(0, {1: first, 2: ours}, self.told[0].put),
            PeerMonitor(1, {0: end}, self.told[1].put),
        ]
        for monitor in self.monitors:
            monitor.advice = lambda: ADVICE

    def hear(self, index):
        return self.told[index].get(timeout=20)

    def silent(self):
        for told in self.told:
            with pytest.raises(queue.Empty):
                told.get(timeout=0.6)


@pytest.fixture
def three(monkeypatch):
    made = Three(monkeypatch)
    yield made
    for one in made.sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def test_all_hear_at_once_of_one_that_is_killed(three):
    three.last.close()
    for index in range(2):
        assert three.hear(index) == f"Stopped: process 2 was killed or lost. {ADVICE}"


def test_all_hear_of_one_that_has_stopped_by_itself(three):
    three.last.sendall(b"stopped 2\n")
    three.last.close()
    for index in range(2):
        assert (
            three.hear(index) == f"Stopped: process 2 has stopped and printed the reason. {ADVICE}"
        )


def test_the_end_in_good_order_is_no_news(three):
    three.last.sendall(b"ended 2\n")
    three.last.close()
    with three.monitors[0].reporting(), three.monitors[1].reporting():
        pass
    three.silent()


def test_an_error_of_its_own_is_raised_and_told(three):
    with pytest.raises(ValueError, match="not finite"), three.monitors[1].reporting():
        raise ValueError("the loss is not finite")
    assert three.hear(0).startswith("Stopped: process 1 has stopped and printed the reason")


def test_an_error_that_anothers_end_has_led_to_is_told_as_that(three):
    three.last.sendall(b"stopped 2\n")
    with pytest.raises(RuntimeError), three.monitors[0].reporting():
        raise RuntimeError(LOST)
    said = f"Stopped: process 2 has stopped and printed the reason. {ADVICE}"
    assert three.hear(0) == f"{said} Here: {LOST}"
    # Of the two that have stopped, the one that is heard first.
    assert three.hear(1) in (said, said.replace("2", "0"))


def test_that_one_is_gone_explains_the_errors_of_others(three):
    """In whichever order they are heard."""
    three.monitors[1]._send("stopped 1")
    three.last.close()
    assert three.hear(0) == f"Stopped: process 2 was killed or lost. {ADVICE}"
    assert three.hear(1) == f"Stopped: process 2 was killed or lost. {ADVICE}"


def test_what_is_heard_while_python_ends_still_ends_it(three, monkeypatch):
    """Where JAX waits for the others, and no thread can be started any more."""

    def start(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    three.monitors[1]._end = "stopped"
    monkeypatch.setattr(threading.Thread, "start", start)
    three.last.sendall(b"stopped 2\n")
    assert three.hear(1) == ""


@pytest.mark.parametrize(
    "error", [FileNotFoundError("/data/Gloo/config.json"), BlockingIOError("UNAVAILABLE")]
)
def test_an_error_of_a_file_is_never_anothers(three, error):
    three.last.sendall(b"stopped 2\n")
    with pytest.raises(type(error)), three.monitors[0].reporting():
        raise error
    assert three.hear(0) == ""  # The error is printed by whoever has raised it.


def test_a_stranger_does_not_hold_the_start():
    address, accept = listen_for_peers(2, "localhost")
    host, port, _ = address.split()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"1" * 5000)
        [other] = connect(address, 1, 5).values()
        found = accept(5)
        assert list(found) == [1]
    for one in (other, *found.values()):
        one.close()


def test_the_first_knows_the_others_by_what_it_has_told_them():
    address, accept = listen_for_peers(2, "localhost")
    host, port, _ = address.split()
    stranger = connect(f"{host} {port} 0123", 1, 5)
    other = connect(address, 1, 5)
    found = accept(5)
    assert list(found) == [1]
    other[0].sendall(b"ended 1\n")
    assert found[1].recv(8) == b"ended 1\n"
    for one in (*stranger.values(), *other.values(), *found.values()):
        one.close()
    assert connect(address, 1, 5) == {}
