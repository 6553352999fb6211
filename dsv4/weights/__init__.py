"""Weights: their bytes and their layouts."""
