"""Serve a model and a folder of adapters with an OpenAI-compatible HTTP API.

    jax-dora serve --model FOLDER --adapters DIR
    curl localhost:8000/v1/models

Every folder in DIR, written by PEFT or by finetune, is an adapter. Clients select an adapter with
its folder's name as the model, and the base model with the name of the base model's folder.
Adapters can be added, changed and removed while the server runs; a running request keeps the
adapter it started with. On SIGTERM or Ctrl-C, the server finishes the running requests and exits.
"""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from jax_dora.lm.commands.flags import (
    UsageError,
    add_end_token,
    add_formats,
    add_setting,
    in_domain,
    make_settings,
    mesh,
    usage_errors,
    with_flag_names,
)
from jax_dora.lm.domains import NOT_NEGATIVE
from jax_dora.lm.serve import Settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""

    def group(title: str) -> tuple[Callable[..., object], Callable[..., None]]:
        add = parser.add_argument_group(title).add_argument
        return add, functools.partial(add_setting, add, Settings)

    add, setting = group("model")
    setting("model", type=Path, metavar="FOLDER")
    setting("adapters", type=Path, metavar="DIR")
    setting("name")
    add_end_token(add, Settings)
    add_formats(add, Settings, activations=True)
    setting("kv_cache")
    setting("mesh", type=mesh("tp"), metavar="tp=N")

    _, setting = group("address")
    setting("host")
    setting("port")
    key = "key that clients must send; @FILE reads it from a file"
    setting("api_key", type=_key, metavar="KEY", help=key)
    setting("allowed_origins", "--allowed-origin", action="append", metavar="ORIGIN")

    _, setting = group("limits")
    # Without a default, so that it is known whether they are given.
    setting("slots", default=None)
    setting("max_rank", default=None)
    gib = "host memory in GiB for adapters that no request and no slot uses; no limit by default"
    setting("host_bytes", "--host-gib", type=_gib, help=gib)
    for name in ("batch", "max_length", "chunk", "queue"):
        setting(name)
    setting("body_bytes", "--body")
    setting("drain_seconds", "--drain", metavar="SECONDS")


def run(args: argparse.Namespace) -> int:
    """Serves, and returns the exit status."""
    console = Console(stderr=True)

    def tell(line: str) -> None:
        line = with_flag_names(line, args.flags)
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with usage_errors():
        settings = _settings(args)
        from jax_dora.lm.serve import Server
        from jax_dora.lm.serve.server import listen

        with _address(args):
            listen(settings).close()  # reports an unusable address before the model is loaded
        server = Server(settings, tell=tell)
    with _address(args):
        host, port = server.bind()
    if args.host not in LOOPBACK and args.api_key is None:
        tell(f"Warning: without --api-key, everyone who can reach {args.host} can use the server")
    shown = f"[{host}]" if ":" in host else host
    names = server.service.models()
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    tell(f"Serving {', '.join(names[:5])}{more} at http://{shown}:{port}/v1")
    return 0 if server.run() else 1


def _settings(args: argparse.Namespace) -> Settings:
    """Returns the settings that the flags give.

    Raises:
      ValueError: a flag is invalid, or needs another one.
    """
    for name in ("slots", "max_rank", "host_bytes"):
        if getattr(args, name) is not None and args.adapters is None:
            raise ValueError(f"`{name}` needs `adapters`")
    return make_settings(Settings, args)


@contextlib.contextmanager
def _address(args: argparse.Namespace) -> Iterator[None]:
    """Turns errors of opening the address into `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--host {args.host} --port {args.port}: {error}") from error


def _gib(text: str) -> int:
    """Parses a number of GiB, and returns the bytes."""
    return int(in_domain(NOT_NEGATIVE)(text) * 2**30)


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
