"""Kernels whose warps are late at random where blocks, GPUs and launches meet."""
