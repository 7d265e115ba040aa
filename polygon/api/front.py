"""Plans between the fastest and the cheapest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polygon.api.html import html_table
from polygon.cost.money import Bill
from polygon.domain.message import Message
from polygon.domain.plan import Problem
from polygon.messages.report import seconds, written_out
from polygon.planning.frontier import Collection
from polygon.planning.objectives import STEP_TIME, over_limits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polygon.api.plans import Plan


def nearest_bill(problem: Problem, met: Collection) -> Bill | None:
    """Of all that a search met, the best, or what exceeds the limits least."""
    return met.best(problem, STEP_TIME)[0] if met.bills else None


def why_none(problem: Problem, met: Collection) -> Message | None:
    """Why a front is empty: what the search says, or what the nearest of all that it met exceeds."""
    nearest = nearest_bill(problem, met)
    if met.reason is not None or nearest is None:
        return met.reason
    return Message("reason.none_found_within_limits", over=over_limits(problem, nearest))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Front:
    """Plans of which none is beaten by another in time and money (and energy), fastest first; empty where none fits."""

    plans: tuple[Plan, ...]
    bills: tuple[Bill, ...]
    """Of each plan: ``step_s``, ``usd``, ``energy_j``, ``usd_per_hour``, ``tokens_per_usd``."""
    with_energy: bool = False
    interrupted: bool = False
    reason: Message | None = None
    """Why there is none; `str` puts it into words."""
    over: Bill | None = None
    """Without a plan within the limits: the bill of the nearest, if the search met any."""
    evaluations: int = 0
    seconds: float = 0.0
    """That the search took."""
    title: str = field(default="", repr=False)

    def plot(self) -> Figure:
        """Picture of time against money, with energy as the colour where it was weighed (needs matplotlib)."""
        from polygon.api.plots import plot_front

        energy_j = [bill.energy_j for bill in self.bills] if self.with_energy else []
        return plot_front([b.usd for b in self.bills], [b.step_s for b in self.bills], self.title, energy_j)

    def __len__(self) -> int:
        return len(self.plans)

    def __repr__(self) -> str:
        return f"Front({len(self)} plans)"

    def _repr_html_(self) -> str:
        header = ["step", "USD per step", "USD per hour", "stages", "devices"]
        rows = [
            [
                seconds(bill.step_s),
                written_out(bill.usd),
                written_out(bill.usd_per_hour),
                str(plan.stages),
                str(plan.devices),
            ]
            for plan, bill in zip(self.plans, self.bills, strict=True)
        ]
        return html_table(f"{self!r}: {self.title}", header, rows)
