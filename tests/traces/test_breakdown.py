"""What traces add up to: hand-computed cases, HolisticTraceAnalysis, the bubble's formula, a real run."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from polygon.domain.errors import InputError
from polygon.export.chrome_trace import Interval
from runners.analyze import main
from runners.traces.breakdown import bubbles, by_kind, compare_bubbles, temporal
from runners.traces.kineto import RankTrace, kind_of, read_traces
from runners.train import main as train
from tests.kineto_traces import COMMUNICATION_STREAM, COMPUTE_STREAM, gpu_trace, two_ranks, write_traces
from tests.real_programs import ran
from tests.routed_plans import plain_plan


@pytest.fixture
def traces(tmp_path):
    return write_traces(tmp_path / "traces", two_ranks())


def test_breakdown_by_hand(traces):
    """Two steps of 1000 us, the first kernel at their start and the last ending 50 us before their end."""
    first, second = (temporal(trace) for trace in read_traces([traces]))
    assert first.window_s == pytest.approx(1950e-6)
    assert first.compute_s == pytest.approx(1200e-6)
    assert first.communication_s == pytest.approx(600e-6)
    assert first.exposed_s == pytest.approx(400e-6) and first.hidden_s == pytest.approx(200e-6)
    assert first.copies_s == pytest.approx(100e-6)
    assert first.idle_s == pytest.approx(250e-6)
    assert second.exposed_s == 0 and second.overlap == pytest.approx(1)
    (kind,) = by_kind(read_traces([traces]))
    assert (kind.kind, kind.calls, kind.n_bytes) == ("all-reduce", 4, 4 * 1e6)


@pytest.mark.parametrize("number", range(3))
def test_parts_of_the_time_agree_with_holistic_trace_analysis(tmp_path, number):
    """On random kernels HTA and our spans say the same: window, computing, idle, overlap."""
    pytest.importorskip("hta", reason="HolisticTraceAnalysis is not installed: our spans are not held against it")
    import numpy as np

    from runners.traces.holistic import analyse

    rng = np.random.default_rng(number)
    made = []
    for rank in range(2):
        kernels = []
        for stream, name in ((COMPUTE_STREAM, "gemm"), (COMMUNICATION_STREAM, "ncclDevKernel_SendRecv(args)")):
            ends = 1000 + np.cumsum(rng.integers(10, 200, size=(20, 2)), axis=0).cumsum(axis=1)[:, 0]
            kernels += [(stream, name, int(a), int(rng.integers(5, 10))) for a in ends]
            kernels += [(stream, name, int(a) + 40, int(rng.integers(20, 60))) for a in ends[::3]]
        made.append(gpu_trace(rank, 2, kernels, (900, 6000, 9000)))
    ours = read_traces([write_traces(tmp_path, made)])
    theirs, _, name = analyse(ours)
    assert name.startswith("HolisticTraceAnalysis ")
    for trace, row in zip(ours, theirs, strict=True):
        own = temporal(trace)
        for part in ("window_s", "compute_s", "exposed_s", "idle_s"):
            assert getattr(row, part) == pytest.approx(getattr(own, part), abs=2e-6)
        assert row.overlap == pytest.approx(own.overlap, abs=1e-4)


@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (4, 8), (3, 3)])
def test_bubble_of_an_even_pipeline(stages, micro_batches):
    """(p - 1) / (m + p - 1) on every stage, where forwards take 1 and backwards 2."""
    rows = []
    for m in range(micro_batches):
        for s in range(stages):
            rows.append(Interval(s, 0, "compute", f"F{m}", s + m, s + m + 1))
            start = stages + micro_batches - 1 + 2 * (stages - 1 - s + m)
            rows.append(Interval(s, 0, "compute", f"B{m}", start, start + 2))
    expected = (stages - 1) / (micro_batches + stages - 1)
    assert list(bubbles(rows).values()) == pytest.approx([expected] * stages)


def test_a_worker_of_several_stages_has_one_bubble():
    """Two workers compute two stages each in turn, a second each time: both are idle for half of four seconds."""
    plan = replace(plain_plan(4, 1, 1, span=1), chunks=2)
    stages = tuple(replace(stage, workers=plan.stages[s % 2].workers) for s, stage in enumerate(plan.stages))
    predicted = [Interval(s, 0, "compute", "F0", s, s + 1) for s in range(4)]
    spans = np.zeros((0, 2))
    traces = [
        RankTrace(
            rank=rank, path=Path(), base_ns=0.0, host="", on_gpu=False, window=(0.0, 4.0), steps=np.array([[0.0, 4.0]]),
            compute=spans, copies=spans, actions=(("F0", rank, rank + 1), ("F0.1", rank + 2, rank + 3)),
        )
        for rank in range(2)
    ]  # fmt: skip
    found = compare_bubbles(traces, replace(plan, stages=stages), predicted)
    assert [(row.stage, row.measured, row.predicted) for row in found] == [(0, 0.5, 0.5), (1, 0.5, 0.5)]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", "all-reduce"),
        ("ncclKernel_SendRecv", "send/receive"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16", "reduce-scatter"),
        ("gloo:all_gather", "all-gather"),
        ("c10d::alltoall_base_", "all-to-all"),
        ("gloo:recv", "receive"),
        ("aten::all", None),
        ("reduce_kernel<512>", None),
    ],
)
def test_kinds_of_communication(name, kind):
    """NCCL's kernels and gloo's operators are known by name; a reduction on one device is no communication."""
    assert kind_of(name) == kind


def test_report_is_one_page_with_its_pictures(traces, tmp_path, capsys):
    """The command writes the page, the pictures and the same numbers as JSON; HTA is named where it computed them."""
    assert main([str(traces), "-o", str(tmp_path / "report"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"report.html", "analysis.json", "temporal.png", "communication.png", "timeline.png"}
    assert json.loads((tmp_path / "report" / "analysis.json").read_text()) == said
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and 'src="http' not in page
    if find_spec("hta") is None:
        pytest.skip("HolisticTraceAnalysis is not installed: only our spans were tried")
    assert said["computed_by"].startswith("HolisticTraceAnalysis") and said["idle_causes"]


@pytest.mark.parametrize(
    "content, expected",
    [
        ("{", "not JSON"),
        ('{"a": 1}', "traceEvents"),
        ('{"traceEvents": []}', "0 events"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, expected):
    """One line with the file and what is wrong with it."""
    (tmp_path / "rank0.json").write_text(content)
    with pytest.raises(InputError, match=expected):
        read_traces([tmp_path])


def test_the_folder_of_a_run_stands_for_its_traces(tmp_path):
    """Its other files (plan.json, trace.json) are none of the profiler's; without any it is said how to have them."""
    write_traces(tmp_path / "profile", two_ranks())
    (tmp_path / "plan.json").write_text("{}")
    assert [trace.rank for trace in read_traces([tmp_path])] == [0, 1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"expected a trace a rank \(of a run with --profiled-steps\)"):
        read_traces([tmp_path / "empty"])


