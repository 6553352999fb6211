"""The embedded demo model: its checkpoint. How it is made is in ``dsv4.demo.training``."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
