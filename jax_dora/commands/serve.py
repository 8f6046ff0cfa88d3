"""Serves a model and the adapters of a folder by OpenAI's HTTP interface.

    jax-dora serve --model FOLDER --adapters DIR
    curl localhost:8000/v1/models

Every folder in DIR, from PEFT or from finetune, is an adapter that clients name as the model; the
base has its folder's name. Adapters may come, change and go while the server runs: a request that
is under way keeps what it began with. Requests for any of them are answered in one batch. SIGTERM
and Ctrl-C end the server once what is under way has been answered.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from jax_dora.commands.flags import UsageError, add_formats, corrections, mesh, whole, with_flags

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# The flags of settings that have another name.
_FLAGS = {"act_qtype": "activations", "body_bytes": "body", "drain_seconds": "drain"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", type=Path, required=True, help="a Hugging Face folder")
    add("--adapters", type=Path, metavar="DIR", help="a folder of PEFT folders; none by default")
    add("--name", type=_name, help="of the base; its folder's by default")
    add_formats(add, activations=True)
    add("--mesh", type=mesh, help="tp=N of all devices, or auto; without it, one")

    add = parser.add_argument_group("address").add_argument
    add("--host", default="127.0.0.1", help="to listen at (%(default)s)")
    add("--port", type=whole(0, 65535), default=8000, help="0 for any (%(default)s)")
    add("--api-key", type=_key, metavar="KEY", help="that clients must send; @FILE reads it there")

    add = parser.add_argument_group("sizes").add_argument
    few = whole(1, 2**16)
    add("--slots", type=few, help="adapters on the device at a time; 8 by default")
    add("--max-rank", type=whole(1, 2**14), help="of an adapter; 64 by default")
    add("--batch", type=few, default=32, help="requests answered at a time (%(default)s)")
    length = whole(2, 2**24)
    add("--max-length", type=length, help="tokens of a prompt and its answer; up to 2048")
    add("--chunk", type=length, default=256, help="tokens of prompts read at once (%(default)s)")
    add("--queue", type=few, default=256, help="requests that may wait (%(default)s)")
    add("--body", type=whole(1), default=2**20, help="bytes of a request (%(default)s)")
    add("--drain", type=whole(0, 86400), default=60, help="seconds to end within (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Serves; returns the exit status."""
    console = Console(stderr=True)

    def tell(line: str) -> None:
        console.print(with_flags(line), markup=False, highlight=False, soft_wrap=True)

    with corrections():
        for flag, value in {"slots": args.slots, "max-rank": args.max_rank}.items():
            if value is not None and args.adapters is None:
                raise ValueError(f"--{flag} needs --adapters")
        from jax_dora.serve.server import Server, Settings, listen

        names = {one.name: _FLAGS.get(one.name, one.name) for one in dataclasses.fields(Settings)}
        given = {name: getattr(args, flag, None) for name, flag in names.items()}
        settings = Settings(**{name: one for name, one in given.items() if one is not None})
        with _address(args):
            listen(settings).close()  # told before the model is loaded
        server = Server(settings, tell=tell)
    with _address(args):
        host, port = server.bind()
    if args.host not in LOOPBACK and args.api_key is None:
        tell(f"{args.host} is open to others, and without --api-key to everyone who reaches it")
    shown = f"[{host}]" if ":" in host else host
    tell(f"Serving {', '.join(server.service.models()[:5])} at http://{shown}:{port}/v1")
    return 0 if server.run() else 1


@contextlib.contextmanager
def _address(args: argparse.Namespace) -> Iterator[None]:
    """Turns the errors of an address that is not to be had into `UsageError` while it lasts."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--host {args.host} --port {args.port}: {error}") from error


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; expected a name, which clients ask for")
    return text


def _key(text: str) -> str:
    """Parses a key, or the name of a file that holds it, which other users cannot see."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text("utf-8").strip()
        except OSError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text[1:]!r} holds no text: {error}") from error
    if not text or not text.isascii() or not text.isprintable():
        raise argparse.ArgumentTypeError("the key is empty, or has other than ASCII letters")
    return text
