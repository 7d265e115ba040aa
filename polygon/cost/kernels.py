"""Seconds of single operators on one device: matrix multiplication, attention, element-wise traffic.

Every operator is a roofline with an efficiency. What makes the efficiency of a matrix multiplication is its shape:
the output is cut into tiles that fill the multiprocessors in waves (the last wave may be half empty), a short inner
dimension does not fill the pipeline of a tile, and a dimension that is no multiple of eight loses the matrix units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from polygon.domain.cluster import Device
from polygon.domain.model import BYTES_PER_ELEMENT

TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.85), (64, 64, 0.65))
"""Output tiles (rows, columns) a GEMM library picks from, and what each reaches of the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What an architecture reaches of its data sheet; fitted (see docs/prediction.md)."""

    gemm: float
    """Of the peak, by a large well-shaped matrix multiplication."""
    inner_half: float
    """Inner dimension at which a matrix multiplication reaches half of `gemm`."""
    attention_forward: float
    """Of the peak, by a fused attention kernel, long sequence, head size 128."""
    attention_backward: float
    memory: float
    """Of the memory bandwidth, by element-wise kernels."""
    launch_s: float
    """Seconds that a kernel costs beside its work."""
    flops_per_multiprocessor: float
    """16-bit peak [FLOP/s] of one multiprocessor; the device's peak over it is the number of multiprocessors."""
    relative_error: float = 0.12


EFFICIENCY = {
    "volta": Efficiency(
        gemm=0.70,
        inner_half=110,
        attention_forward=0.3,
        attention_backward=0.25,
        memory=0.8,
        launch_s=6e-6,
        flops_per_multiprocessor=1.56e12,
    ),
    "turing": Efficiency(
        gemm=0.60,
        inner_half=110,
        attention_forward=0.3,
        attention_backward=0.25,
        memory=0.8,
        launch_s=6e-6,
        flops_per_multiprocessor=1.63e12,
    ),
    "ampere": Efficiency(
        gemm=0.80,
        inner_half=150,
        attention_forward=0.55,
        attention_backward=0.5,
        memory=0.8,
        launch_s=5e-6,
        flops_per_multiprocessor=2.89e12,
    ),
    "ada": Efficiency(
        gemm=0.75,
        inner_half=150,
        attention_forward=0.55,
        attention_backward=0.5,
        memory=0.8,
        launch_s=5e-6,
        flops_per_multiprocessor=1.29e12,
    ),
    "hopper": Efficiency(
        gemm=0.70,
        inner_half=200,
        attention_forward=0.40,
        attention_backward=0.35,
        memory=0.8,
        launch_s=5e-6,
        flops_per_multiprocessor=7.5e12,
    ),
    "blackwell": Efficiency(
        gemm=0.70,
        inner_half=250,
        attention_forward=0.40,
        attention_backward=0.35,
        memory=0.8,
        launch_s=5e-6,
        flops_per_multiprocessor=15.2e12,
    ),
    "cdna": Efficiency(
        gemm=0.50,
        inner_half=200,
        attention_forward=0.30,
        attention_backward=0.25,
        memory=0.7,
        launch_s=8e-6,
        flops_per_multiprocessor=3.5e12,
    ),
    "": Efficiency(
        gemm=0.65,
        inner_half=150,
        attention_forward=0.35,
        attention_backward=0.3,
        memory=0.75,
        launch_s=6e-6,
        flops_per_multiprocessor=2.5e12,
        relative_error=0.3,
    ),
}
"""By architecture; the empty name is any other."""


class Silicon(NamedTuple):
    """A device as the operator costs see it, in one precision; hashable."""

    peak_flops: float
    memory_bytes_per_s: float
    multiprocessors: float
    element_bytes: int
    efficiency: Efficiency
    known: bool
    """Whether the architecture is one that has been fitted."""


def architecture_of(device: Device) -> str:
    """Key of `EFFICIENCY` for a device; empty if its architecture is none of them."""
    name = device.architecture.lower()
    return next((key for key in EFFICIENCY if key and name.startswith(key)), "")


@lru_cache(maxsize=256)
def _silicon(peak: float, peak_16: float, bytes_per_s: float, element_bytes: int, architecture: str) -> Silicon:
    efficiency = EFFICIENCY[architecture]
    return Silicon(
        peak_flops=peak,
        memory_bytes_per_s=bytes_per_s,
        multiprocessors=max(1.0, round(peak_16 / efficiency.flops_per_multiprocessor)),
        element_bytes=element_bytes,
        efficiency=efficiency,
        known=bool(architecture),
    )


def silicon(device: Device, precision: str) -> Silicon:
    """The device in one precision, ready for the operator costs."""
    return _silicon(
        device.peak_flops(precision),
        device.peak_flops("fp16"),
        device.memory_bytes_per_s,
        BYTES_PER_ELEMENT[precision],
        architecture_of(device),
    )


@lru_cache(maxsize=65536)
def gemm_s(chip: Silicon, rows: float, columns: float, inner: float) -> float:
    r"""Seconds of a (rows × inner) by (inner × columns) product.

    .. math:: t = \max\Big(\frac{2 r c k}{P e\, q(r, c)} \frac{k + k_{1/2}}{k},
              \frac{b (rk + kc + rc)}{M e_m}\Big) + t_0

    with q the part of the launched tiles that is useful. Ignores what split-k and stream-k kernels win back.
    """
    efficiency = chip.efficiency
    fill = max(_tile_fill(rows, columns, chip.multiprocessors, tile) for tile in TILES)
    if inner % 8 or columns % 8:
        fill *= 0.6
    flops = 2.0 * rows * columns * inner
    math_s = flops / (chip.peak_flops * efficiency.gemm * fill) * (inner + efficiency.inner_half) / inner
    traffic = chip.element_bytes * (rows * inner + inner * columns + rows * columns)
    return max(math_s, traffic / (chip.memory_bytes_per_s * efficiency.memory)) + efficiency.launch_s


def _tile_fill(rows: float, columns: float, multiprocessors: float, tile: tuple[int, int, float]) -> float:
    high, wide, best = tile
    tiles = math.ceil(rows / high) * math.ceil(columns / wide)
    waves = math.ceil(tiles / multiprocessors)
    return best * rows * columns / (waves * multiprocessors * high * wide)


def stream_s(chip: Silicon, n_bytes: float, kernels: float = 1.0) -> float:
    """Seconds to move `n_bytes` through memory in some element-wise kernels."""
    return n_bytes / (chip.memory_bytes_per_s * chip.efficiency.memory) + kernels * chip.efficiency.launch_s
