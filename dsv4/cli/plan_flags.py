"""The flags ``--plan`` and ``--gpu-memory``, and what cannot stand beside the second."""

import argparse

from dsv4.command.flags import number
from dsv4.errors import UserError


def add_plan_flags(group: argparse._ArgumentGroup) -> None:
    """A plan in place of an answer."""
    group.add_argument("--plan", action="store_true", help="print the memory plan and stop")
    group.add_argument(
        "--gpu-memory",
        type=number(1e-9, 10**6),
        metavar="GB",
        help="with --plan: the plan for --gpus GPUs of this size, 10^9 bytes as printed on the "
        "box, which need not be there (default: the GPUs of this machine)",
    )


def check_plan_flags(arguments: argparse.Namespace) -> None:
    """Raises ``UserError`` for ``--gpu-memory`` without a plan, or where GPUs have to be there."""
    if arguments.gpu_memory is None:
        return
    if not arguments.plan:
        raise UserError("--gpu-memory: found without --plan, expected both")
    if arguments.require_native:
        raise UserError(
            "--require-native: found together with --gpu-memory, whose GPUs need not be there"
        )


def gpu_bytes(arguments: argparse.Namespace) -> int | None:
    """``--gpu-memory`` in bytes."""
    return None if arguments.gpu_memory is None else round(arguments.gpu_memory * 10**9)
