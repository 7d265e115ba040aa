"""The nodes that every stage of an allocation is on, and what stages on the same nodes wait for one another.

Kernels of the search: the devices are dealt out as `polygon.planning.device_assignment` does for the plan itself, and
links that reductions share are priced as in `polygon.cost.shared_links`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.cost.reduction import find_turns, pairs_at_once, part_of_pair
from polygon.jit.by_pointer import gives_pointed
from polygon.jit.compilation import inner
from polygon.planning.device_assignment import Dealing, deal, dealing_for, dealt_as
from polygon.planning.problem_arrays import Bank
from polygon.planning.stage_lists import Stages

NONE = -1


class Hosts(NamedTuple):
    """Entries: one for every node of every stage, and room for what passes there.

    Lists are chained by entry numbers, -1 ends them.
    """

    dealing: Dealing
    at: np.ndarray
    """(rows,) how far the classes of a stage have been dealt."""
    member: np.ndarray
    """(groups of a pool,) place of a group in its stage's list of classes."""
    member_nodes: np.ndarray
    member_most: np.ndarray
    """(rows, classes) nodes of a stage's class, and the most of its workers on one."""
    first: np.ndarray
    last: np.ndarray
    """(rows, regions) ends of a stage's list of entries in a region."""
    lowest: np.ndarray
    load: np.ndarray
    """(nodes,) the entry of the first stage on a node, and messages that leave it."""
    node: np.ndarray
    stage: np.ndarray
    pool: np.ndarray
    workers: np.ndarray
    rate: np.ndarray
    """(entries,) micro-batches per second."""
    busiest: np.ndarray
    """(rows, regions) the highest of these rates."""
    following: np.ndarray
    """(entries,) the next of the same stage and region."""
    above: np.ndarray
    """(entries,) that of the next stage on the same node."""
    turns: np.ndarray
    """(rows, regions) in which a region deals out what it adds up for a stage (`turns_of_region`)."""
    places: np.ndarray
    leaders: np.ndarray
    """(rows, regions) how many places a stage sums in (`polygon.cost.stage_reduction.Places`), and nodes of each."""
    all_places: np.ndarray
    """(rows,) of them in all regions."""
    end_s: np.ndarray
    tail_s: np.ndarray
    """(entries,) of the card looked at: when those that have used it end, and what the one of them with most to do has
    left to do."""


@gives_pointed
def hosts_for(bank: Bank, rows: int) -> Hosts:
    """Room for allocations of so many rows."""
    classes, regions = len(bank.pool), len(bank.stands)
    degrees = int(np.bincount(bank.pool).max())
    nodes = int((bank.first_node + bank.nodes).max())
    entries = rows * classes + int(bank.nodes.sum())
    return Hosts(
        dealing=dealing_for(rows * degrees, int(bank.nodes.max()), degrees),
        at=np.zeros(rows, dtype=np.int64),
        member=np.zeros(rows * degrees, dtype=np.int64),
        member_nodes=np.zeros((rows, classes), dtype=np.int64),
        member_most=np.zeros((rows, classes), dtype=np.int64),
        first=np.zeros((rows, regions), dtype=np.int64),
        last=np.zeros((rows, regions), dtype=np.int64),
        lowest=np.zeros(nodes, dtype=np.int64),
        load=np.zeros(nodes),
        node=np.zeros(entries, dtype=np.int64),
        stage=np.zeros(entries, dtype=np.int64),
        pool=np.zeros(entries, dtype=np.int64),
        workers=np.zeros(entries, dtype=np.int64),
        rate=np.zeros(entries),
        busiest=np.zeros((rows, regions)),
        following=np.zeros(entries, dtype=np.int64),
        above=np.zeros(entries, dtype=np.int64),
        turns=np.ones((rows, regions), dtype=np.int64),
        places=np.zeros((rows, regions), dtype=np.int64),
        leaders=np.zeros((rows, regions), dtype=np.int64),
        all_places=np.zeros(rows, dtype=np.int64),
        end_s=np.zeros(entries),
        tail_s=np.zeros(entries),
    )


