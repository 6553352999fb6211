"""Op tables whose ``prepare_attention`` has one part replaced: what faults and stand-ins are put in with."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from dsv4.ops import TORCH, Ops
from dsv4.ops.prepare_attention import TORCH_PARTS, prepare_attention


def with_parts(ops: Ops = TORCH, **parts: Callable[..., Any]) -> Ops:
    """``ops`` with the torch ``prepare_attention``, the named parts of it replaced."""
    prepare = partial(prepare_attention, parts=TORCH_PARTS._replace(**parts))
    return dataclasses.replace(ops, prepare_attention=prepare)
