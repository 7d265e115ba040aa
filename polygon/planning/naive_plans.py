"""What one would do without a planner, each idea at its best variant.

An idea (data parallelism, a pipeline, one uniform split, ...) leaves much open: ZeRO, recomputation, micro-batch size,
tensor-parallel degree, packing. What is said of an idea is said of the best of all these: the rows of the grid that fit
the idea, best first by formula, become plans; the fastest of those are simulated exactly, their links packed, and
polished as the search's own plans are.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Stage
from polygon.grid3d.grid import GridResult, evaluate_all, parallel_config
from polygon.grid3d.grid_rows import case_of
from polygon.grid3d.splits import EVERYTHING, all_splits
from polygon.planning.checker import violations
from polygon.planning.decode import Decoder
from polygon.planning.grid_plans import plan_of
from polygon.planning.nearby import Outcome, allocation_of, checked, polished_outcome

TRIES = 16
"""Rows that are simulated exactly for an idea."""
PER_SPLIT = 3
"""Of these as many at most of one (dp, tp, pp, cp)."""
FINALISTS = 3
"""Plans whose packing is settled and which are polished."""

Row = dict[str, Any]


class NaivePlans:
    """The best variants of ideas, from one grid over all devices of a problem."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.problem, self.tables = decoder.problem, decoder.tables
        self._known: dict[str, Outcome] = {}

    @cached_property
    def grid(self) -> GridResult:
        """Uniform splits of all devices; none where regions lack links."""
        try:
            case, _ = case_of(self.problem, EVERYTHING)
        except InputError:
            return GridResult(())
        splits = list(all_splits(self.problem.cluster.devices, EVERYTHING.cp))
        return evaluate_all(case, splits, backend="serial")

    @cached_property
    def rows(self) -> list[Row]:
        """Those that memory holds and the program runs, fastest by formula first."""
        return self.grid.top(self.grid.accepted)

    @cached_property
    def not_run(self) -> list[Row]:
        """Those that the program does not run."""
        return [json.loads(row.line) for row in self.grid.rows if row.why == "runtime"]

    def best(self, idea: str, wanted: Callable[[Row], bool]) -> Outcome:
        """The best plan among the uniform splits that are wanted.

        Parameters
        ----------
        idea : str
            Its name: it is worked out once.
        wanted : callable
            Whether a row of the grid fits the idea.
        """
        if idea not in self._known:
            self._known[idea] = self._best(wanted)
        return self._known[idea]

    def _best(self, wanted: Callable[[Row], bool]) -> Outcome:
        measure = self.decoder.objective.value
        reason: Message | None = None
        drafts: list[tuple[float, int, Plan]] = []
        for plan in islice(self._likely(wanted), TRIES):
            outcome = checked(self.problem, plan, self.tables, self.decoder)
            if outcome.bill is None:
                reason = reason or outcome.reason
            else:
                drafts.append((measure(outcome.bill), len(drafts), plan))
        settled = []
        for value, i, draft in drafts:
            # Before they are compared: with unlike numbers of stages plans send unlike amounts, which packing shrinks.
            outcome = checked(self.problem, self.decoder.settled(draft), self.tables, self.decoder)
            if outcome.bill is None or measure(outcome.bill) > value:
                outcome = checked(self.problem, draft, self.tables, self.decoder)
            settled.append((measure(outcome.bill or self.decoder.bill(draft)), i, outcome))
        best = sorted(settled, key=lambda entry: entry[:2])[:FINALISTS]
        finalists = [polished_outcome(self.decoder, outcome) for _, _, outcome in best]
        if not finalists:
            return Outcome(reason=reason or self._why_none(wanted))
        return min(finalists, key=lambda outcome: measure(outcome.bill) if outcome.bill else math.inf)

    def _why_none(self, wanted: Callable[[Row], bool]) -> Message:
        """Why there is no plan that breaks no rule."""
        if any(wanted(row) for row in self.not_run):
            return Message("reason.not_run", runtime=self.problem.runtime.name)
        return Message("reason.no_such_plan")

    def _likely(self, wanted: Callable[[Row], bool]) -> Iterator[Plan]:
        """Plans of the wanted rows that break no rule, few of one split."""
        seen = Counter[tuple[int, ...]]()
        for row in self.rows:
            split = tuple(row[name] for name in ("dp", "tp", "pp", "cp"))
            if seen[split] < PER_SPLIT and wanted(row):
                try:
                    plan = plan_of(self.problem, parallel_config(row))
                except InputError:  # the levelled pool of the grid has room for workers that the real nodes have not
                    continue
                if not violations(self.problem, plan, self.tables):
                    if not seen[split] and len(self.problem.cluster.pools) == 1:
                        yield from self._decoded(plan)
                    seen[split] += 1
                    yield plan

    def _decoded(self, plan: Plan) -> Iterator[Plan]:
        """What the decoder makes of who serves which stage: layers cut and blocks recomputed as memory asks for."""
        decoded = self.decoder.decode(allocation_of(self.decoder, plan))
        if isinstance(decoded, Plan):
            yield decoded


def memory_variants(plan: Plan) -> Iterator[Plan]:
    """The plan, and what it becomes under every ZeRO stage and recomputation, the same in all its stages."""
    yield plan
    for zero in (0, 1, 2, 3):
        for recompute in ("none", "selective", "full"):
            stages: tuple[Stage, ...] = tuple(
                replace(stage, zero=zero if stage.members > 1 else 0, recompute=recompute, recompute_blocks=None)
                for stage in plan.stages
            )
            yield replace(plan, stages=stages)


def variant(plan: Plan) -> Message:
    """In words how a plan carries out its idea: stages, degrees, memory options, micro-batches, packing."""
    stages = plan.stages
    parts: list[Message] = []
    if plan.groups > 1:
        parts.append(Message("variant.stages", stages=plan.groups))
    if plan.chunks > 1:
        parts.append(Message("variant.chunks", chunks=plan.chunks))
    degrees = {"tp": {w.tp for w in plan.workers}, "cp": {w.cp for w in plan.workers}, "ep": {s.ep for s in stages}}
    for name, values in degrees.items():
        if values != {1}:
            parts.append(Message("variant.degree", name=name, values=_span(values)))
    parts.append(Message("variant.zero", values=_span({stage.zero for stage in stages})))
    for mode in ("full", "selective"):
        if any(stage.recompute == mode for stage in stages):
            whole = all(stage.recompute == mode and stage.recompute_blocks is None for stage in stages)
            parts.append(Message("variant.recompute" if whole else "variant.recompute_partly", mode=mode))
    parts.append(Message("variant.micro_batch", size=plan.micro_batch_size))
    packed = {getattr(use, name) for use in plan.links for name in plan.packings} - {"none"}
    if packed:
        parts.append(Message("variant.packed", modes=tuple(sorted(packed))))
    if plan.local_steps > 1:
        parts.append(Message("variant.local_steps", steps=plan.local_steps))
    return Message("variant", parts=tuple(parts))


def _span(values: set[int]) -> str:
    """One number, or the least and the most."""
    return str(min(values)) if len(values) == 1 else f"{min(values)} to {max(values)}"
