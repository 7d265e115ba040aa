"""The native benchmark is what its generator says; best known results are plans that can be priced; sweeps survive."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joblib.externals.loky import get_reusable_executor

from benchmarks import native_instances
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.formats.convert_plan import plan_data
from polygon.formats.files import read_problem
from polygon.planning.decode import Allocation, Decoder
from runners import sweep
from runners.sweeps import best_known, native, suites
from runners.sweeps import sweep_summary as report
from tests.patience import eventually

FOLDER = native_instances.FOLDER
SMALL = "tiny-2-a100-two-cities"


def decoded(name: str) -> tuple[Any, Any, CostTables]:
    """Problem, a plan with every device in one stage, and tables of an instance."""
    problem = read_problem(FOLDER / f"{name}.yaml")
    decoder = Decoder(problem)
    x = [[problem.cluster.pools[p].devices if tp == 1 else 0 for p, tp in decoder.classes]]
    allocation = Allocation(workers=np.array(x), micro_batch_size=1)
    return problem, decoder.decode(allocation), decoder.tables


def test_files_are_what_the_generator_writes() -> None:
    """Byte for byte, at least 40 with names of their own that say the devices, and every one can be read."""
    written = {f"{i.name}.yaml": i.text() for i in native_instances.instances()}
    assert len(written) == len(native_instances.instances()) >= 40
    assert {path.name: path.read_text() for path in FOLDER.glob("*.yaml")} == written
    for name in written:
        devices = read_problem(FOLDER / name).cluster.devices
        assert devices == int(name.split("-")[1]), name


def test_best_known_results_are_plans_above_their_bound() -> None:
    """Every stored value is above its bound; small plans can be read, keep the rules and are above today's bound."""
    entries = best_known.best_known("native")
    assert set(entries) <= set(suites.suite("native", []).instances)
    for name, entry in entries.items():
        assert entry["value"] >= entry["bound"] * (1 - 1e-9), name
        assert entry["gap"] == pytest.approx(entry["value"] / entry["bound"] - 1, abs=1e-4)
        assert set(entry["found_by"]) == {"method", "evaluations", "seed", "commit"}
    assert best_known.table(entries) in best_known.README.read_text()
    for name in [name for name in entries if name.startswith("tiny-")]:
        instance = native.NativeProblem(FOLDER / f"{name}.yaml")
        known = instance.known_s()
        assert known is not None and known >= instance.bound_s() * (1 - 1e-9), name


def test_a_stored_plan_is_the_plan() -> None:
    """Packed and unpacked it is equal, and has its price; of another problem it is refused or priced as no plan."""
    problem, plan, tables = decoded(SMALL)
    text = best_known.packed(problem, plan)
    again = best_known.unpacked(problem, text)
    assert repr(plan_data(problem, again)) == repr(plan_data(problem, plan))
    assert best_known.price(problem, again) == pytest.approx(Decoder(problem, tables=tables).plan_value(plan))
    with pytest.raises(InputError):
        best_known.unpacked(read_problem(FOLDER / "tiny-4-2080ti-vit.yaml"), text)


def row(value: float | None, **more: Any) -> dict[str, Any]:
    """A run's line."""
    status = "feasible" if value is not None else "unknown"
    line = {"instance": "a", "method": "m", "value": value, "status": status, "seed": 1, "evaluations": 9}
    return line | {"commit": "c", "plan": "new", "best_known": None, "bound": None} | more


def bound_row(known: float | None) -> dict[str, Any]:
    """The line of an instance's bound and of its stored plan's price today."""
    return row(None, status="bound", bound=5.0, best_known=known, plan=None)


def test_best_known_only_improves_at_the_prices_of_today() -> None:
    """A stored plan gets today's price and stays unless a better one was found; one that fits no more gives way."""
    by = {"method": "old", "evaluations": 1, "seed": 0, "commit": "b"}
    old = {"a": {"value": 10.0, "bound": 4.0, "gap": 1.5, "exhausted": True, "found_by": by, "plan": "old"}}
    same = best_known.improved(old, [bound_row(10.0), row(11.0)])["a"]
    assert (same["value"], same["bound"], same["gap"], same["exhausted"], same["plan"]) == (10.0, 5.0, 1.0, True, "old")
    dearer = best_known.improved(old, [bound_row(12.0), row(12.5)])["a"]
    assert (dearer["value"], dearer["exhausted"], dearer["found_by"]) == (12.0, False, by)
    better = best_known.improved(old, [bound_row(12.0), row(11.0)])["a"]
    assert (better["value"], better["plan"], better["found_by"]["method"]) == (11.0, "new", "m")
    broken = best_known.improved(old, [bound_row(None), row(None), row(30.0)])["a"]
    assert (broken["value"], broken["plan"]) == (30.0, "new")
    proved = best_known.improved(old, [bound_row(10.0), row(9.0, status="optimal")])["a"]
    assert proved["exhausted"] and proved["value"] == 9.0
    assert best_known.improved({}, [bound_row(None), row(None)]) == {}
    assert best_known.improved(old, [row(1.0)]) == old  # no bound: nothing is known of today's prices


