"""Carry the efficiency of products from fitted architectures to others, by the best product measured on each.

    python benchmarks/matmul_ceilings.py

On the architectures that training runs were fitted to (Ampere, Hopper) the model's best product comes to the same share
of the best one measured (`instances/measured/matmul_ceilings.json`): what is lost of it in training is lost on both.
Every other architecture gets the coefficient that makes it the same share there.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from polygon.catalogue import device
from polygon.cost.kernels import EFFICIENCY, architecture_of, gemm_s, silicon
from polygon.domain.cluster import Device

CEILINGS = Path(__file__).parents[1] / "instances" / "measured" / "matmul_ceilings.json"
FITTED = ("ampere", "hopper")
SIZES = (4096, 8192, 16384)


def best_product_flops(card: Device, gemm: float) -> float:
    """FLOP/s of the fastest product that the model knows on a device, at a given efficiency of the inner loop."""
    chip = silicon(card, "bf16")
    chip = chip._replace(gemm=gemm, efficiency=replace(chip.efficiency, gemm=gemm))
    return max(2.0 * r * c * k / gemm_s(chip, r, c, k) for r, c, k in product(SIZES, SIZES, SIZES))


def ceilings() -> dict[str, list[tuple[Device, float]]]:
    """Measured FLOP/s of the best product, by architecture."""
    found: dict[str, list[tuple[Device, float]]] = {}
    for row in json.loads(CEILINGS.read_text())["rows"]:
        card = device(row["device"])
        found.setdefault(architecture_of(card), []).append((card, 1e12 * row["measured_tflops_per_s"]))
    return found


def share(rows: list[tuple[Device, float]], gemm: float) -> float:
    """Geometric mean of the model's best product over the best one measured."""
    return float(np.exp(np.mean([np.log(best_product_flops(card, gemm) / flops) for card, flops in rows])))


def carried() -> tuple[dict[str, float], dict[str, float]]:
    """Share of the ceiling on the fitted architectures, and the coefficient that gives it on the others."""
    rows = ceilings()
    shares = {name: share(rows[name], EFFICIENCY[name].gemm) for name in FITTED}
    goal = float(np.sqrt(np.prod(list(shares.values()))))
    others = {}
    for name in sorted(set(rows) - set(FITTED)):
        found = brentq(lambda gemm, name=name: share(rows[name], gemm) - goal, 0.2, 1.0, xtol=1e-4)
        others[name] = float(found)
    return shares, others


def main() -> None:
    """Print both."""
    shares, others = carried()
    for name, value in shares.items():
        print(f"{name:10s} best product of the model over the best measured: {value:.3f}")
    for name, value in others.items():
        print(f"{name:10s} of the peak, in the inner loop of a product: {value:.3f} (in use: {EFFICIENCY[name].gemm})")


if __name__ == "__main__":
    main()
