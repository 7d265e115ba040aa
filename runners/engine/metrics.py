"""What the ranks measured in a step, put together: speed, MFU, bubble, exposed communication, traffic. No torch.

A rank that waits for a message waits first for its neighbour to finish (bubble), then for the message to arrive
(exposed communication); the time at which the neighbour handed it over, by the neighbour's own log, parts the two. At
the end of a step the wait until the last rank has done its last action is bubble, the rest of the wait for sums is
exposed communication; so it is with an outer step of local updates, until the last rank has come to it and after.
Clocks of different hosts are compared by the offset that each rank measured to rank 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from polygon.cost.compute import model_flops_per_step
from polygon.domain.plan import Plan, Problem
from polygon.domain.schedule import Action

PARTS = {
    "forward": ("forward",), "backward": ("backward",), "optimizer": ("update",),
    "communication": ("wait", "send", "exposed"),
}  # fmt: skip
"""A step by what its computing thread does: kinds of intervals in the log. Communication is what it waits for, late
neighbours included; sums that pass while it computes are not in it."""

VALIDATION = ("validation_loss", "validation_perplexity", "validation_accuracy", "validation_s")
"""Figures of the steps after which there was a validation; the same on all ranks, but for the seconds."""


def validation_figures(
    loss_sum: float, correct: float, targets: int, seconds: float, *, classified: bool, tokens: bool
) -> dict[str, float]:
    """What a validation found: mean loss, of tokens its exponential (perplexity), of classes the part that is right."""
    loss = loss_sum / max(1, targets)
    found = {"validation_loss": loss, "validation_s": seconds}
    if tokens:
        found["validation_perplexity"] = math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf
    return found | ({"validation_accuracy": correct / max(1, targets)} if classified else {})


class Waits(NamedTuple):
    """Seconds that a rank's computing thread stood still in a step, by reason."""

    bubble_s: float
    exposed_s: float


class StepFigures:
    """Merges the ranks' step lines of one run.

    Parameters
    ----------
    problem : Problem
    plan : Plan
    step_flops : float, optional
        FLOP of a step where the model is the user's own.
    """

    def __init__(self, problem: Problem, plan: Plan, step_flops: float | None = None) -> None:
        self.plan, pools = plan, problem.cluster.pools
        places = {
            plan.device_ranks[device]: pools[worker.pool]
            for stage in plan.stages
            for worker in stage.workers
            for device in worker.devices
        }
        self.region_of = {rank: pool.region for rank, pool in places.items()}
        self._names = [region.name for region in problem.cluster.regions]
        self._peak_flops = sum(pool.device.peak_flops(problem.batch.precision) for pool in places.values())
        self._step_flops = step_flops or model_flops_per_step(problem.model, problem.batch)

    def _sender(self, rank: int, action: str) -> int:
        """Who hands over the message that lets an action (F3, say) of a rank start."""
        needs = Action.named(action)
        assert needs is not None
        group, _, _ = self.plan.rank_places[rank]
        source = group + needs.chunk * self.plan.groups + (1 if needs.kind == "B" else -1)
        worker = self.plan.stages[source].workers[int(self.plan.routes[needs.micro_batch, source])]
        return self.plan.device_ranks[worker.devices[0]]

    def waits(self, lines: Sequence[Mapping[str, Any]]) -> list[Waits]:
        """Bubble and exposed communication of every rank, from the lines of all ranks in their order."""

        def at(rank: int, seconds: float) -> float:
            """A time of a rank's step by the clock of rank 0."""
            return lines[rank]["start_s"] + seconds - lines[rank]["clock_offset_s"]

        ends = [at(rank, line["schedule_end_s"]) for rank, line in enumerate(lines)]
        arrivals = [at(rank, line["outer_s"][0]) for rank, line in enumerate(lines)]
        found = []
        for rank, line in enumerate(lines):
            bubble_s = exposed_s = 0.0
            for action, (start_s, end_s) in line["waited_s"].items():
                sender = self._sender(rank, action)
                ready_s = at(sender, lines[sender]["handed_s"][action]) - at(rank, 0.0)
                turn_s = min(max(ready_s, start_s), end_s)
                bubble_s += turn_s - start_s
                exposed_s += end_s - turn_s
            # Between two outer steps of local updates the ranks of a region wait for one another only.
            together = [e for r, e in enumerate(ends) if line["together"] or self.region_of[r] == self.region_of[rank]]
            wait_s = line["reduced_s"] - line["schedule_end_s"]
            behind_s = min(wait_s, max(together) - ends[rank])
            # Outer steps of local updates come after the update.
            outer_s = line["outer_s"][1] - line["outer_s"][0]
            late_s = min(outer_s, max(arrivals) - arrivals[rank])
            found.append(Waits(bubble_s + behind_s + late_s, exposed_s + wait_s - behind_s + outer_s - late_s))
        return found

    def mfu(self, step_s: float) -> float:
        """The model's FLOP per second over the dense peak of the plan's devices.

        Counted are no recomputation and half of causal attention's square.
        """
        return self._step_flops / (step_s * self._peak_flops)

    def merge(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One line for a step of all ranks.

        Parameters
        ----------
        lines : sequence of mapping
            What every rank wrote about the step, in the order of ranks.

        Returns
        -------
        dict
            `bubble` and `exposed_communication` are parts of the step, the mean over ranks;
            `link_bytes` is by pair of regions and direction.
        """
        first = lines[0]
        waits = self.waits(lines)
        sent: dict[str, int] = {}
        across = 0
        for rank, line in enumerate(lines):
            for peer, n_bytes in line["sent_bytes"].items():
                source, target = self.region_of[rank], self.region_of[int(peer)]
                way = f"{self._names[source]} -> {self._names[target]}"
                sent[way] = sent.get(way, 0) + n_bytes
                across += n_bytes if source != target else 0
        kinds = sorted({kind for line in lines for kind in line["packing_error"]})
        kept = ("step", "loss", "gradient_norm", "seconds", "tokens_per_s", *VALIDATION)
        return {key: first[key] for key in kept if key in first} | {
            "model_flops_per_s": self._step_flops / first["seconds"],
            "mfu": self.mfu(first["seconds"]),
            "idle": _mean([line["idle"] for line in lines]),
            "bubble": _mean([wait.bubble_s / line["seconds"] for wait, line in zip(waits, lines, strict=True)]),
            "exposed_communication": _mean(
                [wait.exposed_s / line["seconds"] for wait, line in zip(waits, lines, strict=True)]
            ),
            "memory_bytes": max(line["memory_bytes"] for line in lines),
            "device_memory": {
                kind: max(line["device_memory"].get(kind, 0) for line in lines) for kind in lines[0]["device_memory"]
            },
            "seconds_by_part": {
                part: _mean([sum(line["seconds_by_kind"].get(kind, 0.0) for kind in kinds_of) for line in lines])
                for part, kinds_of in PARTS.items()
            },
            "packing_error": {kind: max(line["packing_error"].get(kind, 0.0) for line in lines) for kind in kinds},
            "link_bytes": dict(sorted(sent.items())),
            "cross_region_bytes": across,
        }


def flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Names and numbers of nested figures, `a/b` for b in a."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
