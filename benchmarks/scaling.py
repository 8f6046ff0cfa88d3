"""Predicts what a training step takes on more GPUs than were measured.

    step(N) = layers/tp · efficiency + head + Σ bytes · factor(N) / link

A ring moves (N-1)/N of an all-gather's or a reduce-scatter's bytes over each link, and twice that
of an all-reduce's. Nothing is taken to overlap. A program's bytes are those of one layer, which a
loop repeats. The link within a host, and the efficiency of products that tensor parallelism has
made narrow, come from inference alone: what is told of a step is a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import results
from benchmarks.model.protocol import QWEN3

RUN = Path(__file__).parent / "results" / "h200x2" / "scale.jsonl"
HOST = 8  # GPUs that NVLink joins
# GB/s of each GPU between hosts: 400 Gb/s InfiniBand, which is assumed and not measured.
BETWEEN_HOSTS = 50.0
# How often an all-reduce, an all-gather or a reduce-scatter sends its bytes around.
ROUNDS = {"dp": 2, "tp": 2, "fsdp": 1}


class Measured(NamedTuple):
    """The rows of a run on two GPUs, by (kind, layout, task)."""

    rows: Mapping[tuple[str, str, str], results.Row]

    @classmethod
    def read(cls) -> Measured:
        """Returns the measurements of one rank and one kind of axes."""
        wanted = {"rank": 384, "axes": "auto", "model": "qwen3"}
        rows = (row for row in results.read(RUN)[1] if wanted.items() <= row.items())
        return cls({(row["kind"], row["layout"], row["task"]): row for row in rows})

    def ms(self, kind: str, layout: str, task: str) -> float:
        """Returns the median time."""
        return self.rows[kind, layout, task]["ms"]

    def sent(self, kind: str, layout: str, task: str) -> float:
        """Returns the MB that a device's program sends, of all layers."""
        row = self.rows[kind, layout, task]
        return row["sent_bytes"] * row["layers"] / 1e6

    @property
    def link(self) -> float:
        """Returns GB/s within a host, from what gathering the base's weights adds to its
        inference."""
        longer = self.ms("base", "fsdp", "inference") - self.ms("base", "dp", "inference")
        return self.sent("base", "fsdp", "inference") * share("fsdp", 2) / longer

    @property
    def head(self) -> float:
        """Returns the head's share of the FLOPs, which no layout shards."""
        row, sizes = self.rows["base", "dp", "inference"], QWEN3
        projections = sum(n_in * n_out for n_in, n_out in sizes.projections().values())
        layers = row["layers"] * row["tokens"] * projections
        head = sizes.last * sizes.hidden * sizes.vocabulary
        return head / (layers + head)

    def computing(self, kind: str, layout: str, task: str) -> float:
        """Returns the ms of a device beside what it sends, without losses of narrow products."""
        alone = self.ms(kind, "dp", task) - self.sending(kind, "dp", task, 2)
        return alone * (self.head + (1 - self.head) / 2) if layout == "tp" else alone

    def sending(self, kind: str, layout: str, task: str, devices: int) -> float:
        """Returns the ms that a device's links are in use."""
        link = self.link if devices <= HOST else BETWEEN_HOSTS
        return self.sent(kind, layout, task) * share(layout, devices) / link

    def predicted(self, kind: str, layout: str, devices: int) -> float:
        """Returns the ms of a step, each device with the rows that it had when measured; of "tp"
        for two devices only; "hybrid" is FSDP within hosts and data parallelism between them."""
        if layout == "hybrid":
            hosts = max(1, devices // HOST)
            # A device has an eighth of the adapter's gradient, which is summed over hosts.
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
    """Returns by how much a collective's bytes are multiplied to give those over a device's link,
    in a ring."""
    return ROUNDS[layout] * (devices - 1) / devices
