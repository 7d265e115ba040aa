"""What a device reaches, fitted to its measured operators: on made-up measurements of a device that is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from polygon.cost import bench_fit
from polygon.cost.bench_fit import fitted, with_benches
from polygon.cost.compute import layer_times
from polygon.cost.estimate import estimate
from polygon.cost.kernels import attention_s, efficiency_of, gemm_s, silicon, stream_s
from polygon.cost.network import fabric_of, intra_node_all_reduce_s
from polygon.domain.bench import AttentionRow, BlockRow, CollectiveRow, DeviceBench, ProductRow, StreamRow
from polygon.domain.cluster import Device
from polygon.domain.efficiency import MeasuredEfficiency
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.formats.catalogue import device
from tests.small_problems import small_cluster, small_model, small_plan

TRUE = MeasuredEfficiency(
    gemm=0.37,
    unaligned=0.6,
    operands=0.9,
    memory=0.55,
    flash_forward=0.3,
    flash_backward=0.2,
    flash_forward_tokens=900.0,
    flash_backward_tokens=400.0,
    launch_s=9e-6,
)
SHAPES = [(4096, 4096, 4096), (16384, 2048, 2048), (256, 8192, 2048), (2048, 2048, 65536), (8192, 8192, 128)]
SHAPES += [(1024, 1024, 1024), (128, 2048, 512), (4096, 50257, 2048), (4096, 2053, 2048), (512, 512, 517)]


def bench_of(name: str, truth: MeasuredEfficiency, *, noise: float = 0.0, slower_blocks: float = 1.0) -> DeviceBench:
    """What a bench of a device with these coefficients would say, each time off by a factor of about exp(noise)."""
    card, rng = replace(device(name), efficiency=truth), np.random.default_rng(0)
    precision = "bf16" if "bf16" in card.flops else "fp16"
    chip = silicon(card, precision)

    def off() -> float:
        return math.exp(noise * rng.standard_normal())

    products = [
        ProductRow(precision=precision, rows=r, columns=c, inner=k, seconds=gemm_s(chip, r, c, k) * off())
        for r, c, k in SHAPES
    ]
    streams = [
        StreamRow(precision=precision, operation=f"copy {n}", moved_bytes=n, seconds=stream_s(chip, n) * off())
        for n in (10**6, 10**8, 10**9)
    ]
    attention = []
    for seq_len in (512, 2048, 16384):
        forward_s, backward_s = attention_s(
            chip, "flash", tokens=16384, seq_len=seq_len, keys=seq_len / 2, heads=16, head_dim=128, value_dim=128
        )
        times = {"forward_s": (forward_s + 9e-6) * off(), "backward_s": (backward_s + 18e-6) * off()}
        batch = 16384 // seq_len
        attention.append(
            AttentionRow(precision=precision, batch=batch, heads=16, seq_len=seq_len, head_dim=128, **times)
        )
    bench = DeviceBench(
        device=name,
        launch_s=9e-6,
        products=tuple(products),
        streams=tuple(streams),
        attention=tuple(attention),
    )
    sizes = [(64, 1, 16, 1), (2048, 32, 2048, 1), (2048, 32, 2048, 4), (4096, 64, 2048, 1)]
    rows = [
        BlockRow(
            precision=precision,
            hidden_size=width,
            heads=heads,
            seq_len=length,
            micro_batch_size=size,
            forward_s=1.0,
            backward_s=1.0,
        )
        for width, heads, length, size in sizes
    ]
    # What a bench measures of the host is that of the engine's block, which launches less than a usual one.
    host = replace(rows[0], forward_s=1e-4 * bench_fit.EAGER.host_forward_factor, backward_s=2e-4)
    quick = replace(card, efficiency=replace(truth, host_forward_s=1e-4, host_backward_s=2e-4))
    ratios = np.exp(bench_fit.block_errors(quick, replace(bench, blocks=(host, *rows[1:])), precision))
    blocks = [
        replace(row, forward_s=forward * slower_blocks * off(), backward_s=backward * slower_blocks * off())
        for row, (forward, backward) in zip(rows[1:], ratios, strict=True)
    ]
    return replace(bench, blocks=(host, *blocks))


@pytest.mark.parametrize("name", ["a100-80gb", "t4", "mi300x"])
def test_the_fit_finds_the_coefficients_behind_exact_times(name):
    """Times that the model itself made are fitted without error, from far away."""
    found = fitted(device(name), bench_of(name, TRUE), "bf16")
    for coefficient, value in TRUE.given.items():
        assert getattr(found, coefficient) == pytest.approx(value, rel=1e-3), coefficient
    assert (found.host_forward_s, found.host_backward_s) == (pytest.approx(1e-4), 2e-4)
    assert found.relative_error == pytest.approx(bench_fit.ALONE_ERROR, rel=1e-3)


def test_blocks_slower_than_their_operators_slow_every_rate():
    """One factor; launches, lengths and the host stay as they were measured."""
    plain, slower = (fitted(device("t4"), bench_of("t4", TRUE, slower_blocks=f), "fp16") for f in (1.0, 1.25))
    for name in ("gemm", "operands", "memory", "flash_forward", "flash_backward"):
        assert getattr(plain, name) / getattr(slower, name) == pytest.approx(1.25, rel=0.02), name
    assert slower.launch_s == pytest.approx(plain.launch_s)
    assert slower.flash_forward_tokens == pytest.approx(plain.flash_forward_tokens, rel=1e-2)


def test_blocks_that_wait_for_the_host_tell_nothing_of_the_device():
    """On an accelerator they neither slow its rates nor widen the interval; on a CPU, which calls itself, all count."""
    bench = bench_of("a100-80gb", TRUE)
    host = bench.blocks[0]
    waiting = replace(bench.blocks[1], forward_s=1.4 * host.forward_s, backward_s=3 * host.backward_s)
    with_it = replace(bench, blocks=(*bench.blocks, waiting))
    assert fitted(device("a100-80gb"), with_it, "bf16") == fitted(device("a100-80gb"), bench, "bf16")
    core = device("cpu-core")
    assert len(bench_fit.block_errors(core, with_it, "bf16")) == len(bench_fit.block_errors(core, bench, "bf16")) + 1


def test_the_interval_grows_with_the_noise_of_the_measurement():
    """And what is left out of the fit is further off than the fit itself."""
    card = device("a100-80gb")
    errors = [fitted(card, bench_of(card.name, TRUE, noise=n), "bf16").relative_error for n in (0.02, 0.2)]
    assert bench_fit.ALONE_ERROR < errors[0] < errors[1]
    noisy = replace(bench_of(card.name, TRUE, noise=0.2), blocks=())
    assert fitted(card, noisy, "bf16").relative_error > 0.2


def test_left_out_errors_are_those_of_fits_without_the_row():
    """The leverage formula against refitting, where the errors are small enough for the model to be linear."""
    bench, chip = bench_of("a100-80gb", TRUE, noise=0.01), silicon(device("a100-80gb"), "bf16")
    whole = bench_fit._products(chip, bench, "bf16")
    for i in (0, 2, 4):
        rest = replace(bench, products=tuple(row for k, row in enumerate(bench.products) if k != i))
        values = bench_fit._products(chip, rest, "bf16").values
        row = bench.products[i]
        alone = math.log(gemm_s(bench_fit._trial(chip, values), row.rows, row.columns, row.inner) / row.seconds)
        assert whole.left_out[i] == pytest.approx(alone, abs=2e-3)


def problem_with(name: str) -> tuple[Problem, Plan]:
    """Two regions of four devices of one type, with a plan of two stages."""
    cluster = small_cluster(4, 4)
    regions = tuple(
        replace(region, node_groups=tuple(replace(group, device=name) for group in region.node_groups))
        for region in cluster.regions
    )
    cluster = replace(cluster, regions=regions, catalogue={name: device(name)})
    model = small_model(hidden_size=2048, heads=32, kv_heads=32, head_dim=64, ffn_size=8192, max_seq_len=2048)
    batch = Batch(global_batch=8, seq_len=2048, precision="fp16")
    plan = small_plan(cluster, [(0, 3), (3, 6)], [[0], [4]], [[0, 0]] * 8, micro_batch_size=1)
    return Problem(cluster=cluster, model=model, batch=batch), plan


def test_a_bench_scales_the_times_and_narrows_the_interval():
    """A T4 that reaches half of what Turing is taken to reach is half as fast, and known better."""
    problem, plan = problem_with("t4")
    known = efficiency_of(device("t4"))
    half = replace(TRUE, gemm=known.gemm / 2, memory=known.memory / 2, operands=known.memory / 2)
    measured = with_benches(problem, [bench_of("t4", half, noise=0.02)])
    times = []
    for asked in (problem, measured):
        pool = asked.cluster.pools[0]
        times.append(layer_times(asked.model, asked.batch, pool.device, pool.intra_node))
    assert times[1].source == "bench"
    assert times[1].relative_error < times[0].relative_error
    assert estimate(measured, plan).step_s > estimate(problem, plan).step_s
    gemm = [gemm_s(silicon(asked.cluster.pools[0].device, "fp16"), 8192, 8192, 8192) for asked in (problem, measured)]
    assert gemm[1] == pytest.approx(2 * gemm[0], rel=0.05)


@pytest.mark.parametrize(("limit_w", "power_w"), [(None, 70), (50.0, 50), (90.0, 70)])
def test_a_limit_of_power_is_what_the_device_draws(limit_w, power_w):
    """Of the rate that was measured under it; none that is above the board's own."""
    problem, _ = problem_with("t4")
    measured = with_benches(problem, [replace(bench_of("t4", TRUE), power_limit_w=limit_w)])
    assert (problem.cluster.catalogue["t4"].power_w, measured.cluster.catalogue["t4"].power_w) == (70, power_w)


