"""What part of a step's work regions can do, given what may pass their borders.

Let x_l be the part of the micro-batches that compute layer l inside some regions U. From layer l to l + 1 at least
|x_(l+1) - x_l| of all micro-batches cross the border of U, each with an activation one way and its gradient the other.
A layer with 0 < x_l < 1 is held on both sides, so that its gradient passes the border, both ways, once a step or more
(`polygon.cost.reduction`). In T seconds the border carries

- a micro-batches out of each, as activations, and as gradients of activations back, and
- gradients of some layers, which are K of the work at most.

So where a >= 1, U may hold whole layers, as many as its memory does. Where a < 1, either some layer is not in U, and
all that are have x_l <= a, and are among the K; or every layer is, x_l >= 1 - a, and those with x_l < 1 are among them.
In the first case U does a K of the work or less, in the second 1 - a K or more, or any part if K = 1.

Regions are taken by themselves, and in groups of those whose links are the widest, and in groups of groups
(single linkage): a group does no more than its parts, nor more than its border lets it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

TOLERANCE = 1e-4
"""Relative precision."""
FOREVER_S = 1e30
"""In which everything passes that may pass; times any bandwidth it is a number still."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Borders:
    """Groups of regions, every region by itself first, each after its two parts; shape (groups,) unless said otherwise.

    Attributes
    ----------
    parts : ndarray of int, shape (groups - regions, 2)
        Of the groups after the regions.
    out, back : ndarray
        Bytes/s of messages over each border, out of it and into it.
    sums : ndarray
        Bytes/s of gradients, the narrower of both ways.
    memory_bytes : ndarray
        Of all devices.
    """

    parts: np.ndarray
    out: np.ndarray
    back: np.ndarray
    sums: np.ndarray
    memory_bytes: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """Layers as borders and memories meet them, shape (layers,) each.

    Attributes
    ----------
    work : ndarray
        Part of all work.
    gradient_bytes : ndarray
        Least that passes a border where both sides hold the layer.
    state_bytes : ndarray
        Least that a region holds of it.
    """

    work: np.ndarray
    gradient_bytes: np.ndarray
    state_bytes: np.ndarray

    def within(self, n_bytes: np.ndarray, each: np.ndarray) -> np.ndarray:
        """Most work of layers that have so many bytes together, of each so many; parts of a layer are allowed."""
        order = np.argsort(each / np.maximum(self.work, 1e-300), kind="stable")
        held, work = (np.concatenate([[0.0], np.cumsum(values[order])]) for values in (each, self.work))
        found: np.ndarray = np.interp(n_bytes, held, work / work[-1])
        return found


def borders(
    out: np.ndarray, sums: np.ndarray, egress: np.ndarray, cards: np.ndarray, memory_bytes: np.ndarray
) -> Borders:
    """The groups of some regions.

    Parameters
    ----------
    out, sums : ndarray, shape (regions, regions)
        Bytes/s from region to region in all, of messages and of gradients; 0 on the diagonal.
    egress, cards : ndarray, shape (regions,)
        Bytes/s that leave a region at most, and that its nodes send at most (messages).
    memory_bytes : ndarray, shape (regions,)
    """
    regions = len(egress)
    members = [np.arange(regions) == r for r in range(regions)]
    parts = np.zeros((0, 2), dtype=np.int64)
    if regions > 1:
        from scipy.cluster.hierarchy import linkage  # its import takes as long as that of all else here

        wide = np.minimum(out, out.T)
        rank = np.unique(-wide, return_inverse=True)[1].reshape(wide.shape).astype(float)
        parts = linkage(rank[np.triu_indices(regions, 1)], "single")[:, :2].astype(np.int64)
        for a, b in parts:
            members.append(members[a] | members[b])
    inside = np.array(members)

    def over(rates: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        leaves = [np.minimum(rates[group][:, ~group].sum(axis=1), most[group]).sum() for group in inside]
        enters = [np.minimum(rates[~group][:, group].sum(axis=1), most[~group]).sum() for group in inside]
        return np.array(leaves), np.array(enters)

    leaves, enters = over(out, np.minimum(egress, cards))
    return Borders(
        parts=parts,
        out=leaves,
        back=enters,
        sums=np.minimum(*over(sums, egress)),
        memory_bytes=inside @ memory_bytes,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RegionTraffic:
    """What all regions do together, for micro-batches of one size.

    Attributes
    ----------
    borders : Borders
    layers : Layers
    part : ndarray, shape (regions,)
        Part of all work that each region computes in a second.
    message_bytes : tuple of float
        Of all activations of a step between two layers, and of all their gradients; packed, the least.
    """

    borders: Borders
    layers: Layers
    part: np.ndarray
    message_bytes: tuple[float, float]

    def most(self, time_s: float) -> float:
        """Most of the work that is done in so much time."""
        of, (down, up) = self.borders, self.message_bytes
        least = min(down, up)
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = time_s * np.minimum(np.minimum(of.out, of.back) / least, (of.out + of.back) / (down + up))
        summed = self.layers.within(time_s * of.sums, self.layers.gradient_bytes)
        held = self.layers.within(of.memory_bytes, self.layers.state_bytes)
        some = np.where(crossing >= 1, held, crossing * np.minimum(summed, held))
        # What a group that holds every layer does at least.
        whole = np.where(summed >= 1, 0.0, 1 - crossing * summed)
        whole = np.where((held < 1) | (crossing >= 1), np.inf, whole)
        regions = len(self.part)
        done = np.minimum(np.append(time_s * self.part, np.zeros(len(of.parts))), 1.0)
        for group in range(len(done)):
            if group >= regions:
                a, b = of.parts[group - regions]
                done[group] = min(done[a] + done[b], 1.0)
            # All together have no border.
            if group < len(done) - 1 and done[group] < whole[group]:
                done[group] = min(done[group], some[group])
        return float(done[-1])

    @cached_property
    def least_s(self) -> float:
        """Least time in which all work is done (the lower end of what a bisection leaves); inf where none is enough."""
        low_s = high_s = 1 / float(self.part.sum())
        if len(self.part) == 1:
            return low_s
        if self.most(FOREVER_S) < 1 - TOLERANCE:  # what regions can hold is not all
            return math.inf
        while self.most(high_s) < 1 - TOLERANCE:
            low_s, high_s = high_s, 2 * high_s
        while high_s - low_s > TOLERANCE * low_s:
            middle_s = 0.5 * (low_s + high_s)
            low_s, high_s = (low_s, middle_s) if self.most(middle_s) >= 1 - TOLERANCE else (middle_s, high_s)
        return low_s
