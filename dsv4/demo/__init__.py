"""The embedded demo model: its checkpoint, and the folders of its draft modules by the names that
``--draft`` has for them. How they are made is in ``dsv4.demo.training``.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
DRAFTS = {name: CHECKPOINT.parent / "drafts" / name for name in ("mtp", "dspark")}
