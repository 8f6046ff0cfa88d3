"""Launches of the Triton kernels of `dora_common.triton`, one per file. Kernels are imported when
they are launched, so that the triton package is not required before."""
