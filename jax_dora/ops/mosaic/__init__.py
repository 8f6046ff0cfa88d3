"""Pallas Mosaic GPU kernels for Hopper: a folder for each family, a file for each kernel."""
