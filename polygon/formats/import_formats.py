"""Clusters in formats that are not polygon's own: PTAFM's text file, hostfiles.

Every function takes text and gives what `polygon.formats.schema` describes; faults are
`InputError` with the place inside the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polygon.domain.errors import Phrase, fault, require
from polygon.domain.message import Message

# PTAFM: data-center-config.txt


def is_ptafm(text: str) -> bool:
    """Whether a text is in the format of PTAFM's data-center-config.txt."""
    return bool(re.search(r"^\s*(NUM_STAGE\s*:|(POWER|LATENCY|BANDWIDTH)_SECTION\s*$)", text, re.MULTILINE))


def _line(number: int, field: str = "") -> Message:
    """Where a fault is, in a text that has lines."""
    if field:
        return Message("input.line_field", line=number, field=field)
    return Message("input.line", line=number)


def ptafm_cluster(text: str) -> dict[str, Any]:
    """The cluster of PTAFM's text format, as `polygon.formats.schema.ClusterSpec` reads it.

    ``NUM_STAGE:5``, then sections that end with ``end``: ``POWER_SECTION`` with ``CENTER [A100s,T4s]``,
    ``LATENCY_SECTION`` with ``CENTER CENTER ms`` (one way, as its cost adds it once) and ``BANDWIDTH_SECTION`` with
    ``CENTER CENTER Gbit/s``. Pairs are symmetric and given once; a center with itself is its inner network, in which
    every device is a node of its own. The A100 are taken as 40 GB ones; the format does not say.

    References
    ----------
    nsccsuperli/PTAFM at 72f7481, ACO/ACO_CVRP.py (`getData`, `generateGraph`).
    """
    stages, sections = _ptafm_sections(text)
    centers: dict[int, list[dict[str, Any]]] = {}
    for line, content in sections["POWER_SECTION"]:
        match = re.fullmatch(r"(\d+)\s*\[\s*(\d+)\s*,\s*(\d+)\s*\]", content)
        if match is None:
            raise fault(_line(line), content, "'CENTER [A100s,T4s]'")
        center, a100, t4 = map(int, match.groups())
        require(center not in centers, _line(line, "POWER_SECTION"), center, "a center that no earlier line gives")
        require(a100 + t4 > 0, _line(line, "POWER_SECTION"), content, "at least one device")
        counts = (("a100-40gb", a100), ("t4", t4))
        centers[center] = [{"device": kind, "count": count} for kind, count in counts if count]
    latency_ms = _ptafm_pairs(sections, "LATENCY_SECTION", centers, at_least_zero=True)
    gbps = _ptafm_pairs(sections, "BANDWIDTH_SECTION", centers, at_least_zero=False)
    for pair in sorted({(a, b) for a in centers for b in centers if a <= b} - (latency_ms.keys() & gbps.keys())):
        section = "LATENCY_SECTION" if pair not in latency_ms else "BANDWIDTH_SECTION"
        raise fault(section, Message("found.no_line_for", a=pair[0], b=pair[1]), "one a pair")
    return {
        "stages": stages,
        "source": "PTAFM data-center-config.txt",
        "regions": [
            {
                "name": f"dc{center}",
                "intra_region": {"latency_ms": latency_ms[center, center], "bandwidth_gbps": gbps[center, center]},
                "nodes": nodes,
            }
            for center, nodes in centers.items()
        ],
        "links": [
            {"between": [f"dc{a}", f"dc{b}"], "latency_ms": latency_ms[a, b], "bandwidth_gbps": gbps[a, b]}
            for a, b in sorted(latency_ms)
            if a != b
        ],
    }


