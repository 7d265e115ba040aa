"""The stages of an allocation as lists of worker classes, for the kernels of the search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from polygon.kernels import inner
from polygon.planning.bank import Bank


class Stages(NamedTuple):
    """Stages of an allocation by worker class, and by kind of class where the place does not matter.

    Arrays of shape (stages, most members); `members` and `kind_members` say how many entries of a row count.
    """

    classes: np.ndarray
    counts: np.ndarray
    members: np.ndarray
    seconds: np.ndarray
    """Per micro-batch, forward and backward."""
    kinds: np.ndarray
    kind_counts: np.ndarray
    kind_shards: np.ndarray
    """Over how many workers the smallest class of a kind can shard."""
    kind_members: np.ndarray
    kind_seconds: np.ndarray
    bounds: np.ndarray
    """(stages + 1,) the layer split."""
    options: np.ndarray
    """(stages,) memory options."""


@njit(cache=True, error_model="numpy")
def gather_stages(x: np.ndarray, classes: np.ndarray, counts: np.ndarray, members: np.ndarray) -> int:
    """Drop empty rows of an allocation; fills (stage, member) lists of classes and counts; returns the stages."""
    stages = 0
    for s in range(x.shape[0]):
        k = 0
        for c in range(x.shape[1]):
            if x[s, c] > 0:
                classes[stages, k] = c
                counts[stages, k] = x[s, c]
                k += 1
        if k:
            members[stages] = k
            stages += 1
    return stages


@inner
def merge_kinds(bank: Bank, stages: Stages) -> None:
    """Fill the arrays by kind from those by class."""
    for s in range(stages.members.shape[0]):
        k = 0
        for i in range(stages.members[s]):
            kind = bank.kind[stages.classes[s, i]]
            n = stages.counts[s, i]
            at = 0
            while at < k and stages.kinds[s, at] != kind:
                at += 1
            if at == k:
                stages.kinds[s, k], stages.kind_counts[s, k], stages.kind_shards[s, k] = kind, n, n
                k += 1
            else:
                stages.kind_counts[s, at] += n
                stages.kind_shards[s, at] = min(stages.kind_shards[s, at], n)
        stages.kind_members[s] = k
