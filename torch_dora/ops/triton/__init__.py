"""Triton kernels, one per file. Importing one requires the triton package."""
