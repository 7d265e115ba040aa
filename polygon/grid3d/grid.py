"""All splits in parallel, best first; in processes here, or on a Dask or Ray cluster."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from polygon.domain.message import Message
from polygon.domain.uniform import ParallelConfig
from polygon.grid3d.grid_rows import FIELDS, KEYS, GridRow
from polygon.grid3d.splits import GridSplit
from polygon.grid3d.spread import spread

START_S = 5.0
"""Of a time limit: processes take as long to start, import and load what is compiled as one needs for a thousand
configurations and more."""
AWAITED = 8
"""Splits with priced configurations that are looked at however short the limit, as long as nothing fits."""
LOT = 16
"""Splits whose results Ray gives together under a time limit."""


class PricedSplits(Protocol):
    """A case that can price a split (and travel to another process)."""

    def rows(self, split: GridSplit) -> list[GridRow]:
        """Every configuration of the split."""


@dataclass(frozen=True, slots=True)
class GridResult:
    """Every configuration, the best first, rejected ones last."""

    rows: Sequence[GridRow]
    splits: int = 0
    """All of the grid, of which `looked_at` were priced or rejected."""
    looked_at: int = 0
    interrupted: bool = False
    """Whether an interrupt left splits out."""

    @property
    def complete(self) -> bool:
        """Whether no split was left out, by an interrupt or for lack of time."""
        return self.looked_at == self.splits

    @property
    def accepted(self) -> int:
        """Configurations that can be run."""
        return sum(not row.rejected for row in self.rows)

    def top(self, count: int) -> list[dict[str, Any]]:
        """The best configurations as plain data."""
        return [json.loads(row.line) for row in self.rows[:count] if not row.rejected]

    def write(self, path: str, head: dict[str, Any]) -> None:
        """Write the file: what was asked (`head`), then one configuration a line; the same result, the same bytes."""
        from polygon.formats import files

        head = {"format": "polygon-grid", **head, "accepted": self.accepted}
        if self.interrupted:
            head["interrupted"] = True
        if not self.complete:
            head |= {"splits": self.splits, "splits_looked_at": self.looked_at}
        text = json.dumps(head, ensure_ascii=False)[:-1]
        lines = ",\n".join(row.line for row in self.rows)
        files.write_text(path, f'{text}, "configurations": [\n{lines}\n]}}\n')

    def best(self) -> ParallelConfig | None:
        """The best configuration; None if all are rejected."""
        first = self.top(1)
        return parallel_config(first[0]) if first else None

    def why_none(self, devices: int) -> Message:
        """What to say where no configuration is accepted."""
        if not self.rows:
            return Message("reason.no_degrees", devices=devices)
        rejected = tuple(Message("reason.rejected_by", count=n, why=why) for why, n in self.reasons().items())
        why = Message("reason.no_configuration_fits", devices=devices, rejected=rejected)
        return why if self.complete else Message("reason.of_part", why=why, part=self.part())

    def part(self) -> Message:
        """How much of the grid was looked at."""
        return Message("grid.part", looked_at=self.looked_at, splits=self.splits)

    def reasons(self) -> dict[str, int]:
        """How many were rejected for what."""
        return dict(sorted(Counter(row.why for row in self.rows if row.rejected).items()))


def parallel_config(values: dict[str, Any]) -> ParallelConfig:
    """The configuration that a row describes."""
    known = {field.name for field in fields(ParallelConfig)}
    named = {FIELDS.get(key, key): values[key] for key in KEYS if key in values}
    return ParallelConfig(**{name: value for name, value in named.items() if name in known})


def spread_out(splits: Sequence[GridSplit]) -> list[GridSplit]:
    """The splits in an order in which the first few are of all kinds, from those that cut the model most.

    Of n splits every k-th in turn, k the whole number near n / 1.618 that has no divisor with n.
    """
    ordered = sorted(splits, key=lambda split: (-split.tp * split.pp, split))
    count = len(ordered)
    step = round(count / 1.618) or 1
    while math.gcd(step, count) > 1:
        step += 1
    return [ordered[i * step % count] for i in range(count)]


def evaluate_all(
    case: PricedSplits,
    splits: Sequence[GridSplit],
    *,
    jobs: int = -1,
    backend: str = "processes",
    scheduler: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> GridResult:
    """Price every split; the result does not depend on where or in which order, unless time ends first.

    Parameters
    ----------
    jobs, backend, scheduler
        Where, as `spread` takes it; here where processes would take what time is left to start.
    progress : callable
        Told how many splits are done.
    seconds_left : callable
        No split is awaited once it says 0 or less and a configuration fits, or none of a few splits has one that does.

    Returns
    -------
    Result
        All configurations; those priced so far after an interrupt, or where time ended.

    Raises
    ------
    InputError
        For a backend whose package is missing, or a scheduler that does not answer.
    """
    rows: list[GridRow] = []
    done, awaited, fits, interrupted = 0, AWAITED, False, False
    limited = math.isfinite(seconds_left())
    if backend == "processes" and seconds_left() < START_S:
        backend = "serial"
    priced = spread(
        case.rows, spread_out(splits), jobs=jobs, backend=backend, scheduler=scheduler, lot=LOT if limited else None
    )
    with warnings.catch_warnings(), contextlib.closing(priced) as results:
        # That work was cancelled, or a process replaced, changes no row.
        warnings.filterwarnings("ignore", "A worker stopped|.*tasks which were still being processed", UserWarning)
        try:
            for done, found in enumerate(results, start=1):
                rows += found
                progress(done)
                fits = fits or not all(row.rejected for row in found)
                awaited -= any(math.isfinite(row.step_s) for row in found)
                if seconds_left() <= 0 and (fits or awaited <= 0):
                    break
        except KeyboardInterrupt:
            interrupted = True
    return GridResult(sorted(rows), len(splits), done, interrupted)
