"""What a device reaches, fitted to a measurement of its operators (`polygon bench-device`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq, least_squares

from polygon.cost.compute import layer_times
from polygon.cost.kernels import Silicon, attention_s, gemm_s, silicon, stream_s
from polygon.cost.network import fabric_of, intra_node_all_reduce_s
from polygon.domain.bench import AttentionRow, BlockRow, DeviceBench
from polygon.domain.cluster import Cluster, Device, Link, NodeGroup
from polygon.domain.efficiency import MeasuredEfficiency
from polygon.domain.errors import fault, one_of, require
from polygon.domain.message import Message
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Problem
from polygon.domain.runtime import POLYGON, Runtime

ALONE_ERROR = 0.1
"""What is allowed beside the error of single blocks for blocks of a real step, as for profiles
(`polygon.cost.profiles.PROFILE_ERROR`)."""
WITHIN_90 = 1.645
"""Standard deviations that hold 90 % of a normal distribution, on both sides."""
EAGER = Runtime(fused=False, fused_accumulation=False, host_forward_factor=POLYGON.host_forward_factor)
"""How the blocks of a bench are computed: by our engine."""
HOST_BOUND = 1.5
"""Seconds of a block over those that its launches take, below which the host may be what one waits for."""
LEAST_PRODUCTS = 6
"""Products below which nothing is fitted."""
SHARES = (0.01, 2.0)
"""Of the peak, between which the fastest product of a device is that is no processor. Twice as much as the data sheet
says have consumer cards that sum in 16 bits; milliseconds for seconds, or rows of another device, are outside."""
STANDS_FOR = {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16"), "fp8": ("bf16", "fp16")}
"""Rows that tell about a precision, in the order of preference: 16-bit formats have one rate, products in 8 bits are
taken for a share of it."""
RATES = (1e5, 1e13)
"""Bytes/s between which the rate of a node's links is looked for."""
ALONE = Link(latency_s=1e-6, bytes_per_s=1e12)
"""A single device sends nothing."""
FARTHEST = 1e2
"""Factor between a coefficient and where the fit starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Coefficients, and the logarithm of predicted over measured of every row when it is left out."""

    values: Mapping[str, float]
    left_out: np.ndarray


def _fit(
    start: Mapping[str, float], most: Mapping[str, float], residuals: Callable[[dict[str, float]], np.ndarray]
) -> _Fit:
    """Least squares on logarithms, over the logarithms of the coefficients.

    The error of a row that is left out is :math:`r_i / (1 - h_i)`, h its leverage (exact where the model is linear).
    """
    names, x0 = list(start), np.log(np.array(list(start.values())))
    high = np.array([math.log(min(most.get(name, math.inf), FARTHEST * start[name])) for name in names])
    low = x0 - math.log(FARTHEST)

    def of(x: np.ndarray) -> np.ndarray:
        return residuals(dict(zip(names, np.exp(x), strict=True)))

    # An outlier (another program on the device, a clock that fell) counts linearly from an error of a tenth on.
    found = least_squares(of, np.minimum(x0, high - 1e-3), bounds=(low, high), loss="soft_l1", f_scale=0.1)
    # A row that alone decides a coefficient has leverage 1, and no error of its own could be told.
    projector = found.jac @ np.linalg.pinv(found.jac)
    leverage = np.clip(np.diag(projector), 0.0, 0.9)
    return _Fit(values=dict(zip(names, np.exp(found.x).tolist(), strict=True)), left_out=of(found.x) / (1 - leverage))


def _trial(chip: Silicon, values: Mapping[str, float]) -> Silicon:
    """The device with other coefficients."""
    own = {name: value for name, value in values.items() if name not in ("gemm", "unaligned")}
    return chip._replace(
        gemm=values.get("gemm", chip.gemm),
        unaligned=values.get("unaligned", chip.unaligned),
        efficiency=replace(chip.efficiency, **own),  # type: ignore[arg-type]
    )


