"""Numbers with units on the command line: `140e9`, `140GB`, `25GB/s`, `200Gbit/s`, `5us`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

BYTES = {"": 1.0, "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BYTES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
BYTES_PER_S = {"": 1.0} | {f"{unit}/s": size for unit, size in BYTES.items() if unit}
BYTES_PER_S |= {f"{p}{b}": s / 8 for b in ("bit/s", "bps", "b/s") for p, s in (("M", 1e6), ("G", 1e9), ("T", 1e12))}
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
COUNT = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def quantity(units: dict[str, float], *, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a number >= 0 (above 0) with one of the units, in SI.

    All in small letters a unit is understood where that leaves no doubt: gb is GB, but gb/s may be GB/s or Gb/s.
    """
    small: dict[str, set[float]] = {}
    for unit, size in units.items():
        small.setdefault(unit.lower(), set()).add(size)
    understood = units | {unit: sizes.pop() for unit, sizes in small.items() if len(sizes) == 1}
    limit = "> 0" if above else ">= 0"
    known = ", ".join(unit for unit in units if unit)

    def convert(text: str) -> float:
        match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([^\d\s].*)?", text)
        try:
            value = float(match[1]) * understood[(match[2] or "").strip()] if match else math.nan
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
