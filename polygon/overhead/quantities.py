"""Numbers with units on the command line: `140e9`, `140GB`, `25GB/s`, `200Gbit/s`, `5us`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

BYTES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
BYTES |= {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
BYTES_PER_S = {"": 1.0} | {f"{unit}/s": size for unit, size in BYTES.items() if unit}
BYTES_PER_S |= {"mbit/s": 1e6 / 8, "gbit/s": 1e9 / 8, "tbit/s": 1e12 / 8, "mbps": 1e6 / 8, "gbps": 1e9 / 8}
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def quantity(units: dict[str, float], *, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a number >= 0 (above 0) with one of the units, in SI."""
    limit = "> 0" if above else ">= 0"
    known = ", ".join(unit for unit in units if unit)

    def convert(text: str) -> float:
        match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([^\d\s].*)?", text)
        try:
            value = float(match[1]) * units[(match[2] or "").strip().lower()] if match else math.nan
        except (KeyError, ValueError):
            value = math.nan
        if not math.isfinite(value) or value < 0 or (above and value == 0):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a number {limit} (units: {known})")
        return value

    return convert


def seconds_text(value: float) -> str:
    """Seconds for people: 12.3 µs, 4.56 ms, 7.89 s."""
    for limit, unit in ((1e-3, 1e-6), (1.0, 1e-3)):
        if value < limit:
            return f"{value / unit:.4g} {'µs' if unit == 1e-6 else 'ms'}"
    return f"{value:.4g} s"


def bytes_text(value: float) -> str:
    """Bytes for people, 1 GB = 1e9."""
    for limit, name in ((1e3, "B"), (1e6, "kB"), (1e9, "MB"), (1e12, "GB")):
        if value < limit:
            return f"{value / limit * 1e3:.4g} {name}"
    return f"{value / 1e12:.4g} TB"
