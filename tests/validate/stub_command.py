"""A command that does what its arguments say: an exit code, and what comes before it."""

import json
import sys
import time
from pathlib import Path

_, code, said, flag, file = sys.argv
if said == "hangs":
    time.sleep(10_000)
if said != "nothing":
    record = {"command": "x", "machine": {}, "result": {"model": "/m", "flag": flag, "ms": 1.5}}
    Path(file).write_text(json.dumps(record))
sys.stderr.write("some line\n")
if said not in ("nothing", "record"):
    sys.stderr.write(f"error: {said.replace('_', ' ')}\n")
sys.exit(int(code))
