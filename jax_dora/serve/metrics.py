"""Counters of a server, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def made(kind, name: str, told: str, **options):
            return kind(f"jax_dora_{name}", told, registry=self._registry, **options)

        self.running = made(Gauge, "running", "requests that have a row")
        self.waiting = made(Gauge, "waiting", "requests that wait for a row or a slot")
        self.adapters = made(Gauge, "adapters", "adapters that are served")
        self.damaged = made(Gauge, "damaged", "folders that cannot be served")
        self.tokens = made(Counter, "tokens", "tokens of answers")
        self.prompt_tokens = made(Counter, "prompt_tokens", "tokens of prompts that were read")
        self.answers = made(Counter, "answers", "requests that came to an end", labelnames=["end"])
        self.refused = made(Counter, "refused", "requests refused", labelnames=["status"])
        times = {"buckets": _SECONDS}
        self.queued = made(Histogram, "queued_seconds", "until a request has a row", **times)
        self.first_token = made(
            Histogram, "first_token_seconds", "until an answer's first token", **times
        )
        self.seconds = made(Histogram, "seconds", "until a request comes to its end", **times)
        self.loads = made(Histogram, "load_seconds", "of an adapter into a slot", **times)

    def loaded(self) -> int:
        """Returns how many adapters were loaded into slots."""
        return int(self._registry.get_sample_value("jax_dora_load_seconds_count") or 0)

    def text(self) -> bytes:
        """Returns all of them as Prometheus reads them."""
        return generate_latest(self._registry)