def test_two_traces_of_one_rank_are_refused(tmp_path):
    """Copies of a rank's trace would count twice."""
    trace = two_ranks()[0]
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(trace))
    with pytest.raises(InputError, match="rank: found 0"):
        read_traces([tmp_path])


def test_a_profiled_pipeline_of_two_ranks(tmp_path, capsys):
    """A recipe's traces: both ranks, the asked steps, bytes sent, every stage's bubble beside the predicted."""
    recipe = tmp_path / "pipe.yaml"
    recipe.write_text(
        "model: {source: gpt2-small, change: {blocks: 2, hidden_size: 32, heads: 2, kv_heads: 2, ffn_size: 64,"
        " vocab_size: 256, max_seq_len: 32}}\n"
        "batch: {global_batch: 8, micro_batch: 2, seq_len: 32}\nparallel: {pp: 2}\nsteps: 4\n"
        "metrics: {profile_steps: 2}\n"
    )
    code, _, said = ran(train, [recipe, "-o", "run"], tmp_path)
    assert code == 0, said
    assert main([str(tmp_path / "run/profile"), "--json", "--plan", str(tmp_path / "run/plan.json")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ranks"], said["steps"]) == (2, 2)
    assert "no GPU kernels" in said["notes"][0]
    sent = {row["kind"]: row for row in said["communication"]}
    # Two steps, four micro-batches, an activation and a gradient each: 2 x 32 tokens x 32 floats.
    assert sent["send"]["calls"] == 16
    assert sent["send"]["n_bytes"] == 16 * 2 * 32 * 32 * 4
    assert [row["stage"] for row in said["bubbles"]] == [0, 1]
    assert all(0 < row["measured"] < 1 and 0 < row["predicted"] < 1 for row in said["bubbles"])
    for row in said["temporal"]:
        parts = row["compute_s"] + row["exposed_s"] + row["copies_s"] + row["idle_s"]
        assert parts == pytest.approx(row["window_s"])
