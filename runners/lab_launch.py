"""Train under a plan on the hosts of a lab: every rank in the network namespace of its device's node.

    python -m runners.lab_launch plan.json --steps 50

Builds the lab of the plan's cluster, runs all ranks in it, takes it down. Ranks are forked from a process that has
torch imported (as `runners.launch` does) and then moved to their hosts, so that eight of them start in a second.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from polygon.domain.errors import InputError, PolygonError
from runners.lab_net import linux

if __name__ == "__main__":  # the imports below start threads, and with threads nobody becomes root of a namespace
    try:
        linux.become_root()
    except InputError as refusal:
        sys.stderr.write(f"lab_launch: {refusal}\n")
        sys.exit(2)

from polygon.domain.plan import Plan, Problem
from runners.engine.arguments import options_from, read_run
from runners.engine.options import Options
from runners.lab_net.running import Lab
from runners.lab_net.topology import LabHost, lab_network
from runners.launch import Launcher, make_parser, run, say


@dataclass
class LabLauncher(Launcher):
    """A launcher whose ranks live on a lab's hosts."""

    lab: Lab | None = None

    def _host(self, number: int) -> LabHost:
        assert self.lab is not None
        device = next(device for device, rank in self.plan.device_ranks.items() if rank == number)
        return self.lab.network.host_of_device(device)

    def meeting_point(self) -> socket.socket:
        """A socket that listens on the host of rank 0."""
        assert self.lab is not None
        first = self._host(0)
        with self.lab.inside(first):
            return socket.create_server((first.address, 0))

    def settle(self, number: int) -> None:
        """Move a rank's process to its host."""
        assert self.lab is not None
        host = self._host(number)
        os.environ.update(self.lab.environment(host))
        self.lab.move_to(host)


def train_in_lab(lab: Lab, problem: Problem, plan: Plan, options: Options) -> dict[str, Any]:
    """Train on the hosts of a running lab and return the run's summary (`runners.engine.summary.summarise`).

    Raises
    ------
    InputError
        What is asked cannot be run.
    RuntimeError
        A rank failed (the talk on stderr names it).
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    code, summary = run(problem, plan, options, partial(LabLauncher, lab=lab))
    if code != 0:
        raise RuntimeError(f"the run ended with status {code}")
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code: 0 fine, 1 a rank failed, 2 bad input or no lab, 128 + n ended by signal n."""
    parser = make_parser()
    parser.prog, parser.description = "lab_launch", (__doc__ or "").splitlines()[0]
    arguments = parser.parse_args(argv)
    try:
        problem, plan = read_run(arguments)
        options = replace(options_from(arguments), device="cpu")
        with Lab(lab_network(problem.cluster, plan=plan), cluster_name=problem.cluster.name) as lab:
            say(f"{lab.name}: {len(lab.network.hosts)} hosts, {lab.backend}; {plan.world_size} ranks")
            code, summary = run(problem, plan, options, partial(LabLauncher, lab=lab))
    except linux.LabUnavailableError as error:
        say(f"lab_launch: {linux.unavailable(error)}")
        return 2
    except PolygonError as error:
        say(f"lab_launch: {error}")
        return 2 if isinstance(error, InputError) else 1
    if summary:
        from runners.engine.summary import print_summary

        print_summary(summary, as_json=arguments.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
