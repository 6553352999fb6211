"""Shapes of the op benchmark, one file per op, each with ``cases() -> Iterator[OpCase]``."""
