"""Rules about where stages may lie, applied to allocations: what breaks a rule is left out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from polygon.domain.plan import Problem


class StageRules:
    """The stage rules of a problem as masks over worker classes.

    Parameters
    ----------
    class_regions : ndarray of int, shape (classes,)
        Region of each worker class.
    """

    def __init__(self, problem: Problem, class_regions: np.ndarray) -> None:
        cluster = problem.cluster
        self._classes = len(class_regions)
        self._masks: list[tuple[int, np.ndarray]] = []
        for rule in problem.constraints.rules:
            never = [cluster.region_index(name) for name in rule.never_regions]
            mask = ~np.isin(class_regions, never)
            if rule.only_regions:
                mask &= np.isin(class_regions, [cluster.region_index(name) for name in rule.only_regions])
            self._masks.append((rule.stage, mask))

    def __bool__(self) -> bool:
        return bool(self._masks)

    def allowed(self, stage: int, stages: int) -> np.ndarray:
        """Which classes may serve a stage of so many, shape (classes,)."""
        mask = np.ones(self._classes, dtype=bool)
        for at, allowed in self._masks:
            if at in (stage, stage - stages):
                mask &= allowed
        return mask

    def legal(self, workers: np.ndarray) -> np.ndarray:
        """The allocation without what the rules forbid, shape (stages, classes).

        A stage that is left without workers falls away; the rules then see those after it one place further on.
        """
        rows = [row for row in workers if row.any()]
        masked = rows
        while rows:
            masked = [np.where(self.allowed(s, len(rows)), row, 0) for s, row in enumerate(rows)]
            kept = [row for row, left in zip(rows, masked, strict=True) if left.any()]
            if len(kept) == len(rows):
                break
            rows = kept
        result = np.zeros_like(workers)
        if rows:
            result[: len(rows)] = masked
        return result

    def starts(self, workers: np.ndarray) -> Iterator[np.ndarray]:
        """Allocations like this one that keep the rules and lose little.

        Workers of stages that are pinned are brought to them from wherever they serve; a pinned stage may be added
        before the first or after the last.
        """
        ends = [stage for stage, _ in self._masks if stage in (0, -1)]
        rows = [row.copy() for row in workers if row.any()]
        if not rows:
            return
        yield self._gathered(rows, workers.shape)
        for end in ends:
            longer = [np.zeros_like(workers[0]), *rows] if end == 0 else [*rows, np.zeros_like(workers[0])]
            if len(longer) <= len(workers):
                yield self._gathered(longer, workers.shape)

    def _gathered(self, rows: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """Every worker in a stage where it may be: its own if it may, else shared out evenly to those that take it."""
        stages = len(rows)
        old = np.array(rows).reshape(stages, shape[1])
        allowed = np.array([self.allowed(s, stages) for s in range(stages)])
        new = np.where(allowed, old, 0)
        for c in np.flatnonzero((old * ~allowed).any(axis=0)):
            takers = np.flatnonzero(allowed[:, c])
            if len(takers):
                new[takers, c] += _shared(int(old[~allowed[:, c], c].sum()), len(takers))
        for s in np.flatnonzero(new.sum(axis=1) == 0):
            # A pinned stage without workers takes half of what may serve it.
            taken = np.where(allowed[s], new.sum(axis=0) // 2, 0)
            for c in np.flatnonzero(taken):
                left = taken[c]
                for t in np.argsort(-new[:, c]):
                    part = min(left, new[t, c])
                    new[t, c] -= part
                    left -= part
            new[s] += taken
        result = np.zeros(shape, dtype=np.int64)
        kept = new[new.any(axis=1)]
        result[: len(kept)] = kept
        return self.legal(result)


def _shared(count: int, parts: int) -> np.ndarray:
    """Whole numbers as equal as can be that sum to `count`."""
    return np.full(parts, count // parts) + (np.arange(parts) < count % parts)
