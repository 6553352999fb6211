"""Layers: parameters and wiring. Each is a frozen value built from checkpoint weights; the
arithmetic is in ``dsv4.ops``.
"""
