"""Reads Chrome traces of the PyTorch Profiler (Kineto): what a rank computed, sent and copied, and when.

Where a trace has GPU kernels they decide; else (ranks on CPUs) the operators do. Times are in seconds from a moment
that all traces read together have in common, so that ranks of one host share a clock.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polygon.domain.errors import InputError, require

FOLDER = "profile"
"""Folder of a run's log directory that its traces go to."""
KINDS = {
    "reducescatter": "reduce-scatter", "allreduce": "all-reduce", "allgather": "all-gather", "alltoall": "all-to-all",
    "broadcast": "broadcast", "sendrecv": "send/receive", "send": "send", "recv": "receive", "barrier": "barrier",
    "scatter": "scatter", "gather": "gather", "reduce": "reduce",
}  # fmt: skip
"""Part of a collective's name, without underscores, and what it is called here; the first that fits."""
ELEMENT_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "long": 8, "int": 4, "short": 2, "byte": 1, "char": 1, "bool": 1,
    "c10::half": 2, "c10::bfloat16": 2, "long int": 8, "unsigned char": 1, "signed char": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip
"""Names of number formats in NCCL kernels' and in operators' arguments."""
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
ACTION = re.compile(r"(?:compute: )?([FB]\d+(?:\.\d+)?)$")
"""Annotation of a forward or a backward of a micro-batch."""
WRAPPERS = ("autograd::", "torch::autograd", "torch::distributed", "torch.distributed", "DistributedDataParallel")
"""Operators that only contain others, among them those that communicate."""


class Traffic(NamedTuple):
    """All communication of one kind on one rank."""

    calls: int
    spans: np.ndarray
    """Shape (n, 2): start and end [s] of each."""
    n_bytes: float | None
    """Sum of the larger of what goes in and what comes out; None where the trace does not tell."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank did. Spans are arrays of shape (n, 2), start and end in seconds."""

    rank: int
    path: Path
    base_ns: float
    """Nanoseconds since the epoch from which its times count."""
    host: str
    on_gpu: bool
    window: tuple[float, float]
    """From the first to the last thing on the GPU; on a CPU, the recorded steps."""
    steps: np.ndarray
    compute: np.ndarray
    copies: np.ndarray
    """Copies between host and device, and memory set."""
    traffic: dict[str, Traffic] = field(default_factory=dict)
    actions: tuple[tuple[str, float, float], ...] = ()
    """Forwards and backwards of micro-batches (F3, B3): name, start, end."""
    longest: tuple[tuple[str, float, int], ...] = ()
    """Kernels or operators that took most time: name, seconds, count."""

    @property
    def communication(self) -> np.ndarray:
        """Spans of all kinds of communication."""
        return np.concatenate([np.zeros((0, 2)), *(kind.spans for kind in self.traffic.values())])


def kind_of(name: str) -> str | None:
    """The kind of communication that a kernel or operator does; None if it does none."""
    plain = name.lower().replace("_", "")
    if not plain.startswith(("nccl", "gloo:", "c10d::", "mpi:", "ucc:", "rccl")):
        return None
    return next((kind for part, kind in KINDS.items() if part in plain), "other")


def _bytes(event: dict[str, Any]) -> float | None:
    """What a communication moves, from NCCL's or the operator's arguments."""
    arguments = event.get("args", {})
    if "In msg nelems" in arguments:
        size = ELEMENT_BYTES.get(str(arguments.get("dtype", "")).lower())
        elements = max(arguments["In msg nelems"], arguments.get("Out msg nelems", 0))
        return None if size is None else float(elements) * size
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not shapes or not types:
        return None
    total = 0.0
    for shape, type_ in zip(shapes, types, strict=False):
        size = ELEMENT_BYTES.get(str(type_).lower())
        if size is not None and all(isinstance(n, int) for n in shape):
            total += size * float(np.prod(shape, dtype=float))
    return total


