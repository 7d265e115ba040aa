"""Form of the timelines."""

import json

from polygon.export.chrome_trace import Interval, chrome_trace


def test_trace_has_the_intervals_in_microseconds_and_arrows_along_the_route():
    """Times count from the earliest interval; F arrows go to the next stage, B arrows to the one before."""
    intervals = [
        Interval(stage=0, worker=0, kind="compute", name="F0", start_s=10.0, end_s=10.5),
        Interval(stage=1, worker=2, kind="compute", name="F0", start_s=11.0, end_s=11.5),
        Interval(stage=1, worker=2, kind="compute", name="B0", start_s=11.5, end_s=12.5),
        Interval(stage=0, worker=0, kind="wait", name="recv B0", start_s=10.5, end_s=13.0),
        Interval(stage=0, worker=0, kind="compute", name="B0", start_s=13.0, end_s=14.0),
    ]
    trace = json.loads(json.dumps(chrome_trace(intervals, {(0, 0): "a"}, {0: "stage 0", 1: "stage 1"}, "measured")))
    boxes = {(e["pid"], e["name"], e["cat"]): e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert boxes[1, "F0", "compute"]["ts"] == 1e6
    assert boxes[1, "B0", "compute"]["dur"] == 1e6
    assert boxes[0, "recv B0", "wait"]["tid"] != boxes[0, "B0", "compute"]["tid"]
    starts = {(e["pid"], e["name"]): e["id"] for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {(e["pid"], e["name"]): e["id"] for e in trace["traceEvents"] if e["ph"] == "f"}
    assert starts == {(0, "F0"): ends[1, "F0"], (1, "B0"): ends[0, "B0"]}


def test_no_intervals_no_events():
    """A run that was stopped before its first action has a trace too."""
    assert chrome_trace([], {}, {})["traceEvents"] == []