def _ptafm_sections(text: str) -> tuple[int, dict[str, list[tuple[int, str]]]]:
    """NUM_STAGE, and the numbered lines of every section."""
    sections: dict[str, list[tuple[int, str]]] = {}
    stages: int | None = None
    open_section: str | None = None
    names = ("POWER_SECTION", "LATENCY_SECTION", "BANDWIDTH_SECTION")
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line:
            continue
        if match := re.fullmatch(r"NUM_STAGE\s*:\s*(\S+)", line):
            require(match[1].isdigit() and int(match[1]) >= 1, _line(number, "NUM_STAGE"), match[1], "a number >= 1")
            stages = int(match[1])
        elif line in names:
            require(open_section is None, _line(number), line, Message("expected.end_of", section=str(open_section)))
            require(line not in sections, _line(number), line, "each section once")
            open_section = line
            sections[line] = []
        elif line.lower() == "end":
            open_section = None
        elif open_section is None:
            raise fault(_line(number), line, Message("expected.section", names=names))
        else:
            sections[open_section].append((number, line))
    require(open_section is None, str(open_section), Phrase("the end of the file"), "a line 'end'")
    require(stages is not None, "NUM_STAGE", Phrase("nothing"), "a line NUM_STAGE:n")
    for name in names:
        require(bool(sections.get(name)), name, Phrase("nothing"), "a section with at least one line")
    assert stages is not None
    return stages, sections


def _ptafm_pairs(
    sections: Mapping[str, list[tuple[int, str]]], name: str, centers: Mapping[int, Any], *, at_least_zero: bool
) -> dict[tuple[int, int], float]:
    """Numbers of a section by pair of centers, the smaller one first."""
    values: dict[tuple[int, int], float] = {}
    for line, content in sections[name]:
        match = re.fullmatch(r"(\d+)\s+(\d+)\s+([-+.\deE]+)", content)
        try:
            value = float(match[3]) if match else None
        except ValueError:
            value = None
        if match is None or value is None:
            raise fault(_line(line), content, "'CENTER CENTER NUMBER'")
        a, b = sorted((int(match[1]), int(match[2])))
        for center in (a, b):
            require(center in centers, _line(line, name), center, "a center of POWER_SECTION")
        fits = value >= 0 if at_least_zero else value > 0
        require(fits, _line(line, name), value, "a number >= 0" if at_least_zero else "a number > 0")
        known = values.setdefault((a, b), value)
        require(known == value, _line(line, name), value, Message("expected.as_earlier", value=known, a=a, b=b))
    return values


# Hostfiles of DeepSpeed and FlagScale

_HOST = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)(?:\s+type=(?P<type>\S+))?")


def is_hostfile(text: str) -> bool:
    """Whether the first line that says something is a host of a hostfile."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    first = next((line for line in lines if line), "")
    return _HOST.fullmatch(first) is not None


def hostfile_cluster(text: str, device: str | None = None) -> dict[str, Any]:
    """The cluster of a hostfile with device types, as `polygon.formats.schema.ClusterSpec` reads it.

    Lines ``HOST slots=N type=DEVICE``; `type` is FlagScale's addition, which DeepSpeed ignores. One region; a hostfile
    says nothing about links, so they have the defaults of a cluster file. `device` is the type of lines without one.

    References
    ----------
    deepspeed/launcher/runner.py (`_parse_hostfile`); flagos-ai/FlagScale, hetero training.
    """
    nodes: dict[tuple[str, int], int] = {}
    hosts: set[str] = set()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#")[0].strip()
        if not line:
            continue
        match = _HOST.fullmatch(line)
        if match is None or int(match["slots"]) < 1:
            raise fault(_line(number), line, "'HOST slots=N type=DEVICE' with N >= 1")
        require(match["host"] not in hosts, _line(number), match["host"], "each host once")
        named = match["type"] or device
        if named is None:
            raise fault(_line(number), Message("found.no_type", line=line), "type=DEVICE at the end of the line")
        hosts.add(match["host"])
        kind = (named, int(match["slots"]))
        nodes[kind] = nodes.get(kind, 0) + 1
    listed = [{"device": kind, "count": n, "devices_per_node": slots} for (kind, slots), n in nodes.items()]
    return {"source": "hostfile", "regions": [{"name": "cluster", "nodes": listed}]}
