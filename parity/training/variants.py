"""Who trains, and who is compared with whom."""

from __future__ import annotations

from typing import NamedTuple


class Variant(NamedTuple):
    """One implementation of the run.

    Attributes:
      framework: "jax" or "torch".
      implementation: of `dora_linear` there.
      perturbed: the initial lora_a is off by one unit in the last place.
    """

    framework: str
    implementation: str
    perturbed: bool = False

    @property
    def label(self) -> str:
        return f"{self.framework} {self.implementation}" + ", one ulp off" * self.perturbed


class Pairing(NamedTuple):
    """Two variants that must train alike.

    Attributes:
      kind: "across frameworks", "fused against plain", or "rounding floor", which has no tolerance:
        it is what a difference in the last place of the initial adapter grows to by itself.
    """

    kind: str
    one: Variant
    other: Variant

    @property
    def judged(self) -> bool:
        return self.kind != FLOOR


FLOOR = "rounding floor"
MOSAIC, XLA = Variant("jax", "mosaic"), Variant("jax", "xla")
TRITON, EAGER = Variant("torch", "triton"), Variant("torch", "eager")
XLA_OFF, EAGER_OFF = XLA._replace(perturbed=True), EAGER._replace(perturbed=True)

# Those that take longest first. Perturbed ones run with the first seed alone.
VARIANTS = (TRITON, EAGER, EAGER_OFF, MOSAIC, XLA, XLA_OFF)
# Interpreted kernels would take days.
NATIVE_ONLY = (MOSAIC, TRITON)

PAIRINGS = (
    Pairing("across frameworks", MOSAIC, TRITON),
    Pairing("across frameworks", XLA, EAGER),
    Pairing("fused against plain", MOSAIC, XLA),
    Pairing("fused against plain", TRITON, EAGER),
    Pairing(FLOOR, XLA, XLA_OFF),
    Pairing(FLOOR, EAGER, EAGER_OFF),
)
