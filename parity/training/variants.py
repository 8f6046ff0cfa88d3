"""Who trains, and who is compared with whom."""

from __future__ import annotations

from typing import NamedTuple

from parity.sides import Backend


class Variant(NamedTuple):
    """One implementation of the run.

    Attributes:
      framework: "jax" or "torch".
      implementation: of `dora_linear` there, or "peft": Hugging Face's DoRA in our place.
      perturbed: the initial lora_a is off by one unit in the last place.
    """

    framework: Backend
    implementation: str
    perturbed: bool = False

    @property
    def label(self) -> str:
        return f"{self.framework} {self.implementation}" + ", one ulp off" * self.perturbed

    @property
    def once(self) -> bool:
        """Runs with the first seed alone: what it is compared with is not judged."""
        return self.perturbed or self.implementation == "peft"


Job = tuple[int, Variant]  # with its seed


class Pairing(NamedTuple):
    """Two variants that must train alike.

    Attributes:
      kind: "across frameworks", "fused against plain"; or, without a tolerance, "rounding floor",
        what a difference in the last place of the initial adapter grows to by itself, and "beside
        PEFT", which multiplies its fp32 adapters in fp32.
    """

    kind: str
    one: Variant
    other: Variant

    @property
    def judged(self) -> bool:
        return self.kind not in (FLOOR, BESIDE_PEFT)


FLOOR, BESIDE_PEFT = "rounding floor", "beside PEFT"
MOSAIC, XLA = Variant("jax", "mosaic"), Variant("jax", "xla")
TRITON, EAGER = Variant("torch", "triton"), Variant("torch", "eager")
XLA_OFF, EAGER_OFF = XLA._replace(perturbed=True), EAGER._replace(perturbed=True)
PEFT = Variant("torch", "peft")

# Those that take longest first.
VARIANTS = (PEFT, TRITON, EAGER, EAGER_OFF, MOSAIC, XLA, XLA_OFF)
# Interpreted kernels would take days.
NATIVE_ONLY = (MOSAIC, TRITON)

PAIRINGS = tuple(
    Pairing(kind, *pair)
    for kind, pairs in {
        "across frameworks": ((MOSAIC, TRITON), (XLA, EAGER)),
        "fused against plain": ((MOSAIC, XLA), (TRITON, EAGER)),
        FLOOR: ((XLA, XLA_OFF), (EAGER, EAGER_OFF)),
        BESIDE_PEFT: ((XLA, PEFT), (EAGER, PEFT)),
    }.items()
    for pair in pairs
)