def _products(chip: Silicon, bench: DeviceBench, precision: str) -> _Fit:
    """Shares of the peak and of the bandwidth that products and element-wise kernels reach, seconds of a launch."""
    products = [row for row in bench.products if row.precision == precision]
    streams = [row for row in bench.streams if row.precision == precision]
    measured = [row.seconds for row in products] + [row.seconds for row in streams]
    rates = [2.0 * row.rows * row.columns * row.inner / row.seconds for row in products]
    # The fastest product is nearest to the peak; what the others lack the formula explains by tiles and traffic.
    start = {
        "gemm": max(rates) / chip.peak_flops,
        "operands": chip.efficiency.memory,
        "launch_s": chip.efficiency.launch_s if bench.launch_s is None else bench.launch_s,
    }
    if streams:
        start["memory"] = float(np.median([row.moved_bytes / row.seconds for row in streams])) / chip.memory_bytes_per_s
        start["operands"] = start["memory"]
    if any(row.inner % 8 or row.columns % 8 for row in products):
        start["unaligned"] = 0.5
    launches = [] if bench.launch_s is None else [bench.launch_s]

    def residuals(values: dict[str, float]) -> np.ndarray:
        trial = _trial(chip, values)
        times = [gemm_s.__wrapped__(trial, row.rows, row.columns, row.inner) for row in products]
        times += [stream_s(trial, row.moved_bytes) for row in streams]
        times += [values["launch_s"]] * len(launches)
        found: np.ndarray = np.log(np.array(times) / np.array(measured + launches))
        return found

    fit = _fit(start, {"unaligned": 1.0}, residuals)
    return replace(fit, left_out=fit.left_out[: len(measured)])


def _attention(chip: Silicon, bench: DeviceBench, precision: str) -> _Fit | None:
    """Share of the peak on long sequences, and the length that reaches half of it, forward and backward."""
    rows = [row for row in bench.attention if row.precision == precision]
    if not rows:
        return None
    lengths = sorted({row.seq_len for row in rows})
    # Times are inverse to the shares: the row that the catalogue's share misses most says where the best may be.
    faster_f = max(_attention_s(chip, row)[0] / row.forward_s for row in rows)
    faster_b = max(_attention_s(chip, row)[1] / row.backward_s for row in rows)
    start = {
        "flash_forward": faster_f * chip.efficiency.flash_forward,
        "flash_backward": faster_b * chip.efficiency.flash_backward,
    }
    most = {}
    if len(lengths) > 1:
        for name in ("flash_forward_tokens", "flash_backward_tokens"):
            start[name], most[name] = float(lengths[0]), 2.0 * lengths[-1]

    def residuals(values: dict[str, float]) -> np.ndarray:
        trial = _trial(chip, values)
        times = [_attention_s(trial, row) for row in rows]
        found: np.ndarray = np.log(np.ravel(times) / np.ravel([(row.forward_s, row.backward_s) for row in rows]))
        return found

    return _fit(start, most, residuals)


def _attention_s(chip: Silicon, row: AttentionRow) -> tuple[float, float]:
    """Seconds of a row as the model has it."""
    forward_s, backward_s = attention_s(
        chip,
        "flash",
        tokens=row.batch * row.seq_len,
        seq_len=row.seq_len,
        heads=row.heads,
        keys=row.seq_len / 2,
        head_dim=row.head_dim,
        value_dim=row.head_dim,
    )
    # The backward launches a second kernel: output times its gradient, row by row.
    return forward_s + chip.efficiency.launch_s, backward_s + 2 * chip.efficiency.launch_s


