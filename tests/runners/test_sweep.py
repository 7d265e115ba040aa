"""A sweep runs every combination once, goes on where it stopped, and reports what it ran."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from polygon.commands import cli
from runners import sweep
from runners.sweeps import best_known, suites
from runners.sweeps import sweep_summary as report

PTAFM = ["ptafm", "--seeds", "2", "--methods", "ants,restarts", "--evaluations", "300", "--time-limit", "3600",
         "--no-plots", "--quiet"]  # fmt: skip


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Lines of the record."""
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def test_sweep_resumes_and_repeats_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut the record after one and a half lines: the rest is run again, with the same values, and a third time none."""
    assert sweep.main([*PTAFM, "-o", str(tmp_path), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["instances"]
    record = tmp_path / "runs.jsonl"
    rows = rows_of(tmp_path)
    # Ants take the ant objective only; restarts both.
    assert sorted((r["instance"], r["method"], r["seed"]) for r in rows) == sorted(
        [("7dc-ants", m, s) for m in ("ants", "restarts") for s in (0, 1)]
        + [("7dc-genetic", "restarts", s) for s in (0, 1)]
    )
    lines = record.read_text().splitlines(keepends=True)
    record.write_text(lines[0] + lines[1][: len(lines[1]) // 2])
    assert sweep.main([*PTAFM, "-o", str(tmp_path), "--json"]) == 0
    second = json.loads(capsys.readouterr().out)["instances"]
    assert [(e["instance"], e["method"], e["best"], e["median"], e["reached"]) for e in second] == [
        (e["instance"], e["method"], e["best"], e["median"], e["reached"]) for e in first
    ]
    before = record.read_text()
    assert sweep.main([*PTAFM, "-o", str(tmp_path)]) == 0
    assert record.read_text() == before
    with (tmp_path / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6
    assert capsys.readouterr().out.strip() == (tmp_path / "table.md").read_text().strip()


def test_a_sweep_starts_from_any_folder(tmp_path: Path) -> None:
    """An installed checkout gives the packages of the wheel alone; the rivals' are found beside them."""
    root = Path(__file__).resolve().parents[2]
    for name in ("polygon", "runners", "solvers"):
        (tmp_path / "installed" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "installed" / name).symlink_to(root / name)
    command = [sys.executable, "-m", "runners.sweep", "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kept", [0, 2])
