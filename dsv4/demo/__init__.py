"""The embedded demo model: its checkpoint, the generator of its texts, training, publishing and evaluation."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