def test_a_collective_says_what_links_inside_a_node_carry():
    """The link's rate is the one at which the model's all-reduce takes as long."""
    problem, _ = problem_with("a100-80gb")
    row = CollectiveRow(backend="nccl", members=4, n_bytes=2**28, seconds=0.03)
    bench = replace(bench_of("a100-80gb", TRUE), collectives=(row,))
    for region in with_benches(problem, [bench]).cluster.regions:
        (group,) = region.node_groups
        fabric = fabric_of(device("a100-80gb"), 4, group.intra_node)
        assert intra_node_all_reduce_s(2**28, 4, group.intra_node, fabric=fabric) == pytest.approx(0.03, rel=1e-4)
        assert group.inter_node == problem.cluster.regions[0].node_groups[0].inter_node


def test_benches_that_do_not_fit_are_refused():
    """Another device, two of one, none in the precision: one line each."""
    problem, _ = problem_with("t4")
    bench = bench_of("t4", TRUE)
    for benches, message in (
        ([replace(bench, device="a100-80gb")], "bench: device: found 'a100-80gb', expected one of t4"),
        ([bench, bench], "bench of t4: found 2 files, expected one"),
        ([replace(bench, products=bench.products[:5])], "bench of t4: products: found products in fp16, expected at"),
    ):
        with pytest.raises(InputError, match=message):
            with_benches(problem, benches)
    fp32 = replace(problem, batch=Batch(global_batch=8, seq_len=16, precision="fp32"))
    with pytest.raises(InputError, match="at least 6 in fp32"):
        with_benches(fp32, [bench])


