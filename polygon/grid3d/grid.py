"""All splits in parallel, best first; in processes here, or on a Dask or Ray cluster."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from polygon.domain.message import Message
from polygon.domain.uniform import ParallelConfig
from polygon.grid3d.grid_rows import FIELDS, KEYS, GridRow
from polygon.grid3d.splits import GridSplit
from polygon.grid3d.spread import spread


class PricedSplits(Protocol):
    """A case that can price a split (and travel to another process)."""

    def rows(self, split: GridSplit) -> list[GridRow]:
        """Every configuration of the split."""


@dataclass(frozen=True, slots=True)
class GridResult:
    """Every configuration, the best first, rejected ones last."""

    rows: Sequence[GridRow]
    interrupted: bool = False
    """Whether an interrupt left splits out."""

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
        return Message("reason.no_configuration_fits", devices=devices, rejected=rejected)

    def reasons(self) -> dict[str, int]:
        """How many were rejected for what (the words before the first colon or number)."""
        counts: dict[str, int] = {}
        for row in self.rows:
            if row.rejected:
                words = json.loads(row.line)["rejected"].split()
                kind = words[0].rstrip(":")
                counts[kind] = counts.get(kind, 0) + 1
        return dict(sorted(counts.items()))


def parallel_config(values: dict[str, Any]) -> ParallelConfig:
    """The configuration that a row describes."""
    known = {field.name for field in fields(ParallelConfig)}
    named = {FIELDS.get(key, key): values[key] for key in KEYS if key in values}
    return ParallelConfig(**{name: value for name, value in named.items() if name in known})


def evaluate_all(
    case: PricedSplits,
    splits: Sequence[GridSplit],
    *,
    jobs: int = -1,
    backend: str = "processes",
    scheduler: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> GridResult:
    """Price every split; the result does not depend on where or in which order.

    Parameters
    ----------
    jobs, backend, scheduler
        Where, as `spread` takes it.
    progress : callable
        Told how many splits are done.

    Returns
    -------
    Result
        All configurations; those priced so far after an interrupt.

    Raises
    ------
    InputError
        For a backend whose package is missing, or a scheduler that does not answer.
    """
    rows: list[GridRow] = []
    interrupted = False
    priced = spread(case.rows, splits, jobs=jobs, backend=backend, scheduler=scheduler)
    with contextlib.closing(priced) as results:
        try:
            for done, found in enumerate(results, start=1):
                rows += found
                progress(done)
        except KeyboardInterrupt:
            interrupted = True
    return GridResult(sorted(rows), interrupted)
