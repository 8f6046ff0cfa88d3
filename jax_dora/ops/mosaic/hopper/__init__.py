"""What all kernels share: the GPU's limits, launching, rings of buffers, PTX."""
