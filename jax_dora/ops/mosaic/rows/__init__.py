"""Kernels that read and write whole activations once, and multiply nothing."""
