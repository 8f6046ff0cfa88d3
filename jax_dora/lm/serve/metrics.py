"""Metrics of a server, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def add(kind, name: str, help: str, **options):
            return kind(f"jax_dora_{name}", help, registry=self._registry, **options)

        self.running = add(Gauge, "running", "requests that have a row")
        self.waiting = add(Gauge, "waiting", "requests that wait for a row or a slot")
        self.adapters = add(Gauge, "adapters", "adapters that are served")
        self.damaged = add(Gauge, "damaged", "adapter folders that cannot be served")
        self.reads = add(Counter, "reads", "adapters that were read again from their folders")
        self.tokens = add(Counter, "tokens", "generated tokens")
        self.prompt_tokens = add(Counter, "prompt_tokens", "prompt tokens that were processed")
        self.answers = add(Counter, "answers", "finished requests", labelnames=["end"])
        self.refused = add(Counter, "refused", "rejected requests", labelnames=["status"])
        times = {"buckets": _SECONDS}
        self.queued = add(Histogram, "queued_seconds", "time until a request has a row", **times)
        self.first_token = add(
            Histogram, "first_token_seconds", "time until the first token of an answer", **times
        )
        self.seconds = add(Histogram, "seconds", "time until a request is finished", **times)
        self.loads = add(Histogram, "load_seconds", "time to load an adapter into a slot", **times)

    def loaded(self) -> int:
        """Returns how many adapters have been loaded into slots."""
        return int(self._registry.get_sample_value("jax_dora_load_seconds_count") or 0)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
