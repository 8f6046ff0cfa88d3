"""Metrics of a server, for Prometheus, under names of its own and under vLLM's."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# The metrics that vLLM has too, with its names.
_VLLM = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "tokens": "generation_tokens",
    "prompt_tokens": "prompt_tokens",
    "answers": "request_success",
    "queued_seconds": "request_queue_time_seconds",
    "first_token_seconds": "time_to_first_token_seconds",
    "inter_token_seconds": "inter_token_latency_seconds",
    "seconds": "e2e_request_latency_seconds",
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def add(kind, name: str, help: str, *labels: str, **options):
            registry, labels = self._registry, ("model_name", *labels)
            return kind(f"jax_dora_{name}", help, labels, registry=registry, **options)

        def add_one(kind, name: str, help: str, **options):
            return kind(f"jax_dora_{name}", help, registry=self._registry, **options)

        times = {"buckets": _SECONDS}
        self._of_models = {
            "running": add(Gauge, "running", "requests that have a row"),
            "waiting": add(Gauge, "waiting", "requests that wait for a row or a slot"),
            "tokens": add(Counter, "tokens", "generated tokens"),
            "prompt_tokens": add(Counter, "prompt_tokens", "processed tokens of prompts"),
            "queued": add(Histogram, "queued_seconds", "time until a request has a row", **times),
            "first_token": add(
                Histogram, "first_token_seconds", "time until an answer's first token", **times
            ),
            "inter_token": add(
                Histogram, "inter_token_seconds", "time between tokens of an answer", **times
            ),
            "seconds": add(Histogram, "seconds", "time until a request is finished", **times),
        }
        self.answers = add(Counter, "answers", "finished requests", "finished_reason")
        self.adapters = add_one(Gauge, "adapters", "adapters that are served")
        self.damaged = add_one(Gauge, "damaged", "adapter folders that cannot be served")
        self.reads = add_one(Counter, "reads", "adapters that were read again from their folders")
        self.refused = add_one(Counter, "refused", "rejected requests", labelnames=["status"])
        self.loads = add_one(
            Histogram, "load_seconds", "time to load an adapter into a slot", **times
        )
        self.of = functools.cache(self._of)

    def _of(self, model: str) -> SimpleNamespace:
        """Returns the metrics of the base model or of one adapter, by its name."""
        return SimpleNamespace(
            **{name: metric.labels(model) for name, metric in self._of_models.items()}
        )

    def loaded(self) -> int:
        """Returns how many adapters have been loaded into slots."""
        return int(self._registry.get_sample_value("jax_dora_load_seconds_count") or 0)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry) + generate_latest(_VllmNames(self._registry))


class _VllmNames(CollectorRegistry):
    """The metrics of a registry that vLLM has too, under its names."""

    def __init__(self, registry: Collector) -> None:
        super().__init__()
        self._all = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._all.collect():
            if name := _VLLM.get(metric.name.removeprefix("jax_dora_")):
                copy = Metric(f"vllm:{name}", metric.documentation, metric.type)
                copy.samples = [
                    one._replace(name=one.name.replace(metric.name, copy.name, 1))
                    for one in metric.samples
                ]
                yield copy
