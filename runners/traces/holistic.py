"""What HolisticTraceAnalysis says of traces with GPU kernels, in this project's words. Imports it only when asked."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from runners.traces.breakdown import Temporal, temporal
from runners.traces.kineto import RankTrace

NAME = "HolisticTraceAnalysis"


def is_installed() -> bool:
    """Whether HolisticTraceAnalysis can be imported."""
    return find_spec("hta") is not None


def analyse(traces: Sequence[RankTrace]) -> tuple[list[Temporal], list[dict[str, Any]], str]:
    """Temporal breakdown, idle time by stream and cause, and name and version of what computed them.

    HTA counts from a rank's first kernel to its last, as `RankTrace.window` does. What it calls non-compute is exposed
    communication and copies together; our own spans say how much of it are copies.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # HTA uses what pandas is about to give up
        return _analyse(traces)


def _analyse(traces: Sequence[RankTrace]) -> tuple[list[Temporal], list[dict[str, Any]], str]:
    from hta.configs.config import logger
    from hta.trace_analysis import TraceAnalysis

    logger.setLevel(logging.ERROR)
    files = {trace.rank: str(trace.path) for trace in traces}
    analysis = TraceAnalysis(trace_files=files, include_last_profiler_step=True)
    shares = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    if any(trace.traffic for trace in traces):
        overlaps = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"].to_dict()
    else:
        overlaps = {}
    rows = []
    for trace in traces:
        own, share = temporal(trace), shares.loc[trace.rank] * 1e-6
        rows.append(
            Temporal(
                rank=trace.rank,
                window_s=float(share["kernel_time(us)"]),
                compute_s=float(share["compute_time(us)"]),
                exposed_s=float(share["non_compute_time(us)"]) - own.copies_s,
                copies_s=own.copies_s,
                idle_s=float(share["idle_time(us)"]),
                communication_s=own.communication_s,
                hidden_s=own.communication_s * float(overlaps.get(trace.rank, 0.0)) / 100 if trace.traffic else 0.0,
            )
        )
    frame, _ = analysis.get_idle_time_breakdown(ranks=sorted(files), visualize=False)
    idle = [
        {
            "rank": int(row["rank"]),
            "stream": int(row["stream"]),
            "cause": str(row["idle_category"]),
            "seconds": float(row["idle_time"]) * 1e-6,
        }
        for _, row in frame[frame["idle_time"] > 0].iterrows()
    ]
    return rows, idle, f"{NAME} {version(NAME)}"
