"""Seconds of single operators on one device: matrix multiplication, attention, element-wise traffic.

Every operator is a roofline with an efficiency. What makes the efficiency of a matrix multiplication is its shape:
the output is cut into tiles that fill the multiprocessors in waves (the last wave may be half empty), a short inner
dimension does not fill the pipeline of a tile, and a dimension that is no multiple of eight loses the matrix units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from polygon.domain.cluster import Device
from polygon.domain.efficiency import MeasuredEfficiency
from polygon.domain.model import BYTES_PER_ELEMENT

TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.85), (64, 64, 0.65))
"""Output tiles (rows, columns) a GEMM library picks from, and what each reaches of the best."""

VECTOR_GEMM = 0.9
"""Of the fp32 peak, by products that run without matrix units (Sailor's profiles of V100 and GeForce cards)."""
LAUNCH_S = 5e-6
"""Seconds that a kernel costs beside its work."""
EAGER_HOST_S = (1.2e-3, 1.7e-3)
"""Seconds the host needs to launch forward and backward of one block, operation by operation: the smallest times in
Sailor's profiles (1.2-1.5 and 1.7 ms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What an architecture reaches of its data sheet (see docs/prediction.md for the fits)."""

    gemm: float
    """Of the peak, by the inner loop of a matrix multiplication."""
    memory: float
    """Of the memory bandwidth, by element-wise kernels."""
    flash_forward: float
    """Of the 16-bit peak, by the attention kernel that the vendor's library has for it."""
    flash_backward: float
    flash2_forward: float | None
    """The same for FlashAttention-2, which knows no unit newer than Ampere's (Dao 2023); None: as the vendor's, who
    calls its own so."""
    flash2_backward: float | None
    triton_forward: float | None
    """The same for the first generation of fused attention (Triton, 2023); None: as the vendor's."""
    triton_backward: float | None
    flops_per_multiprocessor: float
    """16-bit peak [FLOP/s] of one multiprocessor; the device's peak over it is the number of multiprocessors."""
    flash_forward_tokens: float = 0.0
    """Sequence length at which the vendor's attention reaches half of what it does on a sequence without end."""
    flash_backward_tokens: float = 0.0
    flash_repeats_dropout: bool = True
    """Whether the vendor's attention has a deterministic backward with dropout; if not, FlashAttention-2 is taken."""
    vector_gemm: float = VECTOR_GEMM
    """Of the fp32 peak, by products without matrix units."""
    unaligned: float | None = None
    """What is left of a product's rate when a dimension is no multiple of eight; None: what vector units reach."""
    operands: float | None = None
    """Of the memory bandwidth, by operands and result of a product; None: as element-wise kernels."""
    launch_s: float = LAUNCH_S
    """Seconds that a kernel costs beside its work."""
    host_forward_s: float = EAGER_HOST_S[0]
    """Seconds that the host needs to launch forward and backward of a block, operation by operation."""
    host_backward_s: float = EAGER_HOST_S[1]
    source: str = "spec"
    """`calibrated` where the numbers are fits to training, `bench` where they are fits to a measurement of the device,
    `spec` where they are carried over from a related architecture."""
    relative_error: float = 0.25
    """Half of a 90 % interval over the time of a layer, as a bench says it; `polygon.cost.uncertainty` has what the
    catalogue's numbers miss."""


EIGHT_BIT_GEMM = 0.955
"""What products in 8 bits reach of their peak, over what those in 16 bits reach of theirs (no bias left over MosaicML's
seven fp8 runs)."""
AMPERE = Efficiency(
    gemm=0.784,
    memory=0.98,
    flash_forward=0.60,
    flash_backward=0.52,
    flash2_forward=0.60,
    flash2_backward=0.52,
    triton_forward=0.522,
    triton_backward=0.261,
    flops_per_multiprocessor=2.89e12,
    source="calibrated",
)
CDNA = replace(
    AMPERE,
    gemm=0.504,
    memory=0.7,
    flash_forward=0.35,
    flash_backward=0.25,
    flash2_forward=None,
    flash2_backward=None,
    triton_forward=None,
    triton_backward=None,
    flops_per_multiprocessor=4.30e12,
    source="spec",
)
"""FlashAttention-2 of ROCm is Composable Kernel or, in torch's scaled_dot_product_attention, AOTriton
(github.com/ROCm/flash-attention, README): its rates are those of the vendor's attention, not CUDA's on an A100.
Compute units by AMD's data sheets: 220 of an MI250X, 304 of an MI300X, 256 of an MI355X."""
BEFORE_AMPERE = replace(
    AMPERE,
    flash_forward=0.25,
    flash_backward=0.17,
    flash2_forward=0.25,
    flash2_backward=0.17,
    source="spec",
)
"""FlashAttention-2 needs Ampere: torch takes xformers' memory-efficient kernel, whose forward is 5 % slower to 25 %
faster than unfused attention on V100 and whose backward is 15-19 % slower (facebookresearch/xformers pull request 362);
no absolute figure was found, so these are estimates."""
EFFICIENCY = {
    "volta": replace(BEFORE_AMPERE, flops_per_multiprocessor=1.56e12),
    "turing": replace(BEFORE_AMPERE, flops_per_multiprocessor=1.63e12),
    "ampere": AMPERE,
    "ada": replace(AMPERE, flops_per_multiprocessor=1.29e12, source="spec"),
    "hopper": Efficiency(
        gemm=0.768,
        memory=0.67,
        flash_forward=0.50,
        flash_backward=0.42,
        flash2_forward=0.38,
        flash2_backward=0.32,
        triton_forward=0.252,
        triton_backward=0.153,
        flops_per_multiprocessor=7.5e12,
        source="calibrated",
    ),
    "blackwell": replace(
        AMPERE,
        gemm=0.718,
        memory=0.69,
        flash_forward=0.50,
        flash_backward=0.42,
        flash2_forward=0.157,
        flash2_backward=0.139,
        triton_forward=0.104,
        triton_backward=0.066,
        flash_repeats_dropout=False,
        flops_per_multiprocessor=15.2e12,
        source="spec",
    ),
    "rtx blackwell": replace(AMPERE, flops_per_multiprocessor=1.23e12, source="spec"),
    "cdna2": replace(CDNA, gemm=0.687, flops_per_multiprocessor=1.74e12),
    "cdna4": replace(CDNA, flops_per_multiprocessor=9.83e12),
    "cdna": CDNA,
    "": replace(AMPERE, flops_per_multiprocessor=2.5e12, source="spec"),
}
"""By architecture (the first that a name starts with); the empty name is any other. Only Ampere and Hopper have been
fitted to training runs; the catalogue has what other devices were measured to reach (benchmarks/matmul_ceilings.py).
FlashAttention-2 on Blackwell is as measured on B200, without a mask, heads of 64, from 1,024 tokens on (Dao-AILab/
flash-attention issue 1589: 307 to 381 and 281 to 334 TFLOP/s); Triton's first to it as on Hopper. cuDNN has no
deterministic backward with dropout there (NVIDIA/TransformerEngine transformer_engine/common/fused_attn/fused_attn.cpp,
"determinism on Blackwell", 2026: from 9.18.1 without dropout, before not at all)."""


GROUPED_PRODUCTS = ("hopper", "blackwell")
"""Architectures for which torch has one kernel for products of several weights, in bf16 (`grouped_mm`, aten/src/ATen/
native/cuda/GroupedBlas.cpp, torch 2.13; elsewhere a loop)."""


class Silicon(NamedTuple):
    """A device as the operator costs see it, in one precision; hashable."""

    peak_flops: float
    memory_bytes_per_s: float
    multiprocessors: float
    element_bytes: int
    """Of an activation."""
    operand_bytes: int
    """Of what a matrix multiplication reads (1 in fp8, where activations stay in 16 bits)."""
    efficiency: Efficiency
    gemm: float
    """Of the peak, by the inner loop of a matrix multiplication in this precision."""
    unaligned: float
    """What is left of that when a dimension is no multiple of eight elements, so that matrix units stand idle."""
    peak_flops_16: float
    """In which attention is computed: of 16-bit formats where the linear layers use 8 bits, else of the precision."""
    grouped: bool = False
    """Whether torch has one kernel for products of several weights."""


def architecture_of(device: Device) -> str:
    """Key of `EFFICIENCY` for a device; empty if its architecture is none of them."""
    return _architecture(device.architecture)


@lru_cache(maxsize=256)
def _architecture(name: str) -> str:
    return next((key for key in EFFICIENCY if key and name.lower().startswith(key)), "")


@lru_cache(maxsize=256)
def _of_device(architecture: Efficiency, measured: MeasuredEfficiency) -> Efficiency:
    source = "bench" if measured.basis == "bench" else "spec"
    given: dict[str, Any] = dict(measured.given)
    return replace(architecture, **given, source=source)


def efficiency_of(device: Device) -> Efficiency:
    """What a device reaches: as measured on it, and as its architecture does where that says nothing."""
    architecture = EFFICIENCY[architecture_of(device)]
    return architecture if device.efficiency is None else _of_device(architecture, device.efficiency)


@lru_cache(maxsize=256)
def _silicon(
    peak: float,
    peak_16: float,
    bytes_per_s: float,
    element_bytes: int,
    efficiency: Efficiency,
    vector_peak: float,
    clock: float,
    grouped: bool,
) -> Silicon:
    eight_bit = EIGHT_BIT_GEMM if element_bytes == 1 else 1.0
    # Where the peak of a precision is that of the vector units (fp32 without TF32), products never see matrix units.
    gemm = efficiency.vector_gemm if peak == vector_peak else efficiency.gemm * eight_bit
    packed = 2.0 if element_bytes == 2 else 1.0  # vector units do two 16-bit operations in place of one
    # What matrix units cannot take goes to the vector units, which have a peak and a share of it of their own.
    unaligned = min(1.0, packed * vector_peak * efficiency.vector_gemm / (peak * gemm))
    return Silicon(
        peak_flops=peak,
        # Data sheets of many devices give no count of multiprocessors; the rate of one is its architecture's.
        memory_bytes_per_s=bytes_per_s,
        multiprocessors=max(1.0, round(peak_16 / (clock * efficiency.flops_per_multiprocessor))),
        element_bytes=max(element_bytes, 2),
        operand_bytes=element_bytes,
        efficiency=efficiency,
        gemm=gemm,
        unaligned=unaligned if efficiency.unaligned is None else efficiency.unaligned,
        peak_flops_16=min(peak, peak_16) if element_bytes == 1 else peak,
        grouped=grouped,
    )


_seen: dict[tuple[int, str], tuple[Device, Efficiency, Silicon]] = {}
"""Devices hold a mapping and cannot be hashed: known by identity, and kept so that the identity stays theirs; with the
efficiency of the architecture at that time."""


def silicon(device: Device, precision: str) -> Silicon:
    """The device in one precision, ready for the operator costs; without 8-bit products it makes 16-bit ones."""
    if precision == "fp8" and "fp8" not in device.flops:
        precision = "bf16"
    known = _seen.get((id(device), precision))
    architecture = EFFICIENCY[architecture_of(device)]
    if known is not None and known[1] is architecture:
        return known[2]
    made = _silicon(
        device.peak_flops(precision),
        device.peak_flops("fp16"),
        device.memory_bytes_per_s,
        BYTES_PER_ELEMENT[precision],
        efficiency_of(device),
        device.flops["fp32"],
        device.clock,
        precision == "bf16" and architecture_of(device) in GROUPED_PRODUCTS,
    )
    if len(_seen) > 1000:
        _seen.clear()
    _seen[id(device), precision] = (device, architecture, made)
    return made


@lru_cache(maxsize=65536)
def gemm_s(chip: Silicon, rows: float, columns: float, inner: float) -> float:
    r"""Seconds of a (rows × inner) by (inner × columns) product.

    .. math:: t = \frac{2 r c k}{P\, e\, q(r, c)} + \frac{b (rk + kc) + b' rc}{M e_m} + t_0

    with q the useful part of the launched tiles. Loading the operands and writing the result are not hidden behind
    the inner loop: this one assumption makes small matrices slow on Ampere and Hopper alike (the ratio of peak to
    memory bandwidth decides), and needs no coefficient of its own. Ignores split-k and stream-k kernels.
    """
    efficiency = chip.efficiency
    # cuBLAS chooses among tile shapes by a heuristic; that it finds the best of these is assumed.
    fill = max(_tile_fill(rows, columns, chip.multiprocessors, tile) for tile in TILES)
    # Rows are the tokens: their number only matters to the tiles. Along the other two, operands are read in vectors.
    if inner % 8 or columns % 8:
        fill *= chip.unaligned
    math_s = 2.0 * rows * columns * inner / (chip.peak_flops * chip.gemm * fill)
    traffic = chip.operand_bytes * (rows * inner + inner * columns) + chip.element_bytes * rows * columns
    # A bench tells how fast products read apart from element-wise kernels; without one they are taken as equal.
    operands = efficiency.memory if efficiency.operands is None else efficiency.operands
    return math_s + traffic / (chip.memory_bytes_per_s * operands) + efficiency.launch_s


def _tile_fill(rows: float, columns: float, multiprocessors: float, tile: tuple[int, int, float]) -> float:
    """Useful part of what is launched, times what the shape reaches at best: a part of a tile costs a whole one, and a
    wave that does not fill the multiprocessors costs a whole wave."""
    high, wide, best = tile
    tiles = math.ceil(rows / high) * math.ceil(columns / wide)
    waves = math.ceil(tiles / multiprocessors)
    return best * rows * columns / (waves * multiprocessors * high * wide)


def stream_s(chip: Silicon, n_bytes: float, kernels: float = 1.0) -> float:
    """Seconds to move `n_bytes` through memory in some element-wise kernels."""
    return n_bytes / (chip.memory_bytes_per_s * chip.efficiency.memory) + kernels * chip.efficiency.launch_s


FLASH1 = (0.40 / 0.60, 0.30 / 0.52)
"""What FlashAttention before 2 (July 2023) reaches over what its successor does, forward and backward: 30 to 50 and 25
to 35 % of an A100's peak (Dao, arXiv:2307.08691, section 1), taken in the middle."""


def padded_head(head_dim: int) -> int:
    """Head size as fused attention computes it: the next multiple of 32."""
    return -(-head_dim // 32) * 32


def attention_s(
    chip: Silicon,
    kernel: str,
    *,
    tokens: float,
    seq_len: float,
    keys: float,
    heads: float,
    head_dim: int,
    value_dim: int,
) -> tuple[float, float]:
    r"""Seconds of the forward and backward of a fused attention kernel, launches left out.

    Computed are the scores of `keys` keys per query (half of the sequence where attention is causal); the backward has
    three products over `head_dim` and two over `value_dim` for the forward's one and one. The vendor's kernel
    reaches less of the 16-bit peak on short sequences, which have few blocks of scores for as many prologues and half
    of those on the diagonal masked:

    .. math:: e(s) = e_\infty / (1 + s_0 / s)

    Parameters
    ----------
    seq_len : float
        Length of the sequence, or of the window that a query sees of it.
    """
    efficiency = chip.efficiency
    vendors = (
        efficiency.flash_forward / (1 + efficiency.flash_forward_tokens / seq_len),
        efficiency.flash_backward / (1 + efficiency.flash_backward_tokens / seq_len),
    )
    second = (efficiency.flash2_forward or vendors[0], efficiency.flash2_backward or vendors[1])
    forward, backward = {
        "flash": vendors,
        "flash2": second,
        "flash1": (FLASH1[0] * second[0], FLASH1[1] * second[1]),
        "triton": (efficiency.triton_forward or vendors[0], efficiency.triton_backward or vendors[1]),
    }[kernel]
    key, value = padded_head(head_dim), padded_head(value_dim)
    # Scores (queries x keys) and their product with values: a multiplication and an addition for each of both.
    flops = tokens * keys * heads * (key + value) * 2.0
    # Backward: over keys the scores anew and gradients of queries and keys, over values those of values and scores.
    again = (3 * key + 2 * value) / (key + value)
    return flops / (chip.peak_flops_16 * forward), again * flops / (chip.peak_flops_16 * backward)


DELTA_CHUNK = 64
"""Tokens that the kernels of linear attention take at a time (chunk_gated_delta_rule of flash-linear-attention)."""


def delta_rule_s(chip: Silicon, *, tokens: float, heads: float, key_dim: int, value_dim: int) -> tuple[float, float]:
    r"""Seconds of the forward and backward of a gated delta rule, launches left out.

    In chunks of C tokens: three products of C x C over keys, two over values, three with the state; the backward
    computes them again and has two for each.

    .. math:: 2 (3 C d_k + 2 C d_v + 3 d_k d_v)

    FLOP per token and head. The kernels are written in Triton and taken to be as fast as its first attention; no
    measurement was found.
    """
    one = 3 * DELTA_CHUNK * key_dim + 2 * DELTA_CHUNK * value_dim + 3 * key_dim * value_dim
    reached = chip.efficiency.triton_forward or chip.efficiency.flash_forward
    seconds = 2.0 * tokens * heads * one / (chip.peak_flops_16 * reached)
    return seconds, 3 * seconds
