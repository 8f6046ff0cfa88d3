"""Kernels of rows with different adapters."""
