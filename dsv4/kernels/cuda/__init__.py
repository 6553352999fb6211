"""CUDA C++ kernels (``*.cu``, no torch headers), compiled at first use by ``loader``."""
