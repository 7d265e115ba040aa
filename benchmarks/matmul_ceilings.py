"""Carry the efficiency of products from the devices that training runs were fitted to, to those where it was not.

    python benchmarks/matmul_ceilings.py

On A100 and H100 the model's products, with coefficients fitted to training, come to some share of what was measured of
products alone (`instances/measured/matmul_ceilings.json`): what is lost of it in training is lost on both. Every other
device gets the coefficient that makes its products the same share of the same kind of measurement: random data in a
library's tables, power-limited steady state, the best of some squares, the best shape of a search.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

from polygon.cost.kernels import EFFICIENCY, Silicon, architecture_of, efficiency_of, gemm_s, silicon
from polygon.domain.cluster import Device
from polygon.domain.errors import InputError
from polygon.formats.catalogue import device, devices

CEILINGS = Path(__file__).parents[1] / "instances" / "measured" / "matmul_ceilings.json"
FITTED = {"ampere": "a100-80gb", "hopper": "h100-sxm"}
"""Device that stands for an architecture that was fitted to training runs."""
SAME_CHIP = {"v100-32gb": "v100-16gb", "a100-40gb": "a100-80gb", "a800-80gb": "a100-80gb"}
"""Boards with the same chip at the same power limit: one coefficient."""
MEDIAN = "random data, median over shapes"
STATISTICS: tuple[tuple[str, ...], ...] = ((MEDIAN,), ("sustained",), ("best of squares 1024 to 10240", "best"))
"""Kinds of measurement, the nearest to training first: a device is carried by the first that it has."""
SIZES: dict[str, list[tuple[int, ...]]] = {
    MEDIAN: list(product((4096, 8192, 16384, 32768), *2 * [(2048, 4096, 8192, 16384)])),
    "best of squares 1024 to 10240": [(n, n, n) for n in (1024, 2048, 4096, 8192, 10240)],
    "best": list(product((4096, 8192, 16384), repeat=3)),
}
"""Shapes that the best (or the median) is of, where a row does not name its own."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A coefficient with what it rests on."""

    gemm: float
    statistic: str
    rows: int


def measurements() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rows of 16-bit products by device (of the catalogue) and kind of measurement."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in json.loads(CEILINGS.read_text())["rows"]:
        try:
            card = device(row["device"])
        except InputError:
            continue  # not in the catalogue
        kind, best = row["statistic"], "bf16" if "bf16" in card.flops else "fp16"
        wanted = ("bf16", "fp16") if kind == "sustained" else (best,)
        if row["precision"] in wanted:
            found.setdefault((SAME_CHIP.get(card.name, card.name), kind), []).append(row)
    return found


def with_gemm(card: Device, gemm: float) -> Silicon:
    """A device whose products reach another share of the peak in their inner loop."""
    chip = silicon(card, "bf16")
    return chip._replace(gemm=gemm, efficiency=replace(chip.efficiency, gemm=gemm))


def share(card: Device, gemm: float, rows: Sequence[dict[str, Any]]) -> float:
    """Geometric mean of the model's FLOP/s over the measured ones."""
    chip, ratios = with_gemm(card, gemm), []
    for row in rows:
        searched = SIZES.get(row["statistic"])
        shapes = [(row["m"], row["n"], row["k"])] if searched is None else searched
        rates = [2.0 * m * n * k / gemm_s(chip, m, n, k) for m, n, k in shapes]
        rate = np.median(rates) if row["statistic"] == MEDIAN else max(rates)
        ratios.append(rate / (1e12 * row["measured_tflops_per_s"]))
    return float(np.exp(np.mean(np.log(ratios))))


def goals() -> dict[str, dict[str, float]]:
    """The share on the fitted devices, by kind of measurement and architecture."""
    rows = measurements()
    found: dict[str, dict[str, float]] = {}
    for kind in (kind for kinds in STATISTICS for kind in kinds):
        own = {name: rows[card, kind] for name, card in FITTED.items() if (card, kind) in rows}
        found[kind] = {name: share(device(FITTED[name]), EFFICIENCY[name].gemm, of) for name, of in own.items()}
    return found


def carried() -> dict[str, Carried]:
    """The coefficient of every other device that was measured.

    It is held against the fitted device of its own architecture, or else against all of them.
    """
    rows, known, others = measurements(), goals(), {}
    for name in devices():
        chip = SAME_CHIP.get(name, name)
        kinds = next((ks for ks in STATISTICS if any((chip, k) in rows and known[k] for k in ks)), ())
        kinds = tuple(kind for kind in kinds if (chip, kind) in rows)
        if chip in FITTED.values() or not kinds:
            continue
        found = np.mean([np.log(_coefficient(device(name), rows[chip, kind], known[kind])) for kind in kinds])
        count = sum(len(rows[chip, kind]) for kind in kinds)
        others[name] = Carried(gemm=float(np.exp(found)), statistic=" and ".join(kinds), rows=count)
    return others


def _coefficient(card: Device, rows: Sequence[dict[str, Any]], known: dict[str, float]) -> float:
    """What makes the products of a device the share of the measured ones that they are on the fitted devices."""
    own = known.get(architecture_of(card))
    goal = own if own is not None else float(np.exp(np.mean(np.log(list(known.values())))))
    return float(brentq(lambda gemm: share(card, gemm, rows) - goal, 0.05, 3.0, xtol=1e-4))


def main() -> None:
    """Print both."""
    for statistic, shares in goals().items():
        told = ", ".join(f"{name} {value:.3f}" for name, value in shares.items())
        print(f"{statistic}: the model's products over the measured ones: {told}")
    for name, found in carried().items():
        of = f"{found.rows} of {found.statistic}"
        print(f"{name:16s} {found.gemm:.3f} (in use: {efficiency_of(device(name)).gemm:.3f}; {of})")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
