"""What happens when hosts and links of a lab fail: `python benchmarks/lab_faults.py`.

Two regions of two hosts, 30 ms one way, 50 Mbit/s, a pipeline over the regions, one `dist_runner` on every host. Each
fault is made by the lab's means in the middle of training. Printed for every rank that is left: the seconds until it
said that a rank is lost; then what it said; then whether a restart resumes. Needs what the lab needs (root, say).
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "comm"))

from benchmarks.lab_baselines import NETWORK
from benchmarks.lab_prediction import BATCH, MODEL, cluster_of, plan_of
from polygon.domain.plan import Plan, Problem
from polygon.formats.files import write_plan
from runners.lab_net.running import Lab
from runners.lab_net.topology import LabHost, lab_network

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 120.0
"""For anything that is waited for, on a busy machine."""
FIRST_PORT = 29500


class Ranks:
    """A `dist_runner` on the host of every rank, read line by line."""

    def __init__(self, lab: Lab, plan_file: Path, plan: Plan, port: int, folder: Path, *more: str) -> None:
        self._lab, self._lines = lab, queue.Queue[tuple[float, int, str]]()
        places = sorted((rank, device) for device, rank in plan.device_ranks.items())
        self.hosts = [lab.network.host_of_device(device) for _, device in places]
        self.processes = [self._start(rank, plan_file, port, folder, more) for rank in range(len(places))]

    def _start(self, rank: int, plan_file: Path, port: int, folder: Path, more: tuple[str, ...]) -> Popen:
        words = [sys.executable, str(ROOT / "runners" / "dist_runner.py"), "--plan", str(plan_file)]
        words += ["--dist-url", f"tcp://{self.hosts[0].address}:{port}", "--world-size", str(len(self.hosts))]
        words += ["--rank", str(rank), "--device", "cpu", "--log-dir", str(folder / "log")]
        words += ["--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "2", "--steps", "100000", *more]
        process = self._lab.popen(self.hosts[rank], words, stderr=PIPE, stdout=DEVNULL, text=True)
        threading.Thread(target=self._read, args=(rank, process), daemon=True).start()
        return process

    def _read(self, rank: int, process: Popen) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._lines.put((time.monotonic(), rank, line.strip()))

    def until(self, pattern: str, ranks: set[int]) -> dict[int, tuple[float, str]]:
        """The first line with the pattern of each of these ranks, and when it came; what did not come is left out."""
        found: dict[int, tuple[float, str]] = {}
        deadline_s = time.monotonic() + PATIENCE_S
        while set(found) != ranks and time.monotonic() < deadline_s:
            try:
                when_s, rank, line = self._lines.get(timeout=1.0)
            except queue.Empty:
                continue
            if rank in ranks and re.search(pattern, line):
                found.setdefault(rank, (when_s, line))
        return found

    def end(self) -> None:
        """End all ranks."""
        self._lab.stop(self.processes)


def signalled(rank: int, number: signal.Signals) -> Callable[[Lab, Ranks], set[int]]:
    """A fault: a signal to a rank's process; gives the ranks that must notice."""

    def fault(lab: Lab, ranks: Ranks) -> set[int]:
        os.kill(ranks.processes[rank].pid, number)
        return set(range(len(ranks.hosts))) - {rank}

    return fault


def cut_off(region: int) -> Callable[[Lab, Ranks], set[int]]:
    """A fault: all links between a region and the others carry nothing more."""

    def fault(lab: Lab, ranks: Ranks) -> set[int]:
        lab.cut(hosts_in(lab, region))
        return set(range(len(ranks.hosts)))

    return fault


def hosts_in(lab: Lab, region: int) -> list[LabHost]:
    """Hosts of a region."""
    return [host for host in lab.network.hosts if host.region == region]


FAULTS: dict[str, Callable[[Lab, Ranks], set[int]]] = {
    "rank 3 killed (SIGKILL)": signalled(3, signal.SIGKILL),
    "rank 0 killed (SIGKILL)": signalled(0, signal.SIGKILL),
    "rank 3 stopped (SIGSTOP)": signalled(3, signal.SIGSTOP),
    "link between the regions cut": cut_off(1),
}


def try_fault(lab: Lab, name: str, plan_file: Path, plan: Plan, port: int) -> str:
    """Make a fault and restart; the table's row."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(lab, plan_file, plan, port, Path(folder))
        assert ranks.until(r"^step +[3-9] ", {0}), "training did not begin"
        start_s = time.monotonic()
        wanted = FAULTS[name](lab, ranks)
        heard = ranks.until("lost rank", wanted)
        ranks.end()
        lab.cut(hosts_in(lab, 1), connected=True)
        again = Ranks(lab, plan_file, plan, port + 1, Path(folder), "--resume")
        resumed = again.until("^resumed", {0})
        going = again.until("^step", {0})
        again.end()
    seconds = " ".join(f"{rank}: {heard[rank][0] - start_s:.1f}" if rank in heard else f"{rank}: -" for rank in wanted)
    messages = " / ".join(sorted({re.sub(r" \(noticed by.*", "", line) for _, line in heard.values()}))
    restart = f"{resumed[0][1]}, {' '.join(going[0][1].split()[:2])} follows" if resumed and going else "failed"
    return f"| {name} | {seconds} | {messages} | {restart} |"


def main() -> None:
    """Make every fault and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model, cluster = replace(MODEL, blocks=2), cluster_of(NETWORK)
    problem = Problem(cluster=cluster, model=model, batch=BATCH)
    middle = model.layers // 2
    layers = [(0, middle), (middle, model.layers)]
    plan = plan_of(cluster, layers, [[0, 1], [2, 3]], size=1, compression="int8", spans=2)
    print("| fault | seconds until each rank said so | what all said | restart |\n|---|---|---|---|", flush=True)
    with Lab(lab_network(cluster)) as lab, tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder) / "plan.json"
        write_plan(plan_file, problem, plan)
        for place, name in enumerate(FAULTS):
            print(try_fault(lab, name, plan_file, plan, FIRST_PORT + 2 * place), flush=True)


if __name__ == "__main__":
    main()