def test_the_file_has_an_entry_a_line(tmp_path: Path) -> None:
    """Written and read it is the same, and the other suites' entries stay."""
    file = tmp_path / "known.json"
    file.write_text(json.dumps({"dtfm": {"case1": {"value": 3.0}}}))
    best_known.write("native", {"a": {"value": 1.0, "plan": "x"}}, file)
    assert best_known.best_known("native", file) == {"a": {"value": 1.0, "plan": "x"}}
    assert best_known.best_known("dtfm", file) == {"case1": {"value": 3.0}}
    assert sum('"value"' in line for line in file.read_text().splitlines()) == 2


def test_standings_by_hand() -> None:
    """Gaps, the runs without a solution, and the signed-rank test against the first method."""
    rows = []
    for i in range(6):
        for method, value in (("one", 10.0), ("two", 12.0), ("three", None if i == 0 else 10.0)):
            history = [] if value is None else [[1, 0.1, value]]
            rows.append(row(value, instance=f"i{i}", method=method, history=history, cpu_s=2.0))
    one, two, three = report.standings(rows, report.summary(rows, 0.01))
    assert (one["median_gap"], one["reached"], one["p"]) == (0.0, 6, None)
    assert (two["median_gap"], two["losses"], two["wins"]) == (pytest.approx(0.2), 6, 0)
    assert two["p"] == pytest.approx(2 / 2**6)
    assert (three["no_solution"], three["losses"], three["cpu_s"]) == (1, 1, 2.0)
    assert "| two | 6 | 0 | 20.0% |" in report.standings_table([one, two, three])


def test_planners_plan_and_rows_hold_the_plan() -> None:
    """polygon, a solver of the library and every rival find plans that keep the rules; the row's plan has its value."""
    chosen = suites.suite("native", [])
    problem = read_problem(FOLDER / f"{SMALL}.yaml")
    for method in ("polygon", "ants+memetic", "grid3d", "dt-fm", "ptafm"):
        line = sweep.run(sweep.Task("native", (), SMALL, method, 0, 60, None))
        assert line["value"] == pytest.approx(best_known.price(problem, best_known.unpacked(problem, line["plan"])))
    line = sweep.run(sweep.Task("native", (), SMALL, sweep.BOUND, 0, 60, None))
    assert 0 < line["bound"] <= (line["best_known"] or math.inf)
    assert chosen.methods["exhaustive"].picky


def test_every_part_can_be_taken_out() -> None:
    """Each variant of the ablation plans within the same budget of fluid evaluations."""
    chosen = suites.suite("ablation", [])
    for method in chosen.methods:
        line = sweep.run(sweep.Task("ablation", (), "tiny-6-three-labs", method, 0, 40, None))
        assert line["used_evaluations"] <= 40 and line["value"] is not None, method


def children() -> Iterator[int]:
    """Worker processes of this one."""
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        for pid in (task / "children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"popen_loky" in command:
                yield int(pid)


@pytest.fixture
def own_workers() -> Iterator[None]:
    """Processes of joblib that no other test meets: what is killed may be noticed after the sweep has ended."""
    yield
    get_reusable_executor().shutdown(wait=True, kill_workers=True)


@pytest.mark.usefixtures("own_workers")
def test_a_killed_worker_costs_nothing(tmp_path: Path) -> None:
    """SIGKILL one of two workers after the first run: every run is made all the same, and each is recorded once."""
    chosen = suites.suite("ptafm", [])
    todo = [sweep.Task("ptafm", (), "7dc-ants", "restarts", seed, 2_000, None) for seed in range(12)]
    assert "7dc-ants" in chosen.instances
    record = tmp_path / "runs.jsonl"
    killed: list[int] = []

    def kill() -> None:
        if eventually(lambda: record.exists() and record.read_text().count("\n") >= 1):
            killed.append(next(children()))
            os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    rows = sweep.sweep(todo, record, quiet=True, jobs=2)
    killer.join()
    assert killed
    assert [r["seed"] for r in rows] == list(range(12))
    assert sorted(json.loads(line)["seed"] for line in record.read_text().splitlines()) == list(range(12))
