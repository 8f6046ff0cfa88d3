"""`python -m parity model`: a whole decoder in Flax, in torch, in PEFT and in fp64.

A *system* is one way to compute the decoder: a side with an implementation, or the fp64 reference.
"""
