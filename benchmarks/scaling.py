"""Predicts the time of a training step on more GPUs than were measured.

    step(N) = layers/tp · efficiency + head + Σ bytes · factor(N) / link

- A ring moves (N-1)/N of the bytes of an all-gather or a reduce-scatter over each link, and twice
  as much for an all-reduce.
- Communication and computation are assumed not to overlap.
- The bytes of a program are those of one layer, because the layers are a loop.
- The rate of a link within a host, and the efficiency of products that tensor parallelism has made
  narrow, are derived from inference alone, so that the step itself is predicted, not fitted.
"""

from collections.abc import Mapping
from typing import NamedTuple, Self

from benchmarks import results
from benchmarks.model.protocol import QWEN3

HOST = 8  # GPUs that NVLink connects
# GB/s of each GPU between hosts: 400 Gb/s InfiniBand, which is assumed and not measured.
BETWEEN_HOSTS = 50.0
# How many times a collective sends its bytes around the ring: an all-reduce twice, an all-gather or
# a reduce-scatter once.
ROUNDS = {"dp": 2, "tp": 2, "fsdp": 1}


class Measured(NamedTuple):
    """The rows of a run on two GPUs, by (kind, layout, task)."""

    rows: Mapping[tuple[str, str, str], results.Row]

    @classmethod
    def read(cls) -> Self:
        """Returns the measurements of rank 384 with automatic axes."""
        rows = results.rows("scale", "h200x2", rank=384, axes="auto", model="qwen3")
        return cls({(row["kind"], row["layout"], row["task"]): row for row in rows})

    def ms(self, kind: str, layout: str, task: str) -> float:
        """Returns the median time."""
        return self.rows[kind, layout, task]["ms"]

    def sent(self, kind: str, layout: str, task: str) -> float:
        """Returns the MB of all layers' collectives on one device."""
        row = self.rows[kind, layout, task]
        return row["sent_bytes"] * row["layers"] / 1e6

    @property
    def link(self) -> float:
        """Returns the GB/s of a link within a host, from the time that FSDP's all-gathers of the
        weights add to inference with the base."""
        longer = self.ms("base", "fsdp", "inference") - self.ms("base", "dp", "inference")
        return self.sent("base", "fsdp", "inference") * share("fsdp", 2) / longer

    @property
    def head(self) -> float:
        """Returns the head's share of the FLOPs; no layout shards the head."""
        row, sizes = self.rows["base", "dp", "inference"], QWEN3
        projections = sum(n_in * n_out for n_in, n_out in sizes.projections().values())
        layers = row["layers"] * row["tokens"] * projections
        head = sizes.last * sizes.hidden * sizes.vocabulary
        return head / (layers + head)

    def computing(self, kind: str, layout: str, task: str) -> float:
        """Returns the ms of a device without communication, if narrow products lost nothing."""
        alone = self.ms(kind, "dp", task) - self.sending(kind, "dp", task, 2)
        return alone * (self.head + (1 - self.head) / 2) if layout == "tp" else alone

    def sending(self, kind: str, layout: str, task: str, devices: int) -> float:
        """Returns the ms that a device's links are in use."""
        link = self.link if devices <= HOST else BETWEEN_HOSTS
        return self.sent(kind, layout, task) * share(layout, devices) / link

    def predicted(self, kind: str, layout: str, devices: int) -> float:
        """Returns the ms of a step, with as many rows on each device as in the measurement.

        Args:
          layout: "dp", "fsdp", "tp" (for two devices alone), or "hybrid": FSDP within hosts and
            data parallelism between them.
        """
        if layout == "hybrid":
            hosts = max(1, devices // HOST)
            # Each device holds an eighth of the adapters' gradient, which is summed over hosts.
            gradients = self.sent(kind, "dp", "step") / HOST
            step = self.predicted(kind, "fsdp", min(devices, HOST))
            return step + gradients * share("dp", hosts) / BETWEEN_HOSTS
        efficiency = 1.0
        if layout == "tp":
            ideal = self.computing(kind, "tp", "inference")
            sending = self.sending(kind, "tp", "inference", 2)
            efficiency = (self.ms(kind, "tp", "inference") - sending) / ideal
        computing = self.computing(kind, layout, "step") * efficiency
        return computing + self.sending(kind, layout, "step", devices)


def share(layout: str, devices: int) -> float:
    """Returns the bytes that a ring sends over each link, divided by the bytes of the
    collective."""
    return ROUNDS[layout] * (devices - 1) / devices
