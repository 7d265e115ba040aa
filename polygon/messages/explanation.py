"""Why this plan and not another, as plain data and in words.

`answers` has the plan's `bill`, the `measure` that it was made for (of `polygon.planning.objectives.MEASURES`), `why`
(`polygon.planning.alternatives`) and `what` (`polygon.planning.what_ifs`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from polygon.cost.money import unpowered, unpriced, whole_run
from polygon.domain.message import Message
from polygon.formats.convert import runtime_data
from polygon.messages.report import describe_run, describe_runtime, seconds, table, valued, written_out

BETTER = 0.995
"""An alternative with less than this part of what was to be least is called better."""

OF_MEASURE = {"time": "step", "money": "cost", "energy": "energy"}
"""In words."""

UNSAID = {"money": unpriced, "energy": unpowered}
"""Of what is measured: devices that count as nothing, because nobody said what they cost or draw."""


def unsaid(problem: Any, plan: Any, measure: Any) -> list[str]:
    """Devices of a plan that count as nothing in what is measured; a plan with none of them has the whole of it."""
    return UNSAID[measure.name](problem, plan) if measure.name in UNSAID and plan is not None else []


def better(problem: Any, answers: Any) -> Any:
    """The best alternative if it is better than the plan in what that was made for, else None."""
    value, every = answers.measure.value, (*answers.why.alternatives, *answers.why.different)
    possible = [a for a in every if a.bill is not None and not unsaid(problem, a.plan, answers.measure)]
    best = min(possible, key=lambda a: value(a.bill), default=None)
    return best if best is not None and value(best.bill) < BETTER * value(answers.bill) else None


def worse_by(problem: Any, plan: Any, answers: Any, alternative: Any) -> float | None:
    """How much more an alternative takes of what the plan was made for, as a part; None where nobody knows, or where it
    cannot be run."""
    if alternative.bill is None or any(unsaid(problem, x, answers.measure) for x in (plan, alternative.plan)):
        return None
    own = answers.measure.value(answers.bill)
    return float(answers.measure.value(alternative.bill) / own - 1) if own else None


def explanation_data(problem: Any, plan: Any, answers: Any, tokens: float | None = None) -> dict[str, Any]:
    """Everything as plain data, `worse_by` in what the plan was made for."""
    every = (*answers.why.alternatives, *answers.why.different)

    def row(alternative: Any) -> dict[str, Any]:
        bill = alternative.bill
        costs = {} if bill is None else {"step_s": bill.step_s, "usd": bill.usd, "energy_j": bill.energy_j}
        part = None if bill is None else bill.step_s / answers.bill.step_s - 1
        result = {"idea": alternative.idea, "naive": alternative.naive, "possible": bill is not None}
        worse = worse_by(problem, plan, answers, alternative)
        return {**result, **costs, "slower_by": part, "worse_by": worse, "reason": alternative.reason}

    plans = (plan, *(alternative.plan for alternative in every))
    data = {
        "objective": answers.measure.name,
        "unsaid": sorted({name for other in plans for name in unsaid(problem, other, answers.measure)}),
        "step_s": answers.bill.step_s,
        "usd": answers.bill.usd,
        "energy_j": answers.bill.energy_j,
        "usd_per_hour": answers.bill.usd_per_hour,
        "devices": plan.world_size,
        "alternatives": [row(a) for a in answers.why.alternatives],
        "different_plans": [row(a) for a in answers.why.different],
        "sensitivities": [asdict(s) for s in answers.what.rows],
        "searched_step_s": answers.what.baseline_s,
        "searched": answers.what.baseline,
        "left_out": [*answers.why.left_out],
        "changes_left_out": answers.what.left_out,
    }
    if tokens:
        data["run"] = asdict(whole_run(answers.bill, tokens))
    return data


def describe_explanation(problem: Any, plan: Any, answers: Any, tokens: float | None) -> str:
    """Everything in words."""
    base = answers.bill
    lines = [
        describe_runtime(runtime_data(problem.runtime)),
        f"plan          {seconds(base.step_s)} and {written_out(base.usd, 3)} USD per step, "
        f"{written_out(base.usd_per_hour)} USD per hour, {plan.world_size} of {problem.cluster.devices} devices, "
        f"{Message('variant.stages', stages=len(plan.stages))}",
    ]
    if tokens:
        lines.append(describe_run(whole_run(base, tokens)))

    def cells(alternative: Any) -> list[str]:
        idea, bill, variant = alternative.idea, alternative.bill, ""
        if idea.kind == "idea.at_best":
            idea, variant = idea["idea"], str(idea["variant"])
        if bill is None:
            return [str(idea), "no", "", str(alternative.reason)]
        worse = worse_by(problem, plan, answers, alternative)
        return [str(idea), "unknown" if worse is None else f"{worse:+.1%}", written_out(bill.usd, 3), variant]

    header = [OF_MEASURE[answers.measure.name], "USD", "at best, or why not"]
    for title, naive in (("naive plans", True), ("rejected ideas", False)):
        rows = [cells(a) for a in answers.why.alternatives if a.naive == naive]
        if rows:
            lines += ["", table([title, *header], rows)]
    if answers.why.different:
        rows = [cells(a)[:3] for a in answers.why.different]
        lines += ["", table(["clearly different plans", *header[:2]], rows)]
    if answers.what.rows:
        lines += ["", *_what_if(answers)]
    found = better(problem, answers)
    if found is not None:
        part = 1 - answers.measure.value(found.bill) / answers.measure.value(base)
        what = OF_MEASURE[answers.measure.name]
        lines += [
            "",
            f"A better plan was met on the way ({found.idea}: {part:.1%} less {what}): search longer, or use --better.",
        ]
    return "\n".join(lines)


def _what_if(answers: Any) -> list[str]:
    """Sensitivities, the largest first; what changes nothing in one line."""
    best_first = sorted(answers.what.rows, key=lambda s: (s.replanned, s.same_plan))
    felt = [s for s in best_first if min(s.replanned, s.same_plan) < -0.0005 or s.same_plan > 0.0005]
    rows = [[str(s.text), f"{s.same_plan:+.1%}", f"{s.replanned:+.1%}", f"{s.usd_per_hour:+.3g}"] for s in felt]
    lines = [table(["what if", "same plan", "replanned", "worth USD per hour"], rows)] if rows else []
    without = [str(s.text) for s in best_first if s not in felt]
    if without:
        lines.append(f"No change by: {', '.join(without)}.")
    if rows:
        lines.append("Replanned is by a short search: a longer one may save more.")
    searched, measure = answers.what.baseline, answers.measure
    if searched < BETTER * measure.value(answers.bill):
        against = valued(measure.name, searched)
        lines.append(f"Replanned is held against {against}, what the same search finds without any change.")
    return lines
