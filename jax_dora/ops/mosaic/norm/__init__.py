"""Kernels of the norm."""
