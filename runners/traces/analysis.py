"""The analysis of a run's traces, as plain data, as text and as one self-contained HTML page with pictures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from polygon.domain.errors import InputError
from polygon.formats.files import write_json, write_text
from polygon.messages.report import seconds, size, table
from runners.traces import holistic
from runners.traces import plots as figures
from runners.traces.breakdown import Bubble, Kind, Temporal, by_kind, plain, temporal
from runners.traces.kineto import RankTrace

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .4rem; }}
p.note {{ color: #555; margin: .2rem 0; }} img {{ max-width: 100%; height: auto; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; margin: 1.2rem 0; }}
dl div {{ background: #f4f6f8; border-radius: 6px; padding: .6rem .8rem; }} dt {{ color: #555; font-size: .85rem; }}
dd {{ margin: 0; font-size: 1.25rem; font-weight: 600; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; overflow-wrap: anywhere; }} th {{ color: #555; font-weight: 600; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""

PARTS = ("compute_s", "exposed_s", "copies_s", "idle_s")


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What traces say."""

    traces: Sequence[RankTrace]
    temporal: Sequence[Temporal]
    kinds: Sequence[Kind]
    idle_causes: Sequence[dict[str, Any]]
    """HTA's idle time by rank, stream and cause; empty without GPU kernels."""
    computed_by: str
    notes: Sequence[str] = ()
    bubbles: Sequence[Bubble] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "computed_by": self.computed_by,
            "notes": list(self.notes),
            "ranks": len(self.traces),
            "steps": len(self.traces[0].steps),
            "temporal": plain(self.temporal),
            "communication": plain(self.kinds),
            "idle_causes": list(self.idle_causes),
            "bubbles": plain(self.bubbles),
            "longest": {
                str(trace.rank): [{"name": name, "seconds": s, "count": n} for name, s, n in trace.longest]
                for trace in self.traces
            },
        }


def analyse(traces: Sequence[RankTrace], bubbles: Sequence[Bubble] = (), notes: Sequence[str] = ()) -> Analysis:
    """Break traces down: by HolisticTraceAnalysis where all have GPU kernels and it is installed, else by our spans."""
    said = list(notes)
    idle: list[dict[str, Any]] = []
    on_gpu = all(trace.on_gpu for trace in traces)
    if on_gpu and holistic.is_installed():
        rows, idle, computed_by = holistic.analyse(traces)
    else:
        rows, computed_by = [temporal(trace) for trace in traces], "polygon's own spans"
        if on_gpu:
            said.append(f"{holistic.NAME} is not installed: no causes of idle time (pip install {holistic.NAME})")
        else:
            said.append(
                f"no GPU kernels in these traces, which {holistic.NAME} needs: computing is what operators take on any "
                "thread, communication lasts from its start to its end, waiting for the peer included"
            )
    if len({trace.host for trace in traces}) > 1:
        said.append("traces of several hosts, whose clocks are not aligned: compare lanes of one host only")
    return Analysis(
        traces=traces, temporal=rows, kinds=by_kind(traces), idle_causes=idle, computed_by=computed_by, notes=said,
        bubbles=bubbles,
    )  # fmt: skip


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _tables(analysis: Analysis) -> list[tuple[str, list[str], list[list[str]]]]:
    """Every table: title, header, rows."""
    tables = [
        (
            "Where the time goes",
            ["rank", "recorded", "computing", "exposed communication", "copying", "idle", "communication hidden"],
            [
                [
                    str(row.rank), seconds(row.window_s),
                    *(_percent(getattr(row, part) / row.window_s) for part in PARTS),
                    _percent(row.overlap) if row.communication_s else "-",
                ]
                for row in analysis.temporal
            ],
        ),
        (
            "Communication by kind",
            ["kind", "calls", "time per rank", "of it exposed", "bytes, all ranks"],
            [
                [row.kind, str(row.calls), seconds(row.seconds), seconds(row.exposed_s),
                 "not in the trace" if row.n_bytes is None else size(row.n_bytes)]
                for row in analysis.kinds
            ],
        ),
        (
            "Pipeline bubble",
            ["worker", "measured", "predicted", "difference"],
            [
                [f"stage {row.stage}, worker {row.worker}", _percent(row.measured), _percent(row.predicted),
                 "-" if row.predicted is None else f"{100 * (row.measured - row.predicted):+.1f} points"]
                for row in analysis.bubbles
            ],
        ),
        (
            "Idle time by cause",
            ["rank", "stream", "waiting for", "time"],
            [
                [str(row["rank"]), str(row["stream"]), row["cause"].replace("_wait", ""), seconds(row["seconds"])]
                for row in analysis.idle_causes
            ],
        ),
    ]  # fmt: skip
    return [entry for entry in tables if entry[2]]