def test_an_interrupted_sweep_reports_what_it_has(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs that ended are in record and table, and the exit code is that of what a signal ended."""

    def spread(run: Any, tasks: Any, **where: Any) -> Iterator[Any]:
        yield from map(run, tasks[:kept])
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sweep, "spread", spread)
    assert sweep.main([*PTAFM, "-o", str(tmp_path), "--json"]) == 143
    out, talk = capsys.readouterr()
    assert "interrupted: the runs that ended are kept" in talk
    assert len(rows_of(tmp_path)) == kept and bool(out) == (kept > 0) == (tmp_path / "table.md").exists()


def test_bound_and_plot(tmp_path: Path) -> None:
    """DT-FM's suite records the bound of each instance, and the plot is an image."""
    arguments = ["dtfm", "--instances", "case3", "--methods", "path-annealing", "--seeds", "1", "-o", str(tmp_path)]
    assert sweep.main([*arguments, "--evaluations", "50000", "--quiet"]) == 0
    assert "= best (proved)" in (tmp_path / "table.md").read_text()
    for name in ("convergence.png", "profile.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_table_counts_what_reached_the_best() -> None:
    """Gap, hits and times to the target by hand: two runs, of which one found 10 after 5 evaluations."""
    common = {"instance": "a", "method": "m", "best_known": None, "bound": None, "status": "feasible"}
    rows = [
        common | {"value": 10.0, "history": [[1, 0.1, 12.0], [5, 0.5, 10.0]]},
        common | {"value": 11.0, "history": [[2, 0.2, 11.0]]},
    ]
    (entry,) = report.summary(rows, tolerance=0.01)
    assert (entry["best"], entry["median"], entry["worst"], entry["reached"]) == (10.0, 10.5, 11.0, 1)
    assert entry["median_gap"] == pytest.approx(0.05)
    assert (entry["median_s_to_target"], entry["median_evaluations_to_target"]) == (0.5, 5)


def test_every_suite_is_well_made() -> None:
    """Every suite has instances whose problems can be drawn from and evaluated, and methods to solve them."""
    assert set(suites.SUITES) >= {"dtfm", "ptafm", "sailor", "regional", "large", "study", "native", "ablation"}
    for name in suites.SUITES:
        chosen = suites.suite(name, [])
        assert chosen.instances and chosen.methods
        assert set(chosen.best_known) <= set(chosen.instances) and set(chosen.chosen) <= set(chosen.methods)


def test_planning_methods_respect_the_budget() -> None:
    """Starts and ants count: no method evaluates more than it is given."""
    chosen = suites.suite("study", [])
    for method in ("ants+memetic", "simple+memetic", "grown+memetic", "memetic"):
        row = sweep.run(sweep.Task("study", (), "dtfm-irregular0", method, 0, 120, None))
        assert row["used_evaluations"] <= 120
        assert row["value"] is not None
    assert chosen.bound is not None


def test_wrong_names_are_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown method or instance is named with what is allowed, and nothing is written."""
    for option in ("--methods", "--instances"):
        arguments = ["ptafm", option, "nonsense", "-o", str(tmp_path / "out")]
        assert cli.run(sweep.main, arguments) == cli.EXIT_BAD_INPUT
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "nonsense" in message
    assert not (tmp_path / "out").exists()


def test_files_are_read_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is missing or empty ended a sweep midway; one called as a shipped instance took its place, and its best
    known value."""
    shipped = next((Path(__file__).parents[2] / "instances" / "ptafm").glob("*.json"))
    empty, same, own, again = (tmp_path / name for name in ("e.json", shipped.name, "own.json", "more/own.json"))
    empty.touch()
    again.parent.mkdir()
    for path in (same, own, again):
        path.write_text(shipped.read_text())
    for files, said in (
        ([tmp_path / "none.json"], "none.json: found no such file"),
        ([own, empty], "e.json: found an empty file"),
        ([same], f"files: found {same}, expected another name"),
        ([own, again], f"files: found {again}, expected another name"),
    ):
        arguments = ["ptafm", *map(str, files), "-o", str(tmp_path / "out")]
        assert cli.run(sweep.main, arguments) == cli.EXIT_BAD_INPUT
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    arguments = ["--instances", "own-genetic", "--methods", "restarts", "--seeds", "1", "--evaluations", "20"]
    assert sweep.main(["ptafm", str(own), *arguments, "--no-plots", "-o", str(tmp_path / "out")]) == 0
    assert {row["instance"] for row in rows_of(tmp_path / "out")} == {"own-genetic"}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in its place, or none that may be made: said before anything is run."""
    (tmp_path / "file").touch()
    for out, said in ((tmp_path / "file", "File exists"), (Path("/proc/x"), "No such file or directory")):
        arguments = ["ptafm", "--instances", "7dc-genetic", "--evaluations", "20", "--no-plots", "-o", str(out)]
        assert cli.run(sweep.main, [*arguments, "--backend", "serial"]) == cli.EXIT_BAD_INPUT
        assert capsys.readouterr().err == f"--out: {out}: cannot be made: {said}\n"


def test_a_method_named_twice_is_run_once() -> None:
    """And counted once: the same run is no further evidence."""
    words = ["ptafm", "--seeds", "2", "--instances", "7dc-genetic,7dc-genetic", "--methods", "genetic,genetic"]
    todo = sweep.tasks(suites.suite("ptafm", []), sweep._parser().parse_args(words))
    assert [(task.method, task.seed) for task in todo if task.method == "genetic"] == [("genetic", 0), ("genetic", 1)]


def test_a_scheduler_that_would_not_be_asked_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only Dask has one: another backend would compute here, and not on the cluster that was meant."""
    arguments = ["ptafm", "--instances", "7dc-genetic", "--evaluations", "20", "--no-plots", "-o", str(tmp_path)]
    assert cli.run(sweep.main, [*arguments, "--scheduler", "tcp://10.0.0.1:8786"]) == cli.EXIT_BAD_INPUT
    said = "scheduler: found 'tcp://10.0.0.1:8786' with backend processes, expected it with backend dask alone\n"
    assert capsys.readouterr().err.endswith(said)


def test_only_runs_of_today_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """A folder of another commit has bounds and prices of its day: refused before anything runs or is written."""
    record = tmp_path / "runs.jsonl"
    arguments = ["native", "--methods", "polygon", "--instances", "tiny-2-t4-one-site", "-o", str(tmp_path)]
    (task, *_) = sweep.tasks(suites.suite("native", []), sweep._parser().parse_args(arguments))
    line = json.dumps({**asdict(task), "commit": "0ld0ld0", "status": "bound"}) + "\n"
    record.write_text(line)
    monkeypatch.setattr(sweep, "sweep", lambda *args, **more: pytest.fail("run"))
    assert cli.run(sweep.main, [*arguments, "--keep"]) == cli.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"--keep: found runs of 0ld0ld0 in {record}, expected those of {best_known.commit()} alone")
    assert error.count("\n") == 1 and record.read_text() == line
    assert cli.run(sweep.main, ["ptafm", "--keep", "-o", str(tmp_path)]) == cli.EXIT_BAD_INPUT
    assert capsys.readouterr().err.startswith("--keep: found 'ptafm', expected the suite native")
    record.write_text(json.dumps({**asdict(task), "commit": best_known.commit()}) + "\n")
    sweep._require_of_today([task], record)
