"""Every command line that README and the pages show is one that its program takes."""

import subprocess
import sys

import pytest

from tests.docs.command_lines import PAGES, ROOT, command_lines, fault_of

LINES = sorted(
    {(line, short, page.relative_to(ROOT).as_posix()) for page in PAGES for line, short in command_lines(page)}
)


def test_they_are_found():
    """In blocks of any kind, indented, and in the text."""
    for line in (
        "python -m runners.launch plan.json --rehearse --max-ranks 8",
        "python -m runners.lab --change tokyo-0 all connected=no",
        "polygon calibrate LOG_DIR... -o cluster.calibration.json",
        "python -m benchmarks.lab_prediction --drawn 20",
    ):
        assert line in {found for found, *_ in LINES}, line
    assert len(LINES) > 150


@pytest.mark.parametrize("page", sorted({page for *_, page in LINES}))
def test_programs_take_them(page):
    """Names of programs and targets, options, choices, numbers and shipped files, by the programs' own parsers."""
    faults = {line: fault_of(line, shortened=short) for line, short, of in LINES if of == page}
    assert {line: fault for line, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("make everything", "no target of"),
        ("polygon serch plan.json", "None"),
        ("polygon search --cluster instances/nowhere.yaml", "found no instances/nowhere.yaml"),
        ("polygon search groups.json --objective speed", "exit 2: polygon search: argument --objective"),
        ("python -m runners.launch plan.json --rehearsal", "--rehearsal"),
        ("python benchmarks/search_time.py --plots x.png", "--plots"),
        ("polygon overhead analysis --dp 2", "the following arguments are required"),
    ],
)
def test_what_is_not_taken_is_told(line, said):
    """Targets, commands, files, choices and options that are not there."""
    assert said in str(fault_of(line))
    assert (fault_of(line, shortened=True) is None) == (said == "the following arguments are required")


@pytest.mark.parametrize(
    "name", [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text("utf-8")]
)
def test_benchmarks_read_their_options_before_they_work(name):
    """Whoever asks for help does not start an hour of work, and no option goes unread."""
    assert ".parse_args(" in (ROOT / "benchmarks" / f"{name}.py").read_text("utf-8")


def test_a_benchmark_without_options_has_help_and_refuses_others():
    """What it does is told, and nothing done."""
    command = [sys.executable, "-m", "benchmarks.native_instances"]
    helped = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert helped.returncode == 0 and "Write the native benchmark's problems" in helped.stdout
    refused = subprocess.run([*command, "--seed", "1"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and "unrecognized arguments: --seed 1" in refused.stderr