@pytest.mark.parametrize(("factor", "found"), [(1e3, "0.05 %"), (1e-3, "50,000.00 %")])
def test_a_bench_in_other_units_is_refused(factor: float, found: str):
    """Of a GPU: what a core of a processor reaches the catalogue does not know."""
    problem = Problem(
        cluster=small_cluster(1), model=small_model(), batch=Batch(global_batch=1, seq_len=16, precision="fp32")
    )

    def bench(device_name: str, peak: float) -> DeviceBench:
        row = {"precision": "fp32", "rows": 4096, "columns": 4096, "inner": 4096}
        rows = (ProductRow(**row, seconds=2 * 4096**3 / (0.5 * peak) * factor),) * 6
        return DeviceBench(device=device_name, products=rows)

    card, core = problem.cluster.catalogue["cpu"], device("cpu-core")
    with pytest.raises(InputError) as refused:
        fitted(card, bench("cpu", card.peak_flops("fp32")), "fp32")
    assert str(refused.value).startswith(
        f"bench of cpu: products: found {found} of its peak at best, expected 1 to 200 %"
    )
    assert fitted(core, bench("cpu-core", core.peak_flops("fp32")), "fp32").basis == "bench"


def test_an_own_efficiency_stands_above_the_architectures():
    """What is not given is the architecture's."""
    plain: Device = device("a100-80gb")
    own = replace(plain, efficiency=MeasuredEfficiency(gemm=0.5))
    assert efficiency_of(own).gemm == 0.5
    assert efficiency_of(own).memory == efficiency_of(plain).memory
    assert gemm_s(silicon(own, "bf16"), 8192, 8192, 8192) > gemm_s(silicon(plain, "bf16"), 8192, 8192, 8192)
