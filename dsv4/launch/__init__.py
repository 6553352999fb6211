"""Kernels of the device: compiled, recorded, placed in memory and queued."""
