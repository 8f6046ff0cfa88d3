"""Serve a model and a folder of adapters with an OpenAI-compatible HTTP API.

    jax-dora serve --model FOLDER --adapters DIR
    curl localhost:8000/v1/models

Every folder in DIR, written by PEFT or by finetune, is an adapter. Clients select an adapter with
its folder's name as the model, and the base model with the name of the base model's folder.
Requests for different adapters are answered in one batch. Adapters can be added, changed and
removed while the server runs; a running request keeps the adapter it started with. On SIGTERM or
Ctrl-C, the server finishes the running requests and exits.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jax_dora.lm.commands.flags import (
    UsageError,
    add_end_token,
    add_formats,
    integer,
    mesh,
    not_negative,
    usage_errors,
    with_flag_names,
)

if TYPE_CHECKING:
    from jax_dora.lm.serve.server import Settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Settings whose flag has another name.
_FLAGS = {
    "act_qtype": "activations",
    "body_bytes": "body",
    "drain_seconds": "drain",
    "end_tokens": "end_token",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="Hugging Face folder of the base model",
    )
    add("--adapters", type=Path, metavar="DIR", help="folder of adapters; none by default")
    add("--name", type=_name, help="name of the base model; its folder's name by default")
    add_end_token(add)
    add_formats(add, activations=True)
    add("--mesh", type=mesh("tp"), help="use all devices, as tp=N or auto; one device by default")

    add = parser.add_argument_group("address").add_argument
    add("--host", default="127.0.0.1", help="host name or address to listen on")
    port = integer(0, 65535)
    add("--port", type=port, default=8000, help="port to listen on; 0 for any free port")
    add(
        "--api-key",
        type=_key,
        metavar="KEY",
        help="key that clients must send; @FILE reads it from a file",
    )

    add = parser.add_argument_group("limits").add_argument
    count = integer(1, 2**16)
    add(
        "--slots",
        type=count,
        metavar="N",
        help="maximum number of adapters on the device at a time; 8 by default",
    )
    add(
        "--max-rank",
        type=integer(1, 2**14),
        metavar="N",
        help="maximum rank of an adapter; 64 by default",
    )
    add(
        "--host-gib",
        type=_gib,
        dest="host_bytes",
        metavar="N",
        help="host memory in GiB for adapters that no request uses; no limit by default",
    )
    add("--batch", type=count, default=32, metavar="N", help="maximum number of running requests")
    length = integer(2, 2**24)
    add(
        "--max-length",
        type=length,
        metavar="N",
        help="maximum tokens of prompt and answer; by default the model's limit, up to 2048",
    )
    add("--chunk", type=length, default=256, metavar="N", help="tokens of prompts read in one step")
    add("--queue", type=count, default=256, metavar="N", help="maximum number of waiting requests")
    add(
        "--body",
        type=integer(1),
        default=2**20,
        metavar="N",
        help="maximum size of a request in bytes",
    )
    add(
        "--drain",
        type=integer(0, 86400),
        default=60,
        metavar="SECONDS",
        help="time to finish running requests on shutdown",
    )


def run(args: argparse.Namespace) -> int:
    """Serves, and returns the exit status."""
    console = Console(stderr=True)

    def tell(line: str) -> None:
        console.print(with_flag_names(line), markup=False, highlight=False, soft_wrap=True)

    with usage_errors():
        from jax_dora.lm.serve.server import Server, listen

        settings = make_settings(args)
        with _address(args):
            listen(settings).close()  # reports an unusable address before the model is loaded
        server = Server(settings, tell=tell)
    with _address(args):
        host, port = server.bind()
    warn_without_key(args, tell)
    shown = f"[{host}]" if ":" in host else host
    names = server.service.models()
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    tell(f"Serving {', '.join(names[:5])}{more} at http://{shown}:{port}/v1")
    return 0 if server.run() else 1


def make_settings(args: argparse.Namespace) -> "Settings":
    """Returns the settings that the flags give.

    Raises:
      ImportError: the extra `serve` is not installed.
      ValueError: a flag is invalid, or needs another one.
    """
    needs_adapters = {
        "slots": args.slots,
        "max-rank": args.max_rank,
        "host-gib": args.host_bytes,
    }
    for flag, value in needs_adapters.items():
        if value is not None and args.adapters is None:
            raise ValueError(f"--{flag} needs --adapters")
    from jax_dora.lm.serve.server import Settings

    names = {one.name: _FLAGS.get(one.name, one.name) for one in dataclasses.fields(Settings)}
    values = {name: getattr(args, flag, None) for name, flag in names.items()}
    return Settings(**{name: value for name, value in values.items() if value is not None})


def warn_without_key(args: argparse.Namespace, tell: Callable[[str], None]) -> None:
    """Warns if others can reach the server and need no key."""
    if args.host not in LOOPBACK and args.api_key is None:
        tell(f"Warning: without --api-key, everyone who can reach {args.host} can use the server")


@contextlib.contextmanager
def _address(args: argparse.Namespace) -> Iterator[None]:
    """Turns errors of opening the address into `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--host {args.host} --port {args.port}: {error}") from error


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError(
            "it is empty; expected a name, which clients use to select the base model"
        )
    return text


def _gib(text: str) -> int:
    """Parses a number of GiB, and returns the bytes."""
    return int(not_negative(text) * 2**30)


def _key(text: str) -> str:
    """Parses an API key, or @FILE, which keeps the key hidden from other users of the host."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text("utf-8").strip()
        except OSError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text[1:]!r} is not a text file: {error}") from error
    if not text or not text.isascii() or not text.isprintable():
        raise argparse.ArgumentTypeError(
            "the key is empty, or has characters that are not printable ASCII"
        )
    return text
