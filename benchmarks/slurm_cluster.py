"""Submits an exported plan to a real Slurm: a controller and four nodes on this machine, two kinds of them.

    apt-get install slurm-wlm            # as root, who runs the daemons
    python -m benchmarks.slurm_cluster

Two regions of two nodes become a heterogeneous job. It is submitted as the page says (docs/how-to/managed-hosts.md),
here with the small model of a rehearsal on processors; told to end in the middle (`scancel --signal=TERM`, which is
what the time limit sends), and submitted again. Prints what happened, and fails where a step of it did not: nobody
takes the batch script, a rank does not train, the signal loses steps, the second job begins anew. Slurm's names of
nodes are addresses of the loopback, so that ranks find one another.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel")
CLUSTER = """name: labs
regions:
  - name: berlin
    nodes: [{device: a100-40gb, count: 2, devices_per_node: 1}]
  - name: tokyo
    nodes: [{device: a10, count: 2, devices_per_node: 1}]
links:
  - {between: [berlin, tokyo], latency_ms: 2, bandwidth_gbps: 20}
"""
NODES = {"berlin": (2, 3), "tokyo": (4, 5)}
"""Last numbers of the loopback's addresses that are a partition's nodes."""
WAIT_S = 180.0


def configuration(folder: Path, host: str) -> str:
    """slurm.conf of daemons that keep all they have in a folder, with one GPU a node that is only said to be there."""
    lines = [
        "ClusterName=lab", f"SlurmctldHost={host}(127.0.0.1)", "SlurmctldPort=26817", "AuthType=auth/none",
        "CredType=cred/none", "SlurmUser=root", "SlurmdUser=root", f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n", f"SlurmctldPidFile={folder}/controller.pid",
        f"SlurmdPidFile={folder}/node-%n.pid", f"SlurmctldLogFile={folder}/controller.log",
        f"SlurmdLogFile={folder}/node-%n.log", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "SwitchType=switch/none", "MpiDefault=none",
        "GresTypes=gpu", "SlurmdParameters=config_overrides", "ReturnToService=2",
    ]  # fmt: skip
    for partition, numbers in NODES.items():
        for n in numbers:
            lines.append(f"NodeName=127.0.0.{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={26820 + n} CPUs=16 "
                         "Sockets=1 CoresPerSocket=16 Gres=gpu:1 State=UNKNOWN")  # fmt: skip
        names = ",".join(f"127.0.0.{n}" for n in numbers)
        lines.append(f"PartitionName={partition} Nodes={names} MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Slurm's daemons, for as long as the context lasts; SLURM_CONF names their configuration."""
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text(configuration(folder, os.uname().nodename))
    names = ",".join(f"127.0.0.{n}" for numbers in NODES.values() for n in numbers)
    (folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File=/dev/null\n")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    commands = [["slurmctld", "-D", "-c"]]
    commands += [["slurmd", "-D", "-N", f"127.0.0.{n}"] for numbers in NODES.values() for n in numbers]
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((folder / f"{command[-1]}.out").open("w"))
            daemon = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        wait_for(lambda: said("sinfo", "--noheader", "--format=%T").split() == ["idle"])
        yield


def said(*command: str, folder: Path | None = None) -> str:
    """What a program prints; what is wrong with it ends everything."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"slurm_cluster: {' '.join(command)}: exit {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def wait_for(holds: Callable[[], object]) -> None:
    """Wait until a function is true, at most `WAIT_S`."""
    end_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > end_s:
            raise SystemExit(f"slurm_cluster: found nothing after {WAIT_S:.0f} s of waiting")
        time.sleep(0.5)


def submitted(folder: Path, steps: int, *, until: str = "") -> str:
    """What a job printed that ran so many steps, or was told to end once a line of it begins so."""
    options = ["--rehearse", "--device", "cpu", "--checkpoint-dir", "saved", "--checkpoint-every", "100000", "--resume"]
    said("sbatch", "--test-only", "job.sbatch", folder=folder)
    number = re.findall(r"\d+", said("sbatch", "job.sbatch", "--steps", str(steps), *options, folder=folder))[-1]
    output = folder / f"slurm-{number}.out"
    if until:
        wait_for(lambda: output.exists() and re.search(f"^{until}", output.read_text(), re.MULTILINE))
        said("scancel", "--signal=TERM", number)
    wait_for(lambda: not said("squeue", "--noheader"))
    return output.read_text()


def steps_of(text: str) -> list[int]:
    """Numbers of the steps that a job printed."""
    return [int(number) for number in re.findall(r"^step +(\d+) ", text, re.MULTILINE)]


def main() -> int:
    """Plan, export, submit twice."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"slurm_cluster: found no {', '.join(missing)}, expected Slurm (apt-get install slurm-wlm)")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "comm")])
    os.environ["POLYGON_RUNNER"] = f"{sys.executable} {ROOT}/runners/dist_runner.py"
    polygon = [sys.executable, "-m", "polygon"]
    with tempfile.TemporaryDirectory(prefix="polygon-slurm-") as name, cluster(Path(name, "slurm")):
        folder = Path(name)
        (folder / "labs.yaml").write_text(CLUSTER)
        said(*polygon, "search", "--cluster", "labs.yaml", "--model", "gpt3-1.3b", "--global-batch", "64", "--seq-len",
             "512", "--effort", "quick", "-o", "plan.json", folder=folder)  # fmt: skip
        said(*polygon, "export", "plan.json", "--to", "slurm", "-o", "job", folder=folder)
        script = folder / "job" / "job.sbatch"
        text = re.sub(r"^##(SBATCH --partition=)FILL-IN(.* in (\w+) is)$", r"#\1\3\2", script.read_text(), flags=re.M)
        script.write_text(text)
        print(f"components: {text.count('#SBATCH hetjob') + 1}")
        first = submitted(folder / "job", 1_000_000, until="step +3 ")
        saved = max(int(path.name.rpartition("-")[2]) for path in (folder / "job" / "saved").iterdir())
        print(f"told to end: steps 0 to {steps_of(first)[-1]} ran, {saved} are saved")
        second = submitted(folder / "job", saved + 3)
        print(f"submitted again: steps {steps_of(second)[0]} to {steps_of(second)[-1]}")
        ended_well = steps_of(second) == [saved, saved + 1, saved + 2] and steps_of(first)[-1] == saved - 1
        print("no step was lost or done twice" if ended_well else f"not as it should be:\n{first}\n{second}")
    return 0 if ended_well else 1


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(main())
