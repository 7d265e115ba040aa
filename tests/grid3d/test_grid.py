"""Enumeration, rejection, ranking and the same answer wherever the work is done."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.commands import cli
from polygon.cost.estimate import estimate
from polygon.domain.cluster import Cluster, Link, NodeGroup, Pool, Region
from polygon.domain.divisors import divisors
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.runnable import RUNNABLE, runnable
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from polygon.grid3d.__main__ import main
from polygon.grid3d.grid import evaluate_all, parallel_config, spread_out
from polygon.grid3d.grid_rows import Case, GridRow, uniform_pool
from polygon.grid3d.splits import EVERYTHING, GridOptions, GridSplit, all_splits, configurations
from tests.nightly import cases

MODEL = catalogue.model("gpt3-1.3b")
BATCH = Batch(global_batch=64, seq_len=2048)
POOL = Pool(
    index=0,
    region=0,
    device=catalogue.device("a100-40gb"),
    nodes=4,
    devices_per_node=8,
    intra_node=catalogue.link("nvlink3"),
    inter_node=catalogue.link("infiniband-hdr-x8"),
    first_device=0,
    price_usd_per_hour=0.0,
)

CLUSTER = """\
name: two nodes
regions:
- name: here
  nodes:
  - {device: a100-40gb, count: 2, devices_per_node: 8, intra_node: nvlink3, inter_node: infiniband-hdr-x8}
"""


def case(options: GridOptions, usable_bytes: float = 36e9) -> Case:
    return Case(model=MODEL, batch=BATCH, pool=POOL, usable_bytes=usable_bytes, options=options)


@settings(deadline=None)
@given(devices=st.integers(1, 400))
def test_every_factorisation_once(devices):
    """All (dp, tp, pp) with this product: as many as the prime factors allow, each once."""
    splits = list(all_splits(devices))
    assert len(set(splits)) == len(splits)
    assert all(s.dp * s.tp * s.pp == devices for s in splits)
    expected = sum(len(divisors(devices // dp)) for dp in divisors(devices))
    assert len(splits) == expected


@settings(max_examples=cases(30), deadline=None)
@given(split=st.sampled_from(list(all_splits(32, None))))
def test_configurations_are_legal_and_differ(split):
    """No configuration twice, each with the split's degrees and a batch that divides."""
    configs = [config for config, fault in configurations(split, MODEL, BATCH, EVERYTHING) if fault is None]
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert isinstance(config, ParallelConfig)
        assert config.devices == 32 and BATCH.global_batch % (config.dp * config.micro_batch_size) == 0
        assert config.chunks == 1 or config.pp > 1


def test_rows_are_the_planners_own_estimate():
    """A row holds what `evaluate` says of its plan; its terms add up to the step."""
    asked = case(GridOptions(zero=(0, 1), recompute=("none", "full")))
    result = evaluate_all(asked, list(all_splits(32)), backend="serial")
    for row in result.top(5):
        found = estimate(asked.problem, uniform_plan(asked.problem, parallel_config(row)))
        assert row["step_s"] == pytest.approx(found.step_s, rel=1e-6)
        assert row["memory_bytes"] == pytest.approx(max(worker.peak_bytes for worker in found.workers), rel=1e-6)
        assert sum(row["terms_s"].values()) == pytest.approx(row["step_s"], rel=1e-5)


def test_best_first_rejected_last_with_reason():
    """Accepted rows by time, then rejected ones; every rejection says why, every accepted one fits."""
    usable = 12e9
    result = evaluate_all(case(GridOptions(micro_batch_size=(1, 3)), usable), list(all_splits(32)), backend="serial")
    rows = [json.loads(row.line) for row in result.rows]
    good = [row for row in rows if row["rejected"] is None]
    assert rows[: len(good)] == good
    assert [row["step_s"] for row in good] == sorted(row["step_s"] for row in good)
    assert all(row["memory_bytes"] <= usable for row in good)
    reasons = " ".join(row["rejected"] for row in rows[len(good) :])
    for words in (
        "does not divide the 8 devices of a node",
        "more than the 24 blocks",
        "memory: needs",
        "micro-batch 3 does not",
    ):
        assert words in reasons
    assert result.best() == parallel_config(good[0])


