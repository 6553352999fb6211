"""The plot of a record of ``bench context``: decode and prefill by position, memory by length."""

from collections.abc import Mapping
from typing import Any

from dsv4.bench.decode_modes import DECODE_MODES
from dsv4.bench.panel import MARGIN, Panel, legend, svg, title_of

_WIDTH = 1260
_GIGABYTE = 1e9


def context_svg(record: Any) -> str:
    """Three panels as SVG text: ms per token and tokens per second by position, and what grows with
    the length of the context: GB of caches and of steps on the device that holds most.
    """
    result = record["result"]
    third = (_WIDTH - 4 * MARGIN) / 3
    lefts = [MARGIN + (MARGIN + third) * index for index in range(3)]
    panels = [
        Panel("decode, ms per token, by position", _decode(result), lefts[0], third),
        Panel("prefill, tokens per second, by position", _prefill(result), lefts[1], third),
        Panel("memory, GB of a device, by context", _memory(result), lefts[2], third),
    ]
    modes = [mode for mode in DECODE_MODES if mode in next(iter(panels[0].groups.values()))]
    legends = [
        *legend(modes, lefts[0]),
        *legend(["computed", "drawn caches"], lefts[1], 90),
        *legend(["caches", "steps"], lefts[2]),
    ]
    parts = [part for panel in panels for part in panel.parts()]
    return svg(title_of(record), _WIDTH, [*legends, *parts])


def _decode(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        _tokens(int(position)): {mode: found["ms_per_token"] for mode, found in at.items()}
        for position, at in result["decode_behind_drawn_caches"].items()
    }


def _prefill(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """A computed rate is that of the span in which the position lies, or that ends there."""
    groups: dict[str, dict[str, float]] = {}
    for position, at in result["prefill_behind_drawn_caches"].items():
        bars = {}
        for span in result["prefill_computed"]["spans"]:
            if span["from"] <= int(position) <= span["to"] + result["prefill_chunk"]:
                bars["computed"] = span["tokens_per_second"]
        groups[_tokens(int(position))] = {**bars, "drawn caches": at["tokens_per_second"]}
    return groups


def _memory(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    groups = {}
    for length, devices in result["allocated_bytes"].items():
        most = max(devices.values(), key=lambda device: device["state"] + device["steps"])
        groups[_tokens(int(length))] = {
            "caches": most["state"] / _GIGABYTE,
            "steps": most["steps"] / _GIGABYTE,
        }
    return groups


def _tokens(count: int) -> str:
    """In K where it is a multiple of 1,024."""
    return f"{count // 1024:,}K" if count % 1024 == 0 else f"{count:,}"
