"""Processor time of a new user's first commands, with no compiled kernel at hand, and of the same commands again.

    python benchmarks/cold_start.py [--kernels] [--python out/wheel/venv/bin/python]

`--python` takes another environment, as that in which `make wheel` installs the wheel alone. `--kernels` also prints
the kernels that took longest to compile, each without those that it calls.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "instances" / "ptafm-7dc.yaml"
WATCHED = """
import os, runpy, sys, time
from numba.core import event
class Watch(event.Listener):
    open = []
    def on_start(self, e):
        self.open.append([e.data["dispatcher"].py_func, time.process_time(), 0.0])
    def on_end(self, e):
        function, since_s, inner_s = self.open.pop()
        spent_s = time.process_time() - since_s
        if self.open:
            self.open[-1][2] += spent_s
        with open(os.environ["KERNEL_LOG"], "a") as file:
            print(spent_s - inner_s, f"{function.__module__}.{function.__name__}", file=file)
event.register("numba:compile", Watch())
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__")
"""
"""Runs a command, and notes the processor time of every compilation without those that it waits for."""


def spent_s() -> float:
    """Processor time of all child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run init and search twice with an empty cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="which kernels took longest")
    parser.add_argument("--python", metavar="PATH", help="of an environment with polygon; left out: this checkout")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        groups, log = f"{folder}/groups.json", Path(folder, "kernels.txt")
        asked = ("--model", "gpt3-1.3b", "--global-batch", "1024", "--seq-len", "2048")
        commands = (
            ("polygon.init", str(CLUSTER), *asked, "-o", groups),
            ("polygon.search", groups, "-o", f"{folder}/plan.json"),
        )
        environment = {
            **os.environ,
            "NUMBA_CACHE_DIR": f"{folder}/cache",
            "KERNEL_LOG": str(log),
        }
        if arguments.python is None:
            environment["PYTHONPATH"] = str(ROOT)
        else:
            environment.pop("PYTHONPATH", None)
        total_s = {"first": 0.0, "again": 0.0}
        for turn in total_s:
            for command in commands:
                before_s = spent_s()
                how = ("-c", WATCHED) if arguments.kernels else ("-m",)
                subprocess.run(
                    [Path(arguments.python or sys.executable).absolute(), *how, *command],
                    env=environment,
                    cwd=folder,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                used_s = spent_s() - before_s
                total_s[turn] += used_s
                print(f"{command[0]:15} {turn}  {used_s:5.1f} CPU s", flush=True)
        print(f"{'both':15} first  {total_s['first']:5.1f} CPU s, again {total_s['again']:.1f}")
        if arguments.kernels:
            by_name: dict[str, float] = defaultdict(float)
            for line in log.read_text().splitlines():
                seconds, name = line.split()
                by_name[name] += float(seconds)
            for name, kernel_s in sorted(by_name.items(), key=lambda item: -item[1])[:30]:
                print(f"{kernel_s:6.2f} CPU s  {name}")


if __name__ == "__main__":
    main()
