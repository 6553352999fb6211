"""Records that say nothing about whose machine they come from."""

import getpass
import re
import socket
from pathlib import Path
from typing import Any

# An absolute path: a slash that nothing comes before, and a name behind it. Rates (GB/s), ratios
# and module paths are none.
_PATH = re.compile(r"(?<![\w.)\]])~?/(?:[^\s\"'`,;:()<>|]+)")
_PATH_MARK = "<path>"


class Anonymiser:
    """Takes paths, and the given ``names``, out of texts: those of the machine and of its user."""

    def __init__(self, names: dict[str, str]) -> None:
        """``names``: what stands in the place of each."""
        self._marks = {name: mark for name, mark in names.items() if name}
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._names = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    @classmethod
    def of_this_machine(cls) -> "Anonymiser":
        """For the host's names, the user's and that of the home folder."""
        host = socket.gethostname()
        hosts = (host, host.partition(".")[0], socket.getfqdn())
        users = (getpass.getuser(), Path.home().name)
        return cls({**dict.fromkeys(users, "<user>"), **dict.fromkeys(hosts, "<host>")})

    def __call__(self, value: Any) -> Any:
        """``value``, a JSON value, with every text and every key of it made anonymous."""
        if isinstance(value, str):
            text = _PATH.sub(_PATH_MARK, value)
            return self._names.sub(lambda name: self._marks[name[0]], text)
        if isinstance(value, dict):
            return {self(key): self(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self(part) for part in value]
        return value
