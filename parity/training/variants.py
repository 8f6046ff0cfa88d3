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
    """Two variants that must train alike, or, where it is not judged, are compared alone."""

    kind: str
    one: Variant
    other: Variant
    judged: bool = True


MOSAIC, XLA = Variant("jax", "mosaic"), Variant("jax", "xla")
TRITON, EAGER = Variant("torch", "triton"), Variant("torch", "eager")
XLA_OFF, EAGER_OFF = XLA._replace(perturbed=True), EAGER._replace(perturbed=True)
PEFT = Variant("torch", "peft")

# Those that take longest first.
VARIANTS = (PEFT, TRITON, EAGER, EAGER_OFF, MOSAIC, XLA, XLA_OFF)
# Interpreted kernels would take days.
NATIVE_ONLY = (MOSAIC, TRITON)

PAIRINGS = (
    Pairing("across frameworks", MOSAIC, TRITON),
    Pairing("across frameworks", XLA, EAGER),
    Pairing("fused against plain", MOSAIC, XLA),
    Pairing("fused against plain", TRITON, EAGER),
    # What a difference in the last place of the initial adapter grows to by itself.
    Pairing("rounding floor", XLA, XLA_OFF, judged=False),
    Pairing("rounding floor", EAGER, EAGER_OFF, judged=False),
    # PEFT multiplies its fp32 adapters in fp32.
    Pairing("beside PEFT", XLA, PEFT, judged=False),
    Pairing("beside PEFT", EAGER, PEFT, judged=False),
)
