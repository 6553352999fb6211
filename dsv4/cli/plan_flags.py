"""The flags ``--plan`` and ``--gpu-memory``."""

import argparse

from dsv4.command.flags import number


def add_plan_flags(group: argparse._ArgumentGroup) -> None:
    """A plan in place of an answer."""
    group.add_argument("--plan", action="store_true", help="print the memory plan and stop")
    group.add_argument(
        "--gpu-memory",
        type=number(0, 10**6, low_included=False),
        metavar="GB",
        help="with --plan: the plan for --gpus GPUs of this size, 10^9 bytes as printed on the "
        "box, which need not be there (default: the GPUs of this machine)",
    )
