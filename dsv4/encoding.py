"""The package in the folder ``encoding/`` beside ``dsv4``, imported by its place and not by its
name.

Checkpoints hold a folder ``encoding/`` too. In the current directory it would come first, and its
code would run. Under the name ``dsv4.encoding`` no other folder can take the package's place.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from encoding import *  # noqa: F403
else:
    _init = Path(__file__).resolve().parent.parent / "encoding" / "__init__.py"
    _spec = spec_from_file_location(__name__, _init)
    _package = module_from_spec(_spec)
    sys.modules[__name__] = _package
    _spec.loader.exec_module(_package)
