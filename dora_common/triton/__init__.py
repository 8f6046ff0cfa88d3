"""Triton kernels and their launch configs, one kernel per file, for both packages. Importing one
requires the triton package."""
