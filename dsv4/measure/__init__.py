"""Measuring: the time of a run by kernel or op, and the provenance of a number."""
