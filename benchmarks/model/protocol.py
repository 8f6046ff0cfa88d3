"""The sizes of decoders (arXiv 2603.22276, section 5)."""

import dataclasses
from dataclasses import dataclass

from parity.model import sizes

PROJECTIONS = tuple(path.rpartition(".")[2] for path in sizes.PROJECTIONS)
# With this standard deviation of lora_b, s‖A B‖ is about 0.3 ‖W‖ if that of the weights is 0.02.
LORA_B_DEVIATION = 0.0035


@dataclass(frozen=True)
class Protocol(sizes.Sizes):
    """The sizes of a model and of a step.

    Attributes:
      last: number of tokens at the end of each row that have logits and a loss.
    """

    layers: int = 36
    tokens: int = 4096
    last: int = 1024

    def shape(self) -> dict[str, int]:
        return {"layers": self.layers, "tokens": self.tokens, "rank": self.rank}

    def projections(self) -> dict[str, tuple[int, int]]:
        """Returns (in, out) of the seven projections of a layer."""
        shapes = zip(PROJECTIONS, self.shapes().values(), strict=True)
        return {name: (n_in, n_out) for name, (n_out, n_in) in shapes}


QWEN3 = Protocol(**dataclasses.asdict(sizes.QWEN3_8B))
LLAMA3 = dataclasses.replace(
    QWEN3,
    intermediate=14_336,
    layers=32,
    vocabulary=128_256,
    epsilon=1e-5,
    rope_theta=500_000.0,
)
QUICK = Protocol(64, 96, 4, 2, 16, 512, rank=8, alpha=4, layers=2, tokens=32, last=8)