def block_errors(device: Device, bench: DeviceBench, precision: str) -> np.ndarray:
    """Logarithm of predicted over measured, shape (blocks, 2): forward and backward of the blocks that tell of it."""
    errors: list[tuple[float, float]] = []
    for row in _large(bench, precision, hosted=not device.is_cpu):
        model = Model(
            name="block",
            blocks=1,
            hidden_size=row.hidden_size,
            heads=row.heads,
            kv_heads=row.heads,
            head_dim=row.hidden_size // row.heads,
            ffn_size=4 * row.hidden_size,
            vocab_size=row.hidden_size,
            max_seq_len=row.seq_len,
        )
        batch = Batch(global_batch=row.micro_batch_size, seq_len=row.seq_len, precision=precision)
        times = layer_times(model, batch, device, ALONE, micro_batch_size=row.micro_batch_size, runtime=EAGER)
        errors.append((math.log(times.forward_s[1] / row.forward_s), math.log(times.backward_s[1] / row.backward_s)))
    return np.array(errors).reshape(-1, 2)


def _slowed(found: MeasuredEfficiency, factor: float) -> MeasuredEfficiency:
    """Every rate divided by a factor."""
    rates = ("gemm", "vector_gemm", "operands", "memory", "flash_forward", "flash_backward")
    given = found.given
    return replace(found, **{name: given[name] / factor for name in rates if name in given})  # type: ignore[arg-type]


def _by_blocks(errors: np.ndarray) -> tuple[float, float]:
    """How much slower blocks are than their operators, and the half width of a 90 % interval that is left.

    Of every block the error is what remains under the factor of the others.
    """
    factor = math.exp(-float(errors.mean()))
    others = (errors.sum() - errors.sum(axis=1)) / (errors.size - errors.shape[1])
    left_out = errors - others[:, None]
    return factor, math.expm1(WITHIN_90 * float(np.sqrt(np.square(left_out).mean())))


def _smallest(bench: DeviceBench, precision: str) -> BlockRow | None:
    """The block that shows what the host needs."""
    rows = [row for row in bench.blocks if row.precision == precision]
    return min(rows, key=lambda row: row.hidden_size * row.seq_len * row.micro_batch_size, default=None)


def _large(bench: DeviceBench, precision: str, *, hosted: bool) -> list[BlockRow]:
    """The other blocks; of a device with a host those that are far from waiting for it, and so tell of the device."""
    host = _smallest(bench, precision)
    least = HOST_BOUND if hosted else 0.0
    return [
        row
        for row in bench.blocks
        if host is not None and row is not host and row.precision == precision
        if row.forward_s >= least * host.forward_s and row.backward_s >= least * host.backward_s
    ]


def rows_for(bench: DeviceBench, precision: str) -> str:
    """The precision whose rows tell about another one.

    Raises
    ------
    InputError
        Where the bench has too few products in any of them.
    """
    wanted = STANDS_FOR.get(precision, (precision,))
    for candidate in wanted:
        if sum(row.precision == candidate for row in bench.products) >= LEAST_PRODUCTS:
            return candidate
    where = f"bench of {bench.device}: products"
    found = Message("found.products_in", precisions=bench.precisions) if bench.precisions else None
    raise fault(where, found, Message("expected.products_in", products=LEAST_PRODUCTS, precisions=wanted))


