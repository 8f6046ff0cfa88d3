"""Kernels for the few rows of decoding and of short prompts."""
