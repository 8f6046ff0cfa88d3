"""What is measured on a whole model, and in which variants (arXiv 2603.22276, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.work import Framework

Task = Literal["inference", "gradient", "accumulation"]
Method = Literal["base", "LoRA", "DoRA"]


def group(task: Task) -> str:
    """What a report calls the measurements of a task."""
    return f"model {task}"


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Protocol:
    """Sizes of the model and of a step.

    Attributes:
      last: the loss, and the logits of inference, are of the last tokens only.
      micro_steps: of one accumulation.
      checked_layers: of the same width, that the correctness check runs through; what it compares
        with is computed in fp32.
    """

    hidden: int = 4096
    intermediate: int = 12_288
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936
    rank: int = 384
    alpha: int = 192
    tokens: int = 4096
    last: int = 1024
    micro_steps: int = 8
    checked_layers: int = 2

    @classmethod
    def quick(cls) -> Protocol:
        return cls(
            hidden=64,
            intermediate=96,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=16,
            vocabulary=512,
            rank=8,
            alpha=4,
            tokens=32,
            last=8,
            micro_steps=2,
            checked_layers=2,
        )

    def shape(self) -> dict[str, int]:
        return {"layers": self.layers, "tokens": self.tokens, "rank": self.rank}

    def projections(self) -> dict[str, tuple[int, int]]:
        """in, out of the seven projections of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def flops(self, task: Task, method: Method) -> int:
        """Of the matrix products that checkpointing asks for, without the norm's.

        A forward pass has each product once. A gradient computes the layers' forward pass twice;
        a frozen product has one in the backward pass, an adapter's two, and flash attention's two
        have five.
        """
        sizes = self.projections().values()
        frozen = sum(n_in * n_out for n_in, n_out in sizes)
        adapters = 0 if method == "base" else sum(self.rank * (a + b) for a, b in sizes)
        # Causal: half of the tokens, on average, for each of the two products.
        attention = self.heads * self.head_dim * self.tokens
        head = self.hidden * self.vocabulary * self.last
        if task == "inference":
            return 2 * (self.layers * self.tokens * (frozen + adapters + attention) + head)
        per_token = 3 * frozen + 4 * adapters + (2 + 2.5) * attention
        micro_step = int(2 * (self.layers * self.tokens * per_token + 2 * head))
        return micro_step * (self.micro_steps if task == "accumulation" else 1)

    def bytes(self, method: Method) -> int:
        """Of the bf16 weights, each read once: the least that inference moves."""
        sizes = self.projections().values()
        layer = sum(n_in * n_out for n_in, n_out in sizes)
        if method != "base":
            layer += sum(self.rank * (a + b) for a, b in sizes)
        return 2 * (self.layers * layer + self.hidden * self.vocabulary)


@dataclass(frozen=True)
class Variant:
    """One way to run the model.

    Attributes:
      kind: which implementation; see `benchmarks.model.jax_model` and `torch_model`.
      tasks: what it is measured at.
      triton: whether XLA may choose Triton matrix products.
      cached: the norm, or its parts, outlive a step's pass.
      baseline: see `benchmarks.report.Measurement`.
    """

    framework: Framework
    name: str
    method: Method
    kind: str
    tasks: tuple[Task, ...]
    triton: bool = False
    cached: bool = False
    baseline: str = ""

    @property
    def label(self) -> str:
        return f"{self.framework} {self.name}"


BEST_LORA = "the best jax LoRA"
PEFT = "torch PEFT DoRA, defaults"
ALL: tuple[Task, ...] = ("inference", "gradient", "accumulation")
BOTH: tuple[Task, ...] = ("inference", "gradient")

# In order of interest: those at the end are left out first when time runs short. Those that differ
# only in `triton` follow each other.
VARIANTS = (
    Variant("jax", "LoRA (no Triton)", "LoRA", "lora", ALL, baseline=BEST_LORA),
    Variant("jax", "DoRA (no Triton)", "DoRA", "dora", ALL),
    Variant("jax", "DoRA, norm kept (no Triton)", "DoRA", "dora, norm kept", ALL, cached=True),
    Variant(
        "jax",
        "DoRA, norm and half of inner kept (no Triton)",
        "DoRA",
        "dora, norm and half of inner kept",
        ("gradient", "accumulation"),
        cached=True,
    ),
    Variant(
        "jax",
        "DoRA, norm and inner kept (no Triton)",
        "DoRA",
        "dora, norm and inner kept",
        ("gradient", "accumulation"),
        cached=True,
    ),
    Variant("torch", "PEFT DoRA, defaults", "DoRA", "peft, wide", BOTH, baseline=PEFT),
    Variant("jax", "XLA DoRA (no Triton)", "DoRA", "xla", BOTH),
    Variant("torch", "torch_dora", "DoRA", "torch_dora", BOTH),
    Variant("torch", "PEFT DoRA, bf16", "DoRA", "peft", BOTH),
    Variant("torch", "PEFT LoRA, bf16", "LoRA", "peft lora", BOTH),
    Variant("jax", "LoRA", "LoRA", "lora", BOTH, triton=True, baseline=BEST_LORA),
    Variant("jax", "DoRA", "DoRA", "dora", BOTH, triton=True),
    Variant("jax", "base (no Triton)", "base", "base", ("inference",)),
    Variant("jax", "XLA DoRA, norm twice (no Triton)", "DoRA", "xla, norm twice", ("gradient",)),
    Variant("torch", "torch_dora, norm kept", "DoRA", "torch_dora, norm kept", BOTH, cached=True),
    Variant("torch", "PEFT DoRA, bf16, compiled", "DoRA", "peft, compiled", BOTH),
    Variant("torch", "PEFT DoRA, its cache", "DoRA", "peft, cached", ("inference",), cached=True),
    Variant("torch", "base", "base", "base", ("inference",)),
)
