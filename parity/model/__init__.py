"""`python -m parity model`: a whole decoder in Flax, in torch, in PEFT and in fp64."""
