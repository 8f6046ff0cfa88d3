"""Pallas Mosaic GPU kernels for Hopper, one per file."""
