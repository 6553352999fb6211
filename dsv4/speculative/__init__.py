"""Speculative decoding: drafts of a small module, verified by a step of the main model
(docs/speculative.md).
"""
