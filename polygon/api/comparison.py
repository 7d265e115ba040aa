"""Two plans side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from polygon.api.html import html_table
from polygon.messages.report import seconds, size, table, written_out

if TYPE_CHECKING:
    from polygon.api.plans import Plan


class Difference(NamedTuple):
    """One quantity of two plans."""

    quantity: str
    """What it is, with its unit in the name as in `Estimate`."""
    this: float
    other: float

    @property
    def ratio(self) -> float | None:
        """Other over this; None where this is 0."""
        return self.other / self.this if self.this else None


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """What another plan costs beside this one; `str` gives a table.

    Parameters
    ----------
    this, other : Plan
        Of the same model and batch; clusters, runtimes and constraints may differ.
    """

    this: Plan
    other: Plan

    @property
    def speedup(self) -> float:
        """Steps of the other in the time of one of this: above 1 the other is faster."""
        return self.this.evaluate().step_s / self.other.evaluate().step_s

    @property
    def is_clear(self) -> bool:
        """Whether the 90 % intervals of the two steps do not touch."""
        a, b = self.this.evaluate(), self.other.evaluate()
        return a.high_s < b.low_s or b.high_s < a.low_s

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Every quantity of the two estimates: step and its terms [s], money, energy, traffic, memory, size."""
        pairs = [dict(_quantities(plan)) for plan in (self.this, self.other)]
        names = list(dict.fromkeys([*pairs[0], *pairs[1]]))
        return tuple(Difference(name, pairs[0].get(name, 0.0), pairs[1].get(name, 0.0)) for name in names)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "speedup": self.speedup,
            "is_clear": self.is_clear,
            "differences": [row._asdict() | {"ratio": row.ratio} for row in self.differences],
        }

    def __str__(self) -> str:
        return table(_HEADER, self._cells())

    def __repr__(self) -> str:
        return f"Comparison({self.this!r}, {self.other!r}: speed-up {self.speedup:.3g})"

    def _repr_html_(self) -> str:
        return html_table(f"speed-up {self.speedup:.3g}", _HEADER, self._cells())

    def _cells(self) -> list[list[str]]:
        return [
            [row.quantity, *(_cell(row.quantity, value) for value in (row.this, row.other)), _ratio(row)]
            for row in self.differences
        ]


_HEADER = ["", "this", "other", "other / this"]


def _ratio(row: Difference) -> str:
    return "" if row.ratio is None else f"{row.ratio:.3g}"


def _quantities(plan: Plan) -> list[tuple[str, float]]:
    """What is compared, with the unit at the end of the name."""
    priced = plan.evaluate()
    rows = [("step_s", priced.step_s), ("low_s", priced.low_s), ("high_s", priced.high_s)]
    rows += [(f"{term}_s", value) for term, value in priced.terms.items()]
    rows += [("tokens_per_s", priced.tokens_per_s), ("mfu", priced.mfu), ("cost_usd", priced.cost_usd)]
    rows += [("energy_j", priced.energy_j), ("cross_region_bytes", priced.cross_region_bytes)]
    rows += [("fullest_memory", max(worker.peak_bytes / worker.limit_bytes for worker in priced.workers))]
    return [*rows, ("stages", plan.stages), ("devices", plan.devices)]


def _cell(quantity: str, value: float) -> str:
    """A value as people read it."""
    if quantity.endswith("_per_s"):
        return written_out(value)
    if quantity.endswith("_s"):
        return seconds(value)
    if quantity.endswith("_bytes"):
        return size(value)
    if quantity in ("mfu", "fullest_memory"):
        return f"{value:.1%}"
    return written_out(value)
