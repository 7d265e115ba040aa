"""Which regions a plan uses, and what being apart costs them: time that all wait, and time that some do not compute.

Let A be the regions of a plan's first stage and S all of its regions. Every micro-batch ends its backward in the first
stage, so nothing ends later than that stage does, and the step is longer than its last action by

- the longest latency of S (all agree on the gradient's norm; `polygon.cost.step_times.gradient_norm_s`), and
- where A is more than one region, the latency of the first stage's sum (`longest_way_s`), which nothing hides: over
  whatever trees (`polygon.domain.plan.SumTree`) everything goes to some region and from there to everyone.

A region outside of A gets its first micro-batch over links between regions, and sends the gradient of its last one back
over them: its devices are idle for the quickest way there and back at least. So of T seconds in which a step computes,
the devices of S have

    sum over S of capacity_r T  -  sum over S without A of capacity_r away_r(A).

Up to `ENUMERATED` regions every pair of sets is looked at. Of more, a set is known by one region of A: all others lie
within S's latency of it, and those of A within A's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polygon.cost.reduction import exchange_rounds

ENUMERATED = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Ways:
    """Links between regions as a step meets them, shape (regions, regions) each.

    Parameters
    ----------
    latency_s : ndarray
        One way.
    linked : ndarray of bool
    down_s, up_s : ndarray
        Seconds by which the activation of a micro-batch [source, target], and its gradient, take longer than the
        quickest message between any two workers; inf without a link.
    whole, trees : bool
        Whether regions may send whole gradients in one round (`exchange_rounds`), and sum over trees.
    """

    latency_s: np.ndarray
    linked: np.ndarray
    down_s: np.ndarray
    up_s: np.ndarray
    whole: bool
    trees: bool

    def of(self, used: np.ndarray) -> Ways:
        """The same between some regions alone, messages by the quickest way over these."""
        part = np.ix_(used, used)
        return Ways(
            latency_s=self.latency_s[part],
            linked=self.linked[part] & ~np.eye(len(used), dtype=bool),
            down_s=quickest(self.down_s[part]),
            up_s=quickest(self.up_s[part]),
            whole=self.whole,
            trees=self.trees,
        )

    def away_s(self, first: np.ndarray) -> np.ndarray:
        """There and back from the nearest of some regions (numbers), shape (regions,); 0 for these."""
        seconds: np.ndarray = self.down_s[first].min(axis=0) + self.up_s[:, first].min(axis=1)
        seconds[first] = 0.0
        return seconds

    @property
    def far_s(self) -> np.ndarray:
        """Latency between linked regions, the longer of both ways; 0 without a link."""
        found: np.ndarray = np.maximum(self.linked_s, self.linked_s.T)
        return found

    @property
    def linked_s(self) -> np.ndarray:
        """Latency of every link; 0 without one."""
        return np.where(self.linked, self.latency_s, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class RegionSets:
    """Pairs of sets (all regions, those of the first stage), or what is no worse than each; shape (pairs,) each.

    Parameters
    ----------
    agree_s, first_s : ndarray
        What all wait for the norm, and for the latency of the first stage's sum (0: in one region).
    capacity : ndarray
        Compute of all regions.
    away : ndarray
        Compute times seconds that those outside of the first stage are idle.
    same : ndarray of bool
        Whether all regions may be in the first stage.
    enumerated : bool
        Whether these are all sets, no neighbourhoods.
    """

    agree_s: np.ndarray
    first_s: np.ndarray
    capacity: np.ndarray
    away: np.ndarray
    same: np.ndarray
    enumerated: bool

    def some(self, which: np.ndarray) -> RegionSets:
        """Some of them."""
        return RegionSets(
            agree_s=self.agree_s[which],
            first_s=self.first_s[which],
            capacity=self.capacity[which],
            away=self.away[which],
            same=self.same[which],
            enumerated=self.enumerated,
        )

    @property
    def waits_s(self) -> np.ndarray:
        """What all wait."""
        found: np.ndarray = self.agree_s + self.first_s
        return found

    def most(self, time_s: float) -> float:
        """Most compute that any has in so much time in which it computes, over that time."""
        return float((self.capacity - self.away / time_s).max())

    def by_first(self, most: int) -> list[RegionSets]:
        """Those whose first stage is in one region, and the others, each in so many parts by what all wait."""
        parts = []
        for group in (np.flatnonzero(self.first_s == 0), np.flatnonzero(self.first_s > 0)):
            order = group[np.argsort(self.waits_s[group], kind="stable")]
            parts += [self.some(part) for part in np.array_split(order, min(most, len(order)) or 1) if len(part)]
        return parts

    def halves(self, least_s: float) -> list[RegionSets]:
        """Those that wait less and those that wait more than the middle of all waits; none where these differ by so
        little."""
        low_s, high_s = float(self.waits_s.min()), float(self.waits_s.max())
        less = self.waits_s <= 0.5 * (low_s + high_s)
        return [self.some(less), self.some(~less)] if high_s - low_s > least_s else []


def longest_way_s(latency_s: np.ndarray, members: np.ndarray, *, whole: bool, trees: bool) -> np.ndarray:
    """Longest latency of a sum over each of some sets of regions, as `polygon.cost.reduction.across_of` has it, or the
    least that it is over any trees.

    Parameters
    ----------
    latency_s : ndarray, shape (regions, regions)
        0 on the diagonal.
    members : ndarray of bool, shape (sets, regions)
    whole, trees : bool
        As in `exchange_rounds`, and whether three regions or more may sum over trees.

    Returns
    -------
    ndarray, shape (sets,)
        In one round of one link, in two of one that comes to a region and one that goes from there; over trees of the
        longest way to a root and the longest from there, each by way of one region at most, for the best root.
    """
    comes = np.where(members[:, :, None], latency_s, 0.0).max(axis=1)
    goes = np.where(members[:, None, :], latency_s, 0.0).max(axis=2)
    count = members.sum(axis=1)
    two = np.array([exchange_rounds(int(n), whole) == 2 for n in count], dtype=bool)
    found: np.ndarray = np.where(members, comes + two[:, None] * goes, 0.0).max(axis=1, initial=0.0)
    if trees and (over := np.flatnonzero(count > 2)).size:
        some = np.flatnonzero(members.any(axis=0))
        inside = members[np.ix_(over, some)]
        way_s = ways_within_s(latency_s[np.ix_(some, some)], inside)
        comes = np.where(inside[:, :, None], way_s, 0.0).max(axis=1)
        goes = np.where(inside[:, None, :], way_s, 0.0).max(axis=2)
        found[over] = np.minimum(found[over], np.where(inside, comes + goes, np.inf).min(axis=1))
    return found


def ways_within_s(latency_s: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Latency between regions straight or over one region of each of some sets, shape (sets, regions, regions); the
    parameters are those of `longest_way_s`."""
    found: np.ndarray = np.full((len(members), *latency_s.shape), np.inf)
    for relay in range(len(latency_s)):
        over = np.flatnonzero(members[:, relay])
        found[over] = np.minimum(found[over], latency_s[:, relay, None] + latency_s[None, relay, :])
    return found