@inner
def find_hosts(bank: Bank, stages: Stages, n: int, nodes: np.ndarray, hosts: Hosts) -> bool:
    """Deal out the devices of the first n stages; whether any node serves several of them.

    Parameters
    ----------
    nodes : ndarray of int64, shape (rows, regions)
        Out: on how many nodes of a region a stage is.
    """
    room, at = hosts.dealing, hosts.at
    for s in range(n):
        at[s] = 0
        for r in range(nodes.shape[1]):
            nodes[s, r], hosts.first[s, r], hosts.busiest[s, r] = 0, NONE, 0.0
    entries, several = 0, False
    while True:
        p = NONE
        for s in range(n):
            if at[s] < stages.members[s]:
                q = bank.pool[stages.classes[s, at[s]]]
                if p == NONE or q < p:
                    p = q
        if p == NONE:
            return several
        groups, kind = 0, 0
        for place in range(n):
            s = dealt_as(place, n, bank.tied_values > 0)
            while at[s] < stages.members[s] and bank.pool[stages.classes[s, at[s]]] == p:
                kind = stages.classes[s, at[s]]
                j = groups
                while j > 0 and room.tp[j - 1] < bank.tp[kind] * bank.cp:
                    room.tp[j], room.stage[j], room.width[j] = room.tp[j - 1], room.stage[j - 1], room.width[j - 1]
                    hosts.member[j] = hosts.member[j - 1]
                    j -= 1
                room.tp[j], room.stage[j], room.width[j] = bank.tp[kind] * bank.cp, s, stages.counts[s, at[s]]
                hosts.member[j] = at[s]
                hosts.member_nodes[s, at[s]], hosts.member_most[s, at[s]] = 0, 0
                groups += 1
                at[s] += 1
        per_node, first_node = bank.devices_per_node[kind], bank.first_node[kind]
        for node in range(first_node, first_node + bank.nodes[kind]):
            hosts.lowest[node] = NONE
        for k in range(deal(room, groups, bank.nodes[kind] * per_node, per_node)):
            g = room.group[k]
            s, i, tp = room.stage[g], hosts.member[g], room.tp[g]
            device, left = room.first[k], room.workers[k]
            while left > 0:
                here = min(left, (per_node - device % per_node + tp - 1) // tp)
                e, r = _enter(hosts, first_node + device // per_node, s, entries), bank.region[kind]
                if e == entries:
                    hosts.pool[e], hosts.workers[e], hosts.rate[e], hosts.following[e] = p, 0, 0.0, NONE
                    if hosts.first[s, r] == NONE:
                        hosts.first[s, r] = e
                    else:
                        hosts.following[hosts.last[s, r]] = e
                    hosts.last[s, r] = e
                    nodes[s, r] += 1
                    hosts.member_nodes[s, i] += 1
                    several = several or hosts.above[e] != NONE or hosts.lowest[hosts.node[e]] != e
                    entries += 1
                hosts.workers[e] += here
                hosts.rate[e] += here / stages.seconds[s, i]
                hosts.busiest[s, r] = max(hosts.busiest[s, r], hosts.rate[e])
                hosts.member_most[s, i] = max(hosts.member_most[s, i], hosts.workers[e])
                device += here * tp
                left -= here


@inner
def _enter(hosts: Hosts, node: int, s: int, entry: int) -> int:
    """The entry of stage s on a node: the one that is there, or a new one in its place among the node's stages."""
    below, e = NONE, hosts.lowest[node]
    while e != NONE and hosts.stage[e] < s:
        below, e = e, hosts.above[e]
    if e != NONE and hosts.stage[e] == s:
        return int(e)
    hosts.node[entry], hosts.stage[entry], hosts.above[entry] = node, s, e
    if below == NONE:
        hosts.lowest[node] = entry
    else:
        hosts.above[below] = entry
    return entry


@inner
def beside(hosts: Hosts, e: int, t: int) -> int:
    """The entry of stage t on the node of entry e, -1 if it is not there."""
    other = hosts.lowest[hosts.node[e]]
    while other != NONE and hosts.stage[other] != t:
        other = hosts.above[other]
    return int(other)


@inner
def common_nodes(hosts: Hosts, s: int, t: int, region: int) -> int:
    """On how many nodes of a region both stages are."""
    count, e = 0, hosts.first[s, region]
    while e != NONE:
        if beside(hosts, e, t) != NONE:
            count += 1
        e = hosts.following[e]
    return count


@inner
def least_on_node(hosts: Hosts, s: int, region: int) -> int:
    """The fewest workers that a stage has on a node of a region on which it is."""
    e = hosts.first[s, region]
    least = hosts.workers[e]
    while e != NONE:
        least = min(least, hosts.workers[e])
        e = hosts.following[e]
    return int(least)


@inner
def near_part(hosts: Hosts, s: int, t: int, region: int, workers: np.ndarray) -> float:
    """Part of the messages between two stages in a region that stay on their node, if partners meet by chance.

    `workers`, shape (rows, regions), are those of a stage in a region.
    """
    part, e = 0.0, hosts.first[s, region]
    while e != NONE:
        other = beside(hosts, e, t)
        if other != NONE:
            part += hosts.workers[e] / workers[s, region] * hosts.workers[other] / workers[t, region]
        e = hosts.following[e]
    return part


@inner
def find_crowds(hosts: Hosts, n: int, nodes: np.ndarray, leaving: np.ndarray, crowd: np.ndarray) -> None:
    """How many times more messages leave the nodes of a stage than are its own, the mean over its nodes in a region.

    Parameters
    ----------
    nodes : ndarray, shape (rows, regions)
        As `find_hosts` fills it.
    leaving : ndarray, shape (rows, regions)
        Messages of every stage that leave its nodes.
    crowd : ndarray, shape (rows, regions)
        Out.
    """
    for turn in range(3):
        for s in range(n):
            for r in range(nodes.shape[1]):
                own = leaving[s, r] / max(1, nodes[s, r])
                total, e = 0.0, hosts.first[s, r]
                while e != NONE:
                    node = hosts.node[e]
                    if turn == 0:
                        hosts.load[node] = 0.0
                    elif turn == 1:
                        hosts.load[node] += own
                    else:
                        total += hosts.load[node]
                    e = hosts.following[e]
                if turn == 2:
                    crowd[s, r] = total / leaving[s, r] if leaving[s, r] > 0 else 1.0


@inner
def find_sums(hosts: Hosts, n: int, nodes: np.ndarray, apart: np.ndarray, turns: int) -> None:
    """Fill `places`, `leaders`, `all_places` and `turns` of n stages.

    Parameters
    ----------
    nodes : ndarray, shape (rows, regions)
        As `find_hosts` fills it.
    apart : ndarray of bool, shape (rows, regions)
        Whether nodes of a stage send one another packed gradients there.
    turns : int
        `Runtime.sum_turns`.
    """
    for s in range(n):
        hosts.all_places[s] = 0
        for r in range(nodes.shape[1]):
            count = nodes[s, r]
            hosts.places[s, r] = count if apart[s, r] else min(count, 1)
            hosts.leaders[s, r] = min(count, 1) if apart[s, r] else count
            hosts.all_places[s] += hosts.places[s, r]
        find_turns(hosts.leaders[s], turns, hosts.turns[s])


@inner
def _sent_bytes(hosts: Hosts, s: int, a: int, b: int, wire_bytes: float) -> float:
    """What a stage sends from one region to another: of its packed gradient, there and back as sums."""
    return float(2 * wire_bytes * hosts.places[s, a] * hosts.places[s, b] / hosts.all_places[s])


@inner
def _busy_s(
    hosts: Hosts, s: int, a: int, b: int, wire_bytes: np.ndarray, tree_s: np.ndarray, s_per_byte: float
) -> float:
    """How long a stage's sum keeps a node pair of two regions busy, one that has `s_per_byte` of what it sends in equal
    parts (`pairs_free_s`)."""
    if tree_s[s] > 0:
        return float(tree_s[s])
    return _sent_bytes(hosts, s, a, b, wire_bytes[s]) * s_per_byte


@inner
def cards_free_s(
    bank: Bank,
    hosts: Hosts,
    n: int,
    regions: np.ndarray,
    nodes: np.ndarray,
    n_bytes: np.ndarray,
    wire_bytes: np.ndarray,
    apart: np.ndarray,
    begin_s: np.ndarray,
    tail_s: np.ndarray,
) -> float:
    """When stages that share the cards of nodes have reduced and done the rest, at the earliest.

    Parameters
    ----------
    regions : ndarray of int64
        Those in which the stages are.
    nodes : ndarray, shape (rows, regions)
        As `find_hosts` fills it; `places` are those of `find_sums`.
    n_bytes, begin_s, tail_s : ndarray, shape (rows,)
        Gradient bytes of a worker of each stage that nodes of a region sum at the end of a step, when it begins to
        reduce (later stages first), and seconds from the end of its reduction to the end of its step.
    wire_bytes : ndarray, shape (rows,)
        Those that go from place to place; zeros if the step does not wait for them.
    apart : ndarray of bool, shape (rows, regions)
        As for `find_sums`.
    """
    latest = 0.0
    for s in range(n - 1, -1, -1):
        for r in regions:
            count, e = nodes[s, r], hosts.first[s, r]
            away = 0.0
            for b in regions[: 0 if e == NONE or apart[s, r] else len(regions)]:
                if b != r:
                    away += _sent_bytes(hosts, s, r, b, wire_bytes[s]) / count
            members, sent = (hosts.all_places[s], wire_bytes[s]) if apart[s, r] else (count, n_bytes[s])
            while e != NONE:
                above = hosts.above[e]
                end, tail = 0.0, 0.0
                if above != NONE:
                    end, tail = hosts.end_s[above], hosts.tail_s[above]
                busy = 2 * (1 - 1 / members) * sent / bank.links.bytes_per_s[hosts.pool[e], hosts.pool[e]]
                busy += away / bank.links.card_bytes_per_s[hosts.pool[e]]
                if busy > 0:
                    used = end > 0
                    end = max(end, begin_s[s]) + busy
                    tail = max(tail, tail_s[s])
                    if used:
                        latest = max(latest, end + tail)
                hosts.end_s[e], hosts.tail_s[e] = end, tail
                e = hosts.following[e]
    return latest


@inner
def pairs_free_s(
    bank: Bank,
    hosts: Hosts,
    n: int,
    regions: np.ndarray,
    nodes: np.ndarray,
    wire_bytes: np.ndarray,
    tree_s: np.ndarray,
    begin_s: np.ndarray,
    tail_s: np.ndarray,
    least_s: float,
) -> float:
    """When stages that share node pairs between regions have reduced and done the rest; no less than `least_s`.

    Parameters are those of `cards_free_s`, and `tree_s`, shape (rows,): seconds in which a stage keeps every link busy
    that sums over trees, 0 of one that sums in equal parts.
    """
    latest = least_s
    for a in regions:
        for b in regions:
            rate = bank.links.bytes_per_s[bank.stands[a], bank.stands[b]]
            if a == b or rate <= 0:
                continue
            end, tail, users = 0.0, 0.0, 0
            for s in range(n - 1, -1, -1):
                if nodes[s, a] > 0 and nodes[s, b] > 0:
                    part = _largest_part(hosts, nodes, s, a, b)
                    end = max(end, begin_s[s]) + _busy_s(hosts, s, a, b, wire_bytes, tree_s, part / rate)
                    tail = max(tail, tail_s[s])
                    users += 1
            if users > 1 and end + tail > latest:  # if all were on one node pair
                for s in range(n - 1, -1, -1):
                    if nodes[s, a] > 0 and nodes[s, b] > 0:
                        free = _pair_free_s(hosts, nodes, n, s, a, b, wire_bytes, tree_s, 1 / rate, begin_s, tail_s)
                        latest = max(latest, free)
    return latest


@inner
def _every_pair(hosts: Hosts, nodes: np.ndarray, s: int, a: int, b: int) -> bool:
    """Whether all nodes of two regions send one another parts of stage s, as some are places by themselves."""
    return bool(hosts.leaders[s, a] < nodes[s, a] or hosts.leaders[s, b] < nodes[s, b])


@inner
def _largest_part(hosts: Hosts, nodes: np.ndarray, s: int, a: int, b: int) -> float:
    """Part of what stage s sends from region a to b that the node pair with most has."""
    if _every_pair(hosts, nodes, s, a, b):
        return float(1.0 / (nodes[s, a] * nodes[s, b]))
    return 1.0 / pairs_at_once(nodes[s, a], nodes[s, b], hosts.turns[s, a], hosts.turns[s, b])


@inner
def _pair_free_s(
    hosts: Hosts,
    nodes: np.ndarray,
    n: int,
    s: int,
    a: int,
    b: int,
    wire_bytes: np.ndarray,
    tree_s: np.ndarray,
    s_per_byte: float,
    begin_s: np.ndarray,
    tail_s: np.ndarray,
) -> float:
    """When the node pairs that stage s uses from region a to b with others are free, and their users done, stages s
    and above. Stages follow one another over the nodes of a pool: those that share nodes share few."""
    latest, e = 0.0, hosts.first[s, a]
    while e != NONE:
        other = hosts.first[s, b] if hosts.above[e] != NONE else NONE
        while other != NONE:
            end, tail, users = 0.0, 0.0, 0
            for t in range(n - 1, s - 1, -1) if hosts.above[other] != NONE else range(0):
                part = _part_of_pair(hosts, nodes, t, a, b, hosts.node[e], hosts.node[other])
                if part > 0:
                    end = max(end, begin_s[t]) + _busy_s(hosts, t, a, b, wire_bytes, tree_s, part * s_per_byte)
                    tail = max(tail, tail_s[t])
                    users += 1
            if users > 1:
                latest = max(latest, end + tail)
            other = hosts.following[other]
        e = hosts.following[e]
    return latest


@inner
def _part_of_pair(hosts: Hosts, nodes: np.ndarray, s: int, a: int, b: int, node: int, mate: int) -> float:
    """Part of what stage s sends from region a to b that goes from one node to another: both lead it
    (`polygon.cost.shared_links.node_pairs`)."""
    i, k = _place(hosts, s, a, node), _place(hosts, s, b, mate)
    if i < 0 or k < 0:
        return 0.0
    if _every_pair(hosts, nodes, s, a, b):
        return float(1.0 / (nodes[s, a] * nodes[s, b]))
    return float(part_of_pair(i, nodes[s, a], k, nodes[s, b], hosts.turns[s, a], hosts.turns[s, b]))


@inner
def _place(hosts: Hosts, s: int, region: int, node: int) -> int:
    """The place of a node among those of a stage in a region; -1 if it is none."""
    e, place = hosts.first[s, region], 0
    while e != NONE:
        if hosts.node[e] == node:
            return place
        e, place = hosts.following[e], place + 1
    return -1
