"""Measuring: where the time of a run goes, and where a number comes from."""