def region_sets(capacity: np.ndarray, ways: Ways, *, least_s: float) -> RegionSets:
    """Sets of regions that a plan may use.

    Parameters
    ----------
    capacity : ndarray, shape (regions,)
        Compute of each region; 0 for one that must not be used.
    least_s : float
        No step is shorter.
    """
    used = np.flatnonzero(capacity > 0)
    if len(used) <= ENUMERATED:
        return _enumerated(capacity[used], ways.of(used))
    return _neighbourhoods(capacity[used], ways.of(used), least_s)


def _enumerated(capacity: np.ndarray, ways: Ways) -> RegionSets:
    n = len(capacity)
    member = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1 == 1
    spread_s, linked = np.zeros(len(member)), np.ones(len(member), dtype=bool)
    for a, b in zip(*np.triu_indices(n, 1), strict=True):
        both = member[:, a] & member[:, b]
        spread_s[both] = np.maximum(spread_s[both], ways.far_s[a, b])
        linked[both] &= ways.linked[a, b] and ways.linked[b, a]
    rows, sums_s = [], longest_way_s(ways.linked_s, member, whole=ways.whole, trees=ways.trees)
    for first in np.flatnonzero(linked & member.any(axis=1)):
        inside = np.flatnonzero(member[first])
        away_s = ways.away_s(inside)
        reached = np.isfinite(away_s)
        sets = np.flatnonzero(member[:, inside].all(axis=1) & ~member[:, ~reached].any(axis=1))
        away = np.where(reached, away_s, 0.0) * capacity
        rows.append((sets, np.full(len(sets), sums_s[first]), member[sets] @ away, sets == first))
    sets, first_s, away, same = (np.concatenate(column) for column in zip(*rows, strict=True))
    return RegionSets(
        agree_s=spread_s[sets],
        first_s=first_s,
        capacity=(member @ capacity)[sets],
        away=away,
        same=same,
        enumerated=True,
    )


