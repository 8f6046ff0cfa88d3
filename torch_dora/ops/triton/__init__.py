"""Triton kernels, one to a file. Importing one needs the triton package."""
