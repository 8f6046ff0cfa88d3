"""Kernels of an adapted projection, forward and backward."""
