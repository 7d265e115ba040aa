"""Best known results of the suites, `instances/best-known.json`: read, priced again, improved.

A native entry holds the plan itself, so that its value can be computed anew when the estimator changes: a sweep
compares with the stored plan at today's price. The plan is the plan file without problem and estimate, compressed
(zlib, base64); the problem is the instance.
"""

from __future__ import annotations

import base64
import json
import math
import statistics
import subprocess
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import polygon
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from polygon.formats.convert import problem_data
from polygon.formats.convert_plan import plan_data, plan_from_spec
from polygon.formats.files import read_json, write_text
from polygon.formats.schema import PlanSpec, check
from polygon.formats.serialization import format_json, parse_json
from polygon.planning.checker import violations
from polygon.planning.decode import Decoder
from polygon.planning.objectives import OVER_LIMIT

FILE = Path(__file__).parents[2] / "instances" / "best-known.json"
README, MARK = FILE.with_name("README.md"), "native best known"
"""The page with the table, and what its marks say."""
BETTER = 1e-9
"""Least relative gain that counts as one."""

Entry = Mapping[str, Any]


def best_known(suite: str, path: Path = FILE) -> dict[str, Entry]:
    """Entries of a suite by instance; none where there is no file."""
    return dict(read_json(path).get(suite, {})) if path.exists() else {}


def packed(problem: Problem, plan: Plan) -> str:
    """A plan as short text."""
    data = plan_data(problem, plan)
    short = {key: value for key, value in data.items() if key not in ("problem", "estimate")}
    return base64.b64encode(zlib.compress(format_json(short).encode(), 9)).decode()


def unpacked(problem: Problem, text: str) -> Plan:
    """The plan of `packed`.

    Raises
    ------
    InputError
        For a plan that is not of this problem, or of another version of the format.
    """
    short = parse_json(zlib.decompress(base64.b64decode(text)).decode())
    whole = {"problem": parse_json(format_json(problem_data(problem)))}
    return plan_from_spec(check(PlanSpec, whole | short)).plan


def price(problem: Problem, plan: Plan, tables: CostTables | None = None) -> float:
    """Step time [s] of a plan by today's estimator; inf where it breaks a rule or a limit today."""
    decoder = Decoder(problem, tables=tables)
    if violations(problem, plan, decoder.tables):
        return math.inf
    value = decoder.plan_value(plan)
    return value if value < OVER_LIMIT else math.inf


@cache
def commit() -> str:
    """Short hash of the checkout that runs, with + where files differ from it; else polygon's version."""

    def git(*command: str) -> str:
        asked = ["git", "-C", str(FILE.parent), *command]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", "polygon", "solvers", "runners")
        return git("rev-parse", "--short", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return polygon.__version__


def improved(entries: Mapping[str, Entry], rows: Iterable[Mapping[str, Any]]) -> dict[str, Entry]:
    """The entries of a suite after a sweep that priced their plans anew and may have found better ones.

    Parameters
    ----------
    rows : iterable of dict
        Of `runners.sweep.run`. A row of an instance's bound has the stored plan's value of today in `best_known`
        (none: it has no plan today).
    """
    result = dict(entries)
    of_instance: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        of_instance.setdefault(row["instance"], []).append(row)
    for instance, mine in of_instance.items():
        bounds = [row for row in mine if row["status"] == "bound"]
        if not bounds:
            continue
        old = dict(result.get(instance, {}))
        value = math.inf if bounds[0]["best_known"] is None else bounds[0]["best_known"]
        entry = {**old, "value": value}
        found = [row for row in mine if row["value"] is not None and row.get("plan")]
        best = min(found, key=lambda row: row["value"], default=None)
        if best is not None and best["value"] < value * (1 - BETTER):
            by = {key: best[key] for key in ("method", "evaluations", "seed", "commit")}
            entry = {"value": best["value"], "found_by": by, "plan": best["plan"]}
        if not math.isfinite(entry["value"]):
            continue  # nothing to keep: no plan is known, or the one that was is none today
        entry["bound"] = bounds[0]["bound"]
        entry["gap"] = round(entry["value"] / entry["bound"] - 1, 4)
        proofs = [row["value"] for row in mine if row["status"] == "optimal"]
        # A proof stands for the prices that it was made with.
        still = bool(old.get("exhausted")) and entry.get("plan") == old.get("plan") and value == old.get("value")
        entry["exhausted"] = still or any(entry["value"] <= proof * (1 + BETTER) for proof in proofs)
        result[instance] = {key: entry[key] for key in ("value", "bound", "gap", "exhausted", "found_by", "plan")}
    return dict(sorted(result.items()))


def table(entries: Mapping[str, Entry]) -> str:
    """The entries of the native suite for people."""
    lines = ["| problem | best known | bound | gap | found by |", "|---|---|---|---|---|"]
    for name, entry in sorted(entries.items(), key=lambda pair: (int(pair[0].split("-")[1]), pair[0])):
        by = entry["found_by"]
        proof = ", every allocation tried" if entry["exhausted"] else ""
        who = f"{by['method']}, {by['evaluations']} evaluations, seed {by['seed']}, {by['commit']}{proof}"
        lines.append(f"| {name} | {entry['value']:.4g} s | {entry['bound']:.4g} s | {entry['gap']:.0%} | {who} |")
    gaps = sorted(entry["gap"] for entry in entries.values())
    return "\n".join(lines) + f"\n\nMedian gap of these {len(gaps)}: {statistics.median(gaps):.0%}.\n"


def write_table(entries: Mapping[str, Entry], path: Path = README) -> None:
    """Put the table between its marks in a page."""
    before, rest = path.read_text(encoding="utf-8").split(f"<!-- {MARK} -->\n")
    after = rest.split(f"<!-- /{MARK} -->\n")[1]
    write_text(path, f"{before}<!-- {MARK} -->\n{table(entries)}<!-- /{MARK} -->\n{after}")


def write(suite: str, entries: Mapping[str, Entry], path: Path = FILE) -> None:
    """Put the entries of a suite into the file, an entry a line."""
    table = {**(read_json(path) if path.exists() else {}), suite: entries}
    suites = []
    for name, of_suite in table.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in of_suite.items())
        suites.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    write_text(path, "{\n" + ",\n".join(suites) + "\n}\n")