def describe(analysis: Analysis) -> str:
    """The analysis for people, on a terminal."""
    steps = len(analysis.traces[0].steps)
    lines = [f"{len(analysis.traces)} ranks, {steps} steps recorded; computed by {analysis.computed_by}"]
    lines += [f"note: {note}" for note in analysis.notes]
    for title, header, rows in _tables(analysis):
        lines += ["", title, table(header, rows)]
    return "\n".join(lines)


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _headline(analysis: Analysis) -> str:
    rows = analysis.temporal
    window_s = sum(row.window_s for row in rows)
    sending_s = sum(row.communication_s for row in rows)
    facts = {
        "ranks": str(len(rows)),
        "computing": _percent(sum(row.compute_s for row in rows) / window_s),
        "exposed communication": _percent(sum(row.exposed_s for row in rows) / window_s),
        "idle": _percent(sum(row.idle_s for row in rows) / window_s),
        "communication hidden": _percent(sum(row.hidden_s for row in rows) / sending_s) if sending_s else "-",
    }
    if analysis.bubbles:
        facts["pipeline bubble (mean)"] = _percent(sum(b.measured for b in analysis.bubbles) / len(analysis.bubbles))
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items()) + "</dl>"


def pictures(analysis: Analysis) -> dict[str, bytes]:
    """PNG by file name."""
    found = {"temporal.png": figures.temporal_png(analysis.temporal)}
    if analysis.kinds:
        found["communication.png"] = figures.kinds_png(analysis.kinds)
    if analysis.bubbles:
        found["bubble.png"] = figures.bubbles_png(analysis.bubbles)
    found["timeline.png"] = figures.timeline_png(analysis.traces)
    return found


def html_page(analysis: Analysis, images: dict[str, bytes], title: str) -> str:
    """One page that needs no other file."""
    steps = len(analysis.traces[0].steps)
    parts = [f'<p class="note">{steps} steps recorded; computed by {escape(analysis.computed_by)}.</p>']
    parts += [f'<p class="note">Note: {escape(note)}.</p>' for note in analysis.notes]
    parts.append(_headline(analysis))
    of_table = {"Where the time goes": "temporal.png", "Communication by kind": "communication.png",
                "Pipeline bubble": "bubble.png"}  # fmt: skip

    def image(name: str, text: str) -> str:
        return f'<img alt="{escape(text)}" src="data:image/png;base64,{base64.b64encode(images[name]).decode()}">'

    for heading, header, rows in _tables(analysis):
        parts.append(f"<h2>{heading}</h2>")
        if heading in of_table:
            parts.append(image(of_table[heading], heading))
        parts.append(_html_table(header, rows))
    parts += ["<h2>One step, rank by rank</h2>", image("timeline.png", "timeline of one step")]
    longest = max(analysis.traces, key=lambda trace: sum(total for _, total, _ in trace.longest))
    parts.append(f"<h2>What takes longest (rank {longest.rank})</h2>")
    what = "kernel" if longest.on_gpu else "operator"
    rows = [[name, seconds(total), str(count)] for name, total, count in longest.longest]
    parts.append(_html_table([what, "time", "calls"], rows))
    return PAGE.format(title=escape(title), body="\n".join(parts))


def write_report(analysis: Analysis, folder: Path, title: str) -> Path:
    """Write report.html, its pictures as PNG and analysis.json; where the page is."""
    images = pictures(analysis)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in images.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise InputError(f"-o {folder}: cannot be written: {error.strerror}") from None
    write_json(folder / "analysis.json", analysis.to_dict())
    write_text(folder / "report.html", html_page(analysis, images, title))
    return folder / "report.html"
