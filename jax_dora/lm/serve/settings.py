"""The settings of a server."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from jax_dora.lm import domains
from jax_dora.lm.domains import Domain, integers, one_of
from jax_dora.quantisation import FORMATS, QTYPE


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Attributes:
      model: the Hugging Face folder of the base model.
      adapters: the folder with one subfolder for each adapter; none by default.
      name: the name of the base model; the name of its folder by default.
      end_tokens: the text or id of each further token that ends an answer.
      dtype: the dtype of the base model; config.json's by default.
      mesh: the devices that compute every request together, as the size of the axis tp, or auto for
        all of them; one device by default.
      quantize: the format to quantise the base model's projections to on loading; none by default.
      act_qtype: the format to quantise the inputs of projections to; it needs weights in the same
        format.
      kv_cache: the format of cached keys and values, in half the memory of the model's dtype; the
        model's dtype by default.
      host: the host name or address to listen on.
      port: the port to listen on; 0 for any free port.
      slots: the maximum number of adapters on the device at a time; 8 by default.
      max_rank: the maximum rank of an adapter; 64 by default.
      host_bytes: the host memory in bytes for adapters that no request and no slot uses; no limit
        by default. Beyond it, the least recently used are dropped, and read again when needed.
      batch: the maximum number of running requests.
      max_length: the maximum number of tokens of prompt and answer; by default the model's limit,
        up to 2048.
      chunk: the number of tokens of prompts that are read between two decoding steps.
      queue: the maximum number of waiting requests.
      api_key: the key that clients must send; none by default.
      allowed_origins: each origin, such as https://example.org, whose pages may ask this server in
        a browser, or * for all; none by default.
      body_bytes: the maximum size of a request in bytes.
      scan_seconds: the time between two scans of the folder of adapters, in seconds.
      drain_seconds: the maximum time to finish running requests on shutdown, in seconds.

    Raises:
      ValueError: a setting has no valid value. The message begins with "name=value: ".
    """

    model: Path
    adapters: Path | None = None
    name: str | None = None
    end_tokens: Sequence[str] = ()
    dtype: Literal["bfloat16", "float32"] | None = None
    mesh: Mapping[str, int] | Literal["auto"] | None = None
    quantize: str | None = None
    act_qtype: str | None = None
    kv_cache: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 8
    max_rank: int = 64
    host_bytes: int | None = None
    batch: int = 32
    max_length: int | None = None
    chunk: int = 256
    queue: int = 256
    api_key: str | None = None
    allowed_origins: Sequence[str] = ()
    body_bytes: int = 1 << 20
    scan_seconds: float = 1.0
    drain_seconds: int = 60

    DOMAINS: ClassVar[Mapping[str, Domain]] = {
        "dtype": one_of("bfloat16", "float32"),
        "quantize": one_of(*FORMATS),
        "act_qtype": one_of(QTYPE),
        "kv_cache": one_of(QTYPE),
        "port": integers(0, 65535),
        **dict.fromkeys(("slots", "batch", "queue"), integers(1, 2**16)),
        "max_rank": integers(1, 2**14),
        "host_bytes": integers(0, 2**63 - 1),
        # A token of a prompt and one of its answer.
        "max_length": integers(2, 2**24),
        "chunk": integers(1, 2**24),
        "body_bytes": integers(1),
        "scan_seconds": domains.POSITIVE,
        "drain_seconds": integers(0, 86400),
    }

    def __post_init__(self) -> None:
        if self.name == "":
            raise ValueError("name='': expected a name, or None for that of the model's folder")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise ValueError(
                    f"allowed_origins={origin!r}: expected * or a scheme with a host and no path, "
                    "such as https://example.org"
                )
        domains.check(self, self.DOMAINS)

    @property
    def base_name(self) -> str:
        """The name of the base model."""
        return self.model.resolve().name if self.name is None else self.name
