"""`python -m parity model`: a whole decoder in Flax, in torch, in PEFT and in fp64."""

from parity.model.command import main as main
