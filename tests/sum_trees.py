"""Trees over which regions sum, drawn for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polygon.domain.plan import SumTree


def equal_stars(regions: Sequence[int]) -> tuple[SumTree, ...]:
    """What a plan without trees does: every region adds up an equal part for all."""
    return tuple(SumTree(part=1 / len(regions), root=root) for root in regions)


def drawn_trees(rng: np.random.Generator, regions: Sequence[int], most: int = 4) -> tuple[SumTree, ...]:
    """Up to `most` trees of drawn parts, roots and relays."""
    parts = rng.dirichlet(np.ones(rng.integers(1, most + 1)))
    found = []
    for part in parts:
        root, *others = rng.permutation(regions).tolist()
        over = others[: rng.integers(0, len(others))]
        relays = [(region, over[rng.integers(len(over))]) for region in others[len(over) :] if over]
        found.append(
            SumTree(part=float(part), root=root, relays=tuple(sorted(r for r in relays if rng.random() < 0.7)))
        )
    return tuple(found)