def fitted(device: Device, bench: DeviceBench, precision: str) -> MeasuredEfficiency:
    """What the device reaches in one precision, by least squares on the logarithm of the measured times.

    A block takes longer than its operators one by one, which find their operands in the caches: one factor over all
    rates, from the blocks of the bench. The relative error is that of a block under the factor of the others (of single
    operators left out of the fit where there are fewer than two blocks), with `ALONE_ERROR` beside it.

    Raises
    ------
    InputError
        Where the fastest product is not within `SHARES` of the data sheet's peak.
    """
    used = rows_for(bench, precision)
    chip = silicon(device, used)
    if not device.is_cpu:  # of processors the catalogue knows a core, of whatever kind
        best = max(2.0 * r.rows * r.columns * r.inner / r.seconds for r in bench.products if r.precision == used)
        share = Message("found.share_of_peak", percent=100 * best / chip.peak_flops)
        wanted = Message("expected.share_of_peak", least=100 * SHARES[0], most=100 * SHARES[1])
        require(SHARES[0] <= best / chip.peak_flops <= SHARES[1], f"bench of {bench.device}: products", share, wanted)
    products = _products(chip, bench, used)
    attention = _attention(_trial(chip, products.values), bench, used)
    values = {**products.values, **(attention.values if attention else {})}
    if chip.peak_flops == device.flops["fp32"]:
        values["vector_gemm"] = values.pop("gemm")
    host = _smallest(bench, used)
    if host is not None:
        forward_s = host.forward_s / EAGER.host_forward_factor
        values |= {"host_forward_s": forward_s, "host_backward_s": host.backward_s}
    found = MeasuredEfficiency(
        **values,
        basis="bench",
        source=", ".join(filter(None, (f"measured on {bench.measured_on or bench.device}", bench.date))),
    )
    errors = block_errors(replace(device, efficiency=found), bench, used)
    if len(errors) > 1:
        factor, error = _by_blocks(errors)
        found = _slowed(found, factor)
    else:
        left_out = [fit.left_out for fit in (products, attention) if fit is not None]
        error = float(np.quantile(np.abs(np.expm1(np.concatenate(left_out))), 0.9))
    return replace(found, relative_error=math.hypot(error, ALONE_ERROR))


def with_benches(problem: Problem, benches: Sequence[DeviceBench]) -> Problem:
    """The problem on a cluster whose devices reach what was measured under the power limit of then, and whose nodes do
    so between their devices.

    Raises
    ------
    InputError
        For a bench of a device that the cluster does not have, two benches of one device, or one without products in
        the problem's precision.
    """
    if not benches:
        return problem
    cluster, devices = problem.cluster, [bench.device for bench in benches]
    for name in devices:
        require(name in cluster.catalogue, "bench: device", name, one_of(name, cluster.catalogue))
        require(devices.count(name) == 1, f"bench of {name}", Message("found.files", files=devices.count(name)), "one")
    catalogue = dict(cluster.catalogue)
    for bench in benches:
        device = catalogue[bench.device]
        power_w = device.power_w if bench.power_limit_w is None else min(device.power_w, bench.power_limit_w)
        measured = fitted(device, bench, problem.batch.precision)
        catalogue[bench.device] = replace(device, efficiency=measured, power_w=power_w)
    by_device = {bench.device: bench for bench in benches}
    regions = tuple(
        replace(region, node_groups=tuple(_node_group(group, by_device, cluster) for group in region.node_groups))
        for region in cluster.regions
    )
    return replace(problem, cluster=replace(cluster, regions=regions, catalogue=catalogue))


def _node_group(group: NodeGroup, benches: Mapping[str, DeviceBench], cluster: Cluster) -> NodeGroup:
    """A node group with the rate inside a node that the all-reduce was measured at, where there is one to compare."""
    bench = benches.get(group.device)
    if bench is None or not bench.collectives or group.devices_per_node == 1:
        return group
    row = max(bench.collectives, key=lambda row: (row.members, row.n_bytes))

    def over(log_rate: float) -> float:
        link = Link(latency_s=group.intra_node.latency_s, bytes_per_s=math.exp(log_rate))
        fabric = fabric_of(cluster.catalogue[group.device], row.members, link)
        return intra_node_all_reduce_s(row.n_bytes, row.members, link, fabric=fabric) - row.seconds

    # Seconds fall with the rate: where both ends err alike, no rate of links explains them, and the data sheet stays.
    low, high = (math.log(rate) for rate in RATES)
    if over(low) * over(high) >= 0:
        return group
    rate = math.exp(brentq(over, low, high, xtol=1e-6))
    return replace(group, intra_node=replace(group.intra_node, bytes_per_s=rate))
