"""Traces: the values inside a model for every token of a sequence, in memory or in a file
(traces.md).
"""
