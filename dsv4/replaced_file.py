"""A new file in the place of an older one, about which everything but its content stays."""

import os
import shutil
import stat
from pathlib import Path


def put_in_place(made: Path, path: Path) -> None:
    """``made``, a file beside ``path``, becomes ``path`` in one step, with mode and owner of an
    older file. One that has several names, or an owner that cannot be given, is written to as it
    is, and ``made`` stays. Raises ``OSError``.
    """
    if not path.exists() or (path.stat().st_nlink == 1 and takes_over(made, path.stat())):
        made.replace(path)
    else:
        shutil.copyfile(made, path)


def takes_over(made: Path, status: os.stat_result) -> bool:
    """Gives a new file the owner and the mode of another one; False where that is not allowed."""
    new = made.stat()
    try:
        if (new.st_uid, new.st_gid) != (status.st_uid, status.st_gid):
            os.chown(made, status.st_uid, status.st_gid)
        made.chmod(stat.S_IMODE(status.st_mode))
    except PermissionError:
        return False
    return True
