"""Traces are those of the run that recorded them."""

import json

import torch

from runners.traces.record import Recorder, trace_name


def test_traces_of_an_earlier_run_do_not_stay(tmp_path):
    """Its own is written anew, though one is there before the first recorded step; those of ranks it has not go."""
    for rank in (0, 1, 2, 10):
        (tmp_path / trace_name(rank)).write_text("{}")
    (tmp_path / "rank-notes_trace.json").write_text("kept")
    recorder = Recorder(tmp_path, 0, 2, steps=1, warmup=3)
    for _ in range(5):
        torch.ones(3).sum()
        recorder.step()
    recorder.close()
    assert json.loads((tmp_path / trace_name(0)).read_text())["traceEvents"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-notes_trace.json", trace_name(0), trace_name(1)]