def _neighbourhoods(capacity: np.ndarray, ways: Ways, least_s: float) -> RegionSets:
    """By a region a of the first stage and one that is as far from a as any other of that stage, which holds these two
    or others between as well; and by how far the regions of all lie from a.

    Not all of a neighbourhood need be used: what is away for longer than any step adds nothing, and takes nothing.
    """
    n, far_s, rows = len(capacity), ways.far_s, []
    joined = ways.linked & ways.linked.T
    for a in range(n):
        # Regions without a link do not agree by one; they may be as far as they like.
        order = np.argsort(np.where(np.arange(n) == a, -1.0, far_s[a]), kind="stable")
        spread_s = far_s[a, order]
        some = order[joined[a, order]]  # the farthest of the first stage, nearest first
        down_s, up_s = ways.down_s[some], ways.up_s.T[some]
        radius_s = far_s[a, some]
        # Of three regions and more the sum goes there and back, as its latency at least.
        sum_s = radius_s if exchange_rounds(3, ways.whole) == 1 else (ways.linked_s + ways.linked_s.T)[a, some]
        if ways.trees:
            # Over trees to the best root, and every set of three and more is known by that: straight or over another.
            near = joined[np.ix_(some, some)] & (radius_s[:, None] <= radius_s[None, :])
            there_s, back_s = (
                np.where(near, of[np.ix_(some, some)], np.inf) for of in (ways.linked_s, ways.linked_s.T)
            )
            there_s = (ways.linked_s[a, some, None] + there_s).min(axis=0, initial=np.inf)
            back_s = (ways.linked_s[some, a, None] + back_s).min(axis=0, initial=np.inf)
            sum_s = np.minimum(sum_s, there_s + back_s)
        from_s, to_s = np.minimum(down_s, ways.down_s[a]), np.minimum(up_s, ways.up_s[:, a])
        for radius, first_s, there_s, back_s in (
            (np.zeros(1), np.zeros(1), ways.down_s[a][None], ways.up_s[:, a][None]),
            (radius_s, radius_s, from_s, to_s),
            (
                radius_s,
                sum_s,
                np.minimum.accumulate(from_s, axis=0),
                np.minimum.accumulate(to_s, axis=0),
            ),
        ):
            away_s = (there_s + back_s)[:, order]
            reached = np.isfinite(away_s)
            held = np.cumsum(np.where(reached, capacity[order], 0.0), axis=1)
            idle = np.cumsum(np.where(reached, np.minimum(away_s, least_s), 0.0) * capacity[order], axis=1)
            # All of the first stage are among all.
            wide = spread_s[None, :] >= radius[:, None]
            same = spread_s[None, :] <= radius[:, None]
            agree_s, wait_s = np.broadcast_to(spread_s, wide.shape), np.broadcast_to(first_s[:, None], wide.shape)
            rows.append(tuple(column[wide] for column in (agree_s, wait_s, held, idle, same)))
    agree_s, first_s, held, idle, same = (np.concatenate(column) for column in zip(*rows, strict=True))
    return RegionSets(agree_s=agree_s, first_s=first_s, capacity=held, away=idle, same=same, enumerated=False)


def quickest(seconds: np.ndarray) -> np.ndarray:
    """Shortest ways between all (Floyd and Warshall)."""
    best = seconds.copy()
    np.fill_diagonal(best, 0.0)
    for k in range(len(best)):
        best = np.minimum(best, best[:, k, None] + best[None, k, :])
    return best