def load(path: Path) -> dict[str, Any]:
    """A trace file, compressed or not; `InputError` where it is none."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            data = json.load(file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}, expected a readable trace") from None
    except (ValueError, EOFError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    events = data.get("traceEvents") if isinstance(data, dict) else None
    require(
        isinstance(events, list),
        f"{path}: traceEvents",
        None if events is None else type(events).__name__,
        "a list of events",
    )
    return data


def _rank_of(data: dict[str, Any], path: Path) -> int:
    found = data.get("distributedInfo", {}).get("rank")
    if found is None:
        match = re.search(r"rank[-_]?(\d+)", path.name)
        if match is None:
            raise InputError(
                f"{path}: found no distributedInfo.rank, expected it, or a file name with a number after 'rank'"
            )
        found = match[1]
    return int(found)


def _spans(events: Iterable[dict[str, Any]], origin_s: float) -> np.ndarray:
    rows = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    return np.array(rows, dtype=float).reshape(-1, 2) * 1e-6 + origin_s


def _traffic(events: Iterable[dict[str, Any]], origin_s: float) -> dict[str, Traffic]:
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_kind[kind_of(event["name"]) or "other"].append(event)
    traffic = {}
    for kind, rows in sorted(by_kind.items()):
        # The operator that starts a collective (c10d::) and the thread that does it (gloo:) are one communication.
        real = [event for event in rows if not event["name"].startswith("c10d::")] or rows
        sizes = [_bytes(event) for event in real]
        known = [size for size in sizes if size is not None]
        total = sum(known) if len(known) == len(sizes) else None
        traffic[kind] = Traffic(len(real), _spans(rows, origin_s), total)
    return traffic


def _longest(events: Iterable[dict[str, Any]], number: int = 12) -> tuple[tuple[str, float, int], ...]:
    """Names by the time that events take without those inside them on the same thread or stream."""
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    open_events: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        outer = open_events[event.get("pid"), event.get("tid")]
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= event["ts"]:
            outer.pop()
        if outer:
            seconds[outer[-1]["name"]] -= event["dur"] * 1e-6
        outer.append(event)
        seconds[event["name"]] += event["dur"] * 1e-6
        counts[event["name"]] += 1
    return tuple((name, total, counts[name]) for name, total in seconds.most_common(number))


def read_trace(path: Path, base_ns: float | None = None) -> RankTrace:
    """One rank's trace; times count from `base_ns` (nanoseconds since the epoch), or from where the file's do.

    Raises
    ------
    InputError
        The file is no trace, does not say of which rank, or holds neither kernels nor operators.
    """
    data = load(path)
    complete = [e for e in data["traceEvents"] if e.get("ph") == "X" and "dur" in e and "ts" in e]
    own_base_ns = data.get("baseTimeNanoseconds", 0)
    origin_s = (own_base_ns - (own_base_ns if base_ns is None else base_ns)) * 1e-9
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in complete:
        by_category[event.get("cat", "")].append(event)
    kernels = [event for category in GPU_CATEGORIES for event in by_category[category]]
    marks = by_category["user_annotation"]
    steps = _spans(sorted((e for e in marks if e["name"].startswith("ProfilerStep")), key=lambda e: e["ts"]), origin_s)
    if kernels:
        working, copies = by_category["kernel"], by_category["gpu_memcpy"] + by_category["gpu_memset"]
        sending = [event for event in working if kind_of(event["name"])]
        computing = [event for event in working if not kind_of(event["name"])]
        marks = by_category["gpu_user_annotation"] or marks
        everything = _spans(kernels, origin_s)
    else:
        operators, copies = by_category["cpu_op"], []
        sending = [event for event in operators + marks if kind_of(event["name"])]
        computing = [e for e in operators if not kind_of(e["name"]) and not e["name"].startswith(WRAPPERS)]
        everything = steps if len(steps) else _spans(operators, origin_s)
    require(
        len(everything) > 0, f"{path}: traceEvents", f"{len(complete)} events", "GPU kernels or operators among them"
    )
    actions = []
    for event in marks:
        if match := ACTION.match(event["name"]):
            start_s = event["ts"] * 1e-6 + origin_s
            actions.append((match[1], start_s, start_s + event["dur"] * 1e-6))
    return RankTrace(
        rank=_rank_of(data, path),
        path=path,
        base_ns=own_base_ns if base_ns is None else base_ns,
        host=str(data.get("host_name", "")),
        on_gpu=bool(kernels),
        window=(float(everything[:, 0].min()), float(everything[:, 1].max())),
        steps=steps,
        compute=_spans(computing, origin_s),
        copies=_spans(copies, origin_s),
        traffic=_traffic(sending, origin_s),
        actions=tuple(sorted(actions, key=lambda action: action[1])),
        longest=_longest([e for e in computing if e["name"].startswith("aten::")] if not kernels else computing),
    )


def find_traces(paths: Iterable[Path]) -> list[Path]:
    """The trace files among files and folders (*.json, *.json.gz), in order; of a run's folder those in `profile`.

    Raises
    ------
    InputError
        A path does not exist, or there is no trace.
    """
    found: list[Path] = []
    for path in paths:
        require(path.exists(), "traces", str(path), "a trace file or a folder of them")
        if (path / FOLDER).is_dir():  # of a run
            path /= FOLDER
        inside = (
            sorted(p for p in path.iterdir() if p.name.endswith((".json", ".json.gz"))) if path.is_dir() else [path]
        )
        require(bool(inside), f"{path}", "no *.json", "a trace a rank (of a run with --profiled-steps)")
        found += inside
    return found


def read_traces(paths: Iterable[Path]) -> list[RankTrace]:
    """All ranks' traces, by rank; raises `InputError` where two are of one rank."""
    traces: list[RankTrace] = []
    for path in find_traces(paths):
        traces.append(read_trace(path, traces[0].base_ns if traces else None))
    traces.sort(key=lambda trace: trace.rank)
    for one, other in itertools.pairwise(traces):
        require(one.rank != other.rank, f"{other.path}: rank", other.rank, f"another than that of {one.path}")
    return traces