def test_an_interrupt_keeps_what_is_priced(tmp_path):
    """Splits that are done are ranked and written; the file says that it is not all."""

    class Impatient:
        def __init__(self) -> None:
            self.left = 3

        def rows(self, split: GridSplit) -> list[GridRow]:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            return case(GridOptions()).rows(split)

    result = evaluate_all(Impatient(), list(all_splits(32)), backend="serial")
    assert result.interrupted and len(result.rows) == 3
    result.write(str(tmp_path / "o.json"), {})
    data = json.loads((tmp_path / "o.json").read_text())
    assert data["interrupted"] is True and len(data["configurations"]) == 3


@given(devices=st.integers(1, 400))
def test_splits_are_looked_at_in_an_order_that_leaves_none_out(devices):
    """Each once, the deepest cut first; the first eighth has several tensor degrees where there are many."""
    splits = list(all_splits(devices))
    order = spread_out(splits)
    assert sorted(order) == sorted(splits)
    assert order[0].tp * order[0].pp == devices
    first = order[: max(len(order) // 8, 2)]
    assert len(order) < 16 or len({split.tp for split in first}) > 1


def countdown(calls: int):
    """Seconds left that run out after so many times that somebody asks."""
    left = iter(range(calls, -1_000_000, -1))
    return lambda: float(next(left))


def test_a_time_limit_keeps_what_is_priced(tmp_path):
    """Splits that there was time for are ranked as in the whole grid, and file and words say how many they are."""
    splits = list(all_splits(32))
    asked = case(GridOptions(micro_batch_size=None))
    whole = evaluate_all(asked, splits, backend="serial")
    part = evaluate_all(asked, splits, backend="serial", seconds_left=countdown(12))
    assert whole.complete and not part.complete and not part.interrupted
    assert 0 < part.looked_at < part.splits == len(splits) and part.accepted
    assert set(part.rows) < set(whole.rows) and list(part.rows) == sorted(part.rows)
    assert str(part.part()) == f"the time allowed for {part.looked_at} of {len(splits)} splits"
    part.write(str(tmp_path / "o.json"), {})
    data = json.loads((tmp_path / "o.json").read_text())
    assert (data["splits"], data["splits_looked_at"]) == (len(splits), part.looked_at)
    whole.write(str(tmp_path / "o.json"), {})
    assert "splits" not in json.loads((tmp_path / "o.json").read_text())


def test_however_short_a_limit_one_that_fits_is_looked_for():
    """Until one does, and no further; where none does, in a few splits and not in all."""
    splits = list(all_splits(32))
    one = evaluate_all(case(GridOptions()), splits, backend="serial", seconds_left=lambda: 0.0)
    assert one.accepted and not one.complete
    none = evaluate_all(case(GridOptions(), usable_bytes=1e6), splits, backend="serial", seconds_left=lambda: 0.0)
    assert not none.accepted and 0 < none.looked_at < len(splits)
    assert none.why_none(32).kind == "reason.of_part" and "splits)" in str(none.why_none(32))


def test_the_command_answers_within_its_time(tmp_path, capsys):
    """The best so far, exit 0, and how much of the grid that is."""
    code, text = run(tmp_path, "--time-limit", "1e-9", "--all", "--json")
    data, shown = json.loads(text), capsys.readouterr()
    assert code == 0 and data["accepted"] > 0 and data["splits_looked_at"] < data["splits"]
    assert json.loads(shown.out)["splits_looked_at"] == data["splits_looked_at"]
    assert f"the time allowed for {data['splits_looked_at']} of {data['splits']} splits" in shown.err


@pytest.mark.parametrize("model", ["gpt3-125m", "llama2-7b"])
@pytest.mark.parametrize("plans", sorted(RUNNABLE))
def test_rows_that_fit_are_those_that_the_program_runs(model, plans):
    """A configuration is rejected for the program exactly where it does not run its plan."""
    runtime = replace(catalogue.runtime("megatron-core"), plans=plans)
    asked = replace(case(EVERYTHING, math.inf), model=catalogue.model(model), runtime=runtime)
    asked = replace(asked, pool=replace(POOL, nodes=3), batch=Batch(global_batch=24, seq_len=1026))
    runs, seen = runnable(asked.problem), {False: 0, True: 0}
    for split in list(all_splits(24, None))[::5]:
        for row in asked.rows(split)[::11]:
            if row.rejected and row.why != "runtime":
                continue
            plan = uniform_plan(asked.problem, parallel_config(json.loads(row.line)))
            assert runs.runs(asked.problem, plan) is not row.rejected, row.line
            seen[row.rejected] += 1
    assert seen[True] and (seen[False] or plans == "sharded")


def test_the_listing_counts_what_the_program_does_not_run(tmp_path, capsys):
    """They are behind those it runs, without a price and with what it has not; none where it runs any plan."""
    code, text = run(tmp_path, "--zero", "all", "--runtime", "deepspeed", "--json", "--jobs", "1")
    rows, shown = json.loads(text)["configurations"], capsys.readouterr()
    left = [row for row in rows if (row["rejected"] or "").startswith("runtime: ")]
    assert code == 0 and 0 < len(left) == json.loads(shown.out)["not_run"]
    assert f"deepspeed does not run {len(left)} more" in shown.err
    assert {row["tp"] for row in rows if row["rejected"] is None} == {1}
    assert {"runtime: deepspeed does not run tp 2", "runtime: deepspeed does not run zero 2"} <= {
        row["rejected"] for row in left
    }
    code, text = run(tmp_path, "--zero", "all", "--jobs", "1")
    assert "runtime: " not in text and "does not run" not in capsys.readouterr().err


def test_nothing_fits_is_a_result():
    """No accepted row, reasons counted."""
    result = evaluate_all(case(GridOptions(), usable_bytes=1e9), list(all_splits(32)), backend="serial")
    assert result.best() is None and result.accepted == 0
    assert result.reasons()["memory"] > 0
    why = result.why_none(32)
    assert (why.kind, why["devices"]) == ("reason.no_configuration_fits", 32)
    assert {part["why"]: part["count"] for part in why["rejected"]} == result.reasons()
    why = evaluate_all(case(GridOptions()), [], backend="serial").why_none(3)
    assert (why.kind, why["devices"]) == ("reason.no_degrees", 3)


@pytest.mark.parametrize(("asked", "why"), [({"ep": (3,)}, "ep"), ({"interleave": (7,)}, "interleave")])
def test_degrees_that_no_split_can_have_are_said(asked, why):
    """Every split tells what kept it out, also where it is what was asked beside its degrees."""
    splits = list(all_splits(32))
    result = evaluate_all(case(GridOptions(**asked)), splits, backend="serial")
    assert result.accepted == 0 and result.reasons()[why] > 0 and len(result.rows) == len(splits)


def link(latency_s: float, rate: float) -> Link:
    return Link(latency_s=latency_s, bytes_per_s=rate)


def test_unequal_pools_are_levelled_down():
    """Slowest device, least memory, worst links, nodes of the largest common size; unlinked regions are refused."""
    import numpy as np

    def region(name: str, device: str, per_node: int) -> Region:
        group = NodeGroup(
            device=device, nodes=2, devices_per_node=per_node, intra_node=link(3e-6, 3e11), inter_node=link(5e-6, 25e9)
        )
        return Region(name=name, node_groups=(group,), intra_region=link(5e-6, 25e9))

    names = ("a100-80gb", "t4")
    rate = np.array([[0, 1e9], [1e9, 0]])
    cluster = Cluster(
        name="two",
        regions=(region("a", "a100-80gb", 8), region("b", "t4", 4)),
        latency_s=np.full((2, 2), 0.03),
        bytes_per_s=rate,
        capacity_bytes_per_s=np.full((2, 2), np.inf),
        catalogue={name: catalogue.device(name) for name in names},
    )
    pool, note = uniform_pool(cluster, "bf16")
    assert note is not None and "slowest of" in note
    assert (pool.device.name, pool.devices_per_node, pool.devices) == ("t4", 4, 24)
    assert pool.inter_node == link(0.03, 1e9)
    apart = replace_rate(cluster, np.zeros((2, 2)))
    with pytest.raises(InputError, match="a and b: found no link"):
        uniform_pool(apart, "bf16")


def replace_rate(cluster: Cluster, rate: object) -> Cluster:
    return replace(cluster, bytes_per_s=rate)


def run(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code of the command and the text of its output file."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    out = folder / "output.json"
    code = cli.run(main, [str(folder / "cluster.yaml"), "gpt3-1.3b", "--global-batch", "32", "-o", str(out), *words])
    return code, out.read_text()


def test_command_writes_every_configuration(tmp_path, capsys):
    """The file holds all splits, best first; the table shows the best; the same bytes from processes."""
    code, text = run(tmp_path, "--jobs", "1", "--zero", "all", "--recompute", "none,full", "--top", "3")
    assert code == 0
    data = json.loads(text)
    assert data["devices"] == 16 and data["model"] == "gpt3-1.3b"
    splits = {(row["dp"], row["tp"], row["pp"]) for row in data["configurations"]}
    assert splits == {s[:3] for s in all_splits(16)}
    shown = capsys.readouterr()
    assert (
        shown.out.startswith("runtime       polygon\n") and shown.out.count("\n") == 5 and "configurations" in shown.err
    )
    _, again = run(tmp_path, "--jobs", "2", "--zero", "all", "--recompute", "none,full")
    assert again == text


def test_dask_gives_the_same_bytes(tmp_path):
    """A real Dask cluster of two worker processes writes the file that this process writes."""
    distributed = pytest.importorskip("distributed")
    options = ("--zero", "0,1", "--micro-batch-size", "all")
    _, here = run(tmp_path, "--jobs", "1", *options)
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0")
    try:
        code, there = run(tmp_path, "--backend", "dask", "--scheduler", cluster.scheduler_address, *options)
    finally:
        cluster.close()
    assert code == 0 and there == here


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--zero", "5"], "expected a whole number in 0..3"),
        (["--jobs", "0"], "expected a whole number >= 1"),
        (["--cp", "0"], "expected a whole number >= 1"),
        (["--recompute", "some"], "expected none, selective, full or all"),
        (["--backend", "dask", "--scheduler", "tcp://127.0.0.1:1"], "expected a Dask scheduler"),
        (["--backend", "dask", "--jobs", "1", "--scheduler", "tcp://127.0.0.1:1"], "expected a Dask scheduler"),
        (["--seq-len", "4096"], "at most 2048"),
        (["--base-eff", "0.4"], "--base-eff: found 0.4, expected it with --cost-model seed003 (or metadata) alone"),
        (["--cost-model", "seed003", "--micro-batch-size", "2"], "--micro-batch-size: found with cost model seed003"),
        (["--cost-model", "seed003", "--all"], "--all: found with cost model seed003, which knows dp, tp and pp alone"),
    ],
)
def test_bad_options_get_one_line(tmp_path, capsys, words, found):
    """Exit 2 and one line."""
    try:
        code = run(tmp_path, *words)[0]
    except FileNotFoundError:  # nothing was written
        code = 2
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    lines = capsys.readouterr().err
    assert found in lines
    assert lines.count("\n") == 1


def test_infeasible_says_why(tmp_path, capsys):
    """Exit 3, the file is written all the same."""
    code, text = run(tmp_path, "--model", "gpt3-175b")
    assert code == 3 and json.loads(text)["accepted"] == 0
    assert "no configuration of 16 devices fits" in capsys.readouterr().err


def test_split_is_a_tuple_of_degrees():
    """The last degree may be left out."""
    assert GridSplit(2, 4, 1) == (2, 4, 1, 1)
