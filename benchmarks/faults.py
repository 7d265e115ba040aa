"""What happens when something breaks: each fault is really made in a rehearsal, timed, and its message printed.

    python benchmarks/faults.py plan.json [--ranks 4]

Needs a plan file; the full disk needs root (a small tmpfs) and is skipped without. Seconds are from the fault to the
message; of a damaged checkpoint and of ranks that do not match, from the start of the programs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Rehearsal:
    """A launched rehearsal, read line by line."""

    def __init__(self, plan: Path, ranks: int, folder: Path, *more: str) -> None:
        command = [sys.executable, str(ROOT / "runners" / "launch.py"), str(plan), "--rehearse"]
        command += ["--max-ranks", str(ranks), "--log-dir", str(folder / "log"), *more]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert self.process.stderr is not None
        self.lines: Iterator[str] = iter(self.process.stderr)

    def until(self, pattern: str) -> str:
        """The next line with the pattern."""
        return next((line.strip() for line in self.lines if re.search(pattern, line)), "(no message)")

    def ranks(self) -> list[int]:
        """Processes of the ranks."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return [int(text) for text in found.stdout.split()]

    def end(self) -> tuple[str, int]:
        """What the launcher says last, and its exit code."""
        last = "(nothing)"
        for line in self.lines:
            last = line.strip() if line.startswith("failed") else last
        return last, self.process.wait()


def lost_rank(number: signal.Signals) -> Callable[[Path, int, Path], tuple[float, str]]:
    """Signal a rank in the middle of training; seconds until all have ended."""

    def fault(plan: Path, ranks: int, folder: Path) -> tuple[float, str]:
        run = Rehearsal(plan, ranks, folder, "--steps", "100000")
        run.until(r"step +\d*[3-9] ")
        victims = run.ranks()
        start_s = time.monotonic()
        os.kill(victims[-1], number)
        message = run.until("lost rank|failed")
        noticed_s = time.monotonic() - start_s
        _, code = run.end()
        return noticed_s, f"exit {code}: {message}"

    return fault


def damaged_checkpoint(plan: Path, ranks: int, folder: Path) -> tuple[float, str]:
    """Change one byte of the newest checkpoint and resume."""
    saved = ["--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "2"]
    Rehearsal(plan, ranks, folder, "--steps", "4", *saved).end()
    file = next((folder / "saved" / "step-00000004").glob("blocks.*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    run = Rehearsal(plan, ranks, folder, "--steps", "5", "--resume", *saved)
    start_s = time.monotonic()
    # Two ranks say it, in any order: the one that found the damage, and rank 0.
    message = " | ".join(sorted(run.until("checkpoint not used|resumed") for _ in range(2)))
    _, code = run.end()
    return time.monotonic() - start_s, f"exit {code}: {message}"


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 200 kB."""
    place = folder / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def full_disk(plan: Path, ranks: int, folder: Path) -> tuple[float, str]:
    """Save to a disk that is too small."""
    if os.geteuid() != 0:
        return float("nan"), "skipped: needs root"
    with small_disk(folder) as disk:
        saved = ["--checkpoint-dir", str(disk), "--checkpoint-every", "2"]
        run = Rehearsal(plan, ranks, folder, "--steps", "4", *saved)
        run.until(r"step +1 ")
        start_s = time.monotonic()
        message = run.until("not written")
        seconds = time.monotonic() - start_s
        _, code = run.end()
    return seconds, f"exit {code}: {message}"


def refused(change: Callable[[Path, Path], tuple[Path, Path]]) -> Callable[[Path, int, Path], tuple[float, str]]:
    """Let the last of two ranks run something else; seconds until both have ended."""

    def fault(plan: Path, ranks: int, folder: Path) -> tuple[float, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        other_plan, other_root = change(plan, folder)
        start_s = time.monotonic()
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, str(root / "runners" / "dist_runner.py"), "--plan", str(file), "--rehearse"),
                    *("--max-ranks", "2", "--dist-url", f"tcp://127.0.0.1:{port}", "--world-size", "2"),
                    *("--rank", str(rank), "--steps", "2", "--log-dir", str(folder / "log")),
                ],
                stderr=subprocess.PIPE,
                text=True,
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            )
            for rank, (file, root) in enumerate(((plan, ROOT), (other_plan, other_root)))
        ]
        messages = [process.communicate()[1].strip() for process in processes]
        codes = [process.returncode for process in processes]
        return time.monotonic() - start_s, f"exit {codes}: {messages[0]}"

    return fault


def other_plan(plan: Path, folder: Path) -> tuple[Path, Path]:
    """The plan with another packing on its first link."""
    text = plan.read_text()
    changed = folder / "other.json"
    found = re.search(r'"activations": ?"(\w+)"', text)
    assert found is not None, "the plan packs no link"
    packing = "bf16" if found.group(1) != "bf16" else "int8"
    changed.write_text(text[: found.start(1)] + packing + text[found.end(1) :])
    return changed, ROOT


def other_program(plan: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of the program with one comment more."""
    root = folder / "program"
    for name in ("polygon", "runners", "comm", "solvers"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (root / "runners" / "engine" / "worker.py").open("a") as file:
        file.write("# changed\n")
    return plan, root


FAULTS: dict[str, Callable[[Path, int, Path], tuple[float, str]]] = {
    "killed rank (SIGKILL)": lost_rank(signal.SIGKILL),
    "hung rank (SIGSTOP)": lost_rank(signal.SIGSTOP),
    "damaged checkpoint": damaged_checkpoint,
    "full disk": full_disk,
    "rank with another plan": refused(other_plan),
    "rank with another program": refused(other_program),
}


def main() -> None:
    """Make every fault and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    for name, fault in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            seconds, message = fault(arguments.plan.resolve(), arguments.ranks, Path(folder))
        print(f"{name:26} {seconds:6.2f} s  {message}", flush=True)


if __name__ == "__main__":
    main()
