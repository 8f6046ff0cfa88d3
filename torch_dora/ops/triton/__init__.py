"""Launches of the Triton kernels of :mod:`dora_common.triton`, one per file. Importing one requires
the triton package."""
