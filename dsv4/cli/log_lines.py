"""The package's log lines on stderr."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def log_lines(out: TextIO, enabled: bool) -> Iterator[None]:
    """Inside the block the package's lines of level INFO and above go to ``out``, if ``enabled``;
    else those from WARNING on go where logging puts them.
    """
    if not enabled:
        yield
        return
    logger = logging.getLogger("dsv4")
    level = logger.level
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
