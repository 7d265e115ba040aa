"""How long workers need to combine their weight gradients: sums inside nodes, inside regions and between places.

Inside a region accelerators sum as NCCL does (`polygon.cost.network`): inside a node by its measured table, over
several nodes in a ring at the rate of the narrower of fabric and shared cards, or in a tree. Processors sum in two
levels, as the runner does: on every node at its first worker, then between the nodes, where a single leader passes more
than a ring (`passes_of_card`); those of one node, if there is no other place, in gloo's ring. Between regions node
pairs work side by side (BlueConnect, Cho et al. 2019): each of R regions adds up a part in R for all others, which it
deals out to its k nodes in turns (`turns_of_region`), while every other region has an equal stretch of that part on
each of its l nodes. So a card has 1 / k of what its region exchanges, and hardly more than 1 / (k l) of that falls to a
pair of nodes, where it was 1 / max(k, l) in one turn (`pairs_at_once`).

What adds up so are *places*: regions, and the nodes of a region inside which weight gradients are packed
(`Plan.packed_inside`), each by itself. NCCL and gloo add up plain numbers: whatever is packed goes from place to place.

With n bytes per worker of a processor, g workers in a node, N nodes in a region, R regions, one gradient takes

    T = 2 (g-1) a1 + min(g-1, 2) n / B1  +  2 (N-1) (a2 + n / (N B2))  +  across(n)

and of many that follow one another each level is busy with one while others pass those before and behind it
(`streamed_s`). A node's workers share its network card, so the second level moves the node's whole n. `across` is what
the runner does: two places send one another their whole gradients (one latency), more of them exchange parts and then
the sums of the parts, every pair of places at once (two latencies), of one layer after the other (`passed_on_s`): the
longest of

    a_ij + 2 m_ij  and  a_ij + a_jk + max(m_ij, m_jk) + last min(m_ij, m_jk)

over places i, j, k, where a link has latency a and carries a part of all layers in m, and `last` is one layer's part.
Packing and unpacking of what crosses are added to it. Between two nodes goes one message a layer, direction and round;
what the busiest node of either place needs for all of its own (`Runtime.message_s`) is the least that 2 m takes.

Where every device finds the gradient's norm in what it has, a region begins the next step as soon as it has all sums,
and may lead: `ways_s` has what each region's gradients take to reach each other one (`polygon.cost.finish.led_s`).

What a stage of a plan asks of them is in `polygon.cost.stage_reduction`, what ZeRO makes of it in
`polygon.cost.zero_sums`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polygon.cost.collectives import ring_pass_s
from polygon.cost.memory import state_bytes
from polygon.cost.network import ring_kernel
from polygon.cost.transfers import LinkArrays
from polygon.domain.model import Batch
from polygon.domain.runtime import Runtime, turns_of_region
from polygon.jit.by_pointer import gives_pointed
from polygon.jit.compilation import general, kernel

TREE_HOPS = 4
"""Links one behind the other on the longest ways over trees: two up to the root and two down."""

TREES_FAR = 1.2
"""Times the longest latency of a way over one region that trees are taken to have: 1.09 in the mean of 60 drawn stages,
and up to 1.8 (benchmarks/tree_sums.py)."""

TREE_REGIONS = 10
"""Most regions of a stage for which trees are looked for (`polygon.planning.sum_trees`)."""
TREE_NODES = 64
"""Most nodes of a stage that the search takes to sum over trees. A judgement: without it searches of 10,240 devices
ended 18 % later, though sums are not taken for too quick there (benchmarks/tree_sums.py huge-10240-drawn)."""
TREE_MESSAGES = 3.0
"""Times the messages of equal parts that the relaxation takes trees to have: twice the most of any drawn stage. A
judgement, too: with 1.5 the plan found for 1,024 devices took 2 % longer."""

dealt_turns = kernel(turns_of_region)
"""`turns_of_region` for kernels; first, so that all others are made anew when it changes (`polygon.jit.stamp`)."""


@kernel
def ring_s(n_bytes: float, members: int, latency_s: float, bytes_per_s: float) -> float:
    """Ring all-reduce of `n_bytes` among equals: 2 (p-1) (a + n / (p b)); 0 for one (Patarasuk and Yuan 2009)."""
    if members <= 1:
        return 0.0
    if bytes_per_s <= 0:
        return np.inf
    return float(2 * ring_pass_s(n_bytes, members, latency_s, bytes_per_s))


@kernel
def passes_of_card(members: int, alone: bool) -> float:
    """How many times a gradient passes a leader's card each way, in the sum of so many nodes of a region.

    Or the link of a node's first worker, which leads alone, in the sum of so many workers there.

    Where each node leads, its part goes straight to who adds it up, and comes back so: the 2 (P - 1) / P of a ring. One
    that leads `alone` has the way to other regions beside, and lets more than one other add up a piece each for it: 2
    (`polygon_comm.near_sums.NearSums`).
    """
    if members <= 1:
        return 0.0
    if alone:
        return 1.0 if members == 2 else 2.0
    return 2 * (members - 1) / members


@kernel
def lent_s(n_bytes: float, members: int, latency_s: float, bytes_per_s: float, passes: float) -> float:
    """A ring's latencies (`ring_s`) and so many passes of a card."""
    if members <= 1:
        return 0.0
    # Latencies of 2 (p - 1) rounds, as in any ring; only the bytes of the card are less.
    return 2 * (members - 1) * latency_s + passes * n_bytes / bytes_per_s if bytes_per_s > 0 else np.inf


class LevelsRoom(NamedTuple):
    """Room in which `levels_s` works."""

    first: np.ndarray
    nodes: np.ndarray
    """(regions,) first pool of each region in the list of pools, and its nodes."""
    places: np.ndarray
    """(regions,) places in each."""
    leaders: np.ndarray
    """(regions,) nodes of one of these places."""
    turns: np.ndarray
    """(regions,) in which each deals out what it adds up (`turns_of_region`)."""
    messages_s: np.ndarray
    """(regions,) seconds in which a leader sends and receives its messages, where the runtime says what one takes."""
    ideal: np.ndarray
    """(1,) whether all pairs of nodes have as much, and messages cost their hosts nothing, in any case: for bounds."""
    trees: np.ndarray
    """(1,) whether regions sum over the trees that let most pass, where that is sooner (`over_trees_s`)."""
    tree_s: np.ndarray
    """(1,) seconds in which these then keep every link busy; 0 where regions sum in equal parts."""
    rates: np.ndarray
    """(regions, regions) bytes/s between these, the slower of both ways, 0 with itself."""
    parts: np.ndarray
    """(regions,) of what each adds up, where parts are not equal."""
    latency_s: np.ndarray
    bytes_per_s: np.ndarray
    """(regions,) of a message between two nodes of each."""
    near_s: np.ndarray
    """(regions,) seconds of the sums inside each."""
    comes: np.ndarray
    goes: np.ndarray
    """(3, regions) longest latency of what a region adds up, or has added up, with bytes of no layer, one, and all."""


@gives_pointed
def levels_room(pools: int, regions: int) -> LevelsRoom:
    """Room for stages of so many pools in so many regions."""
    most = min(pools, regions)
    first, nodes, places, leaders, turns = np.zeros((5, most), dtype=np.int64)
    messages, latency, rate, near = np.zeros((4, most))
    comes, goes = np.zeros((2, 3, most))
    (ideal, trees), tree_s = np.zeros((2, 1), dtype=np.bool_), np.zeros(1)
    rates, parts = np.zeros((most, most)), np.zeros(most)
    return LevelsRoom(
        first, nodes, places, leaders, turns, messages, ideal, trees, tree_s, rates, parts, latency, rate, near, comes,
        goes,
    )  # fmt: skip


@kernel
def exchange_rounds(places: int, whole: bool) -> int:
    """Rounds of messages in which places sum: one where they send whole gradients (two places, or `whole`)."""
    return 1 if places == 2 or whole else 2


@kernel
def collective_s(
    n_bytes: float,
    members: int,
    per_node: int,
    pool: int,
    latency_s: float,
    bytes_per_s: float,
    passes: int,
    links: LinkArrays,
) -> float:
    """Seconds of NCCL's all-reduce (2 passes), gather or scatter (1 pass) of what each device of a group has.

    Gradients go in buckets, each of which waits for the latency of its ring.

    Parameters
    ----------
    n_bytes : float
        Of one device.
    members, per_node : int
        Devices of the group, and how many of them are on a node; every device of a node does so in a group of its own.
    pool : int
        Of the devices.
    latency_s, bytes_per_s : float
        Of the link between two nodes.
    """
    if members < 2 or n_bytes <= 0:
        return 0.0
    nodes = -(-members // per_node)
    if nodes > 1 and bytes_per_s <= 0:
        return np.inf
    of = links.collective[pool]
    # Equal buckets: the last one of a runtime is smaller, which matters less than that there is one more latency.
    buckets = max(1.0, np.ceil(n_bytes / links.bucket_bytes))
    one_s = ring_kernel(
        n_bytes / buckets, members, per_node, int(of[0]), of[1], of[2], bytes_per_s, latency_s, int(of[3]), passes
    )
    return float(of[5] * buckets * one_s)


@kernel
def apart_sums_s(
    n_bytes: float,
    spread_bytes: float,
    spread: int,
    members: int,
    per_node: int,
    pool: int,
    latency_s: float,
    bytes_per_s: float,
    passes: int,
    links: LinkArrays,
) -> float:
    """`collective_s` of what all devices of a group have and, after it, of what every `spread`-th of them has alike.

    Parameters
    ----------
    n_bytes, spread_bytes : float
        Of one device: all of it, and of that the experts, which differ along an expert-parallel group.
    """
    both_s = collective_s(n_bytes - spread_bytes, members, per_node, pool, latency_s, bytes_per_s, passes, links)
    if spread_bytes > 0:
        alike, near = members // spread, max(1, per_node // spread)
        both_s += collective_s(spread_bytes, alike, near, pool, latency_s, bytes_per_s, passes, links)
    return both_s


@kernel
def levels_s(
    n_bytes: float,
    spread_bytes: float,
    spread: int,
    count: int,
    pools: np.ndarray,
    nodes: np.ndarray,
    members: np.ndarray,
    degrees: np.ndarray,
    wire_bytes: float,
    pair_share: np.ndarray,
    apart: np.ndarray,
    links: LinkArrays,
    whole: bool,
    last: float,
    sums: float,
    room: LevelsRoom,
) -> tuple[float, float, float, float, float]:
    """Seconds inside nodes, inside regions and between places, the latency of the longest way between these, and what
    cards that sums inside regions keep busy pass of the way between places.

    Parameters
    ----------
    n_bytes, spread_bytes : float
        Gradient bytes that a worker holds, and of these the experts'.
    spread : int
        Expert parallelism: every so many workers hold the same experts, and all of them the rest.
    count : int
        How many of the pools.
    pools, nodes, members, degrees : ndarray, shape (at least count,)
        The pools that hold workers of the stage (those of a region side by side), how many of their nodes do, how many
        workers per node, and the least tensor-parallel degree of these.
    wire_bytes : float
        Bytes of the gradient once packed for the way between places.
    pair_share : ndarray, shape (regions, regions)
        How many stages reduce over each pair of regions at the same time.
    apart : ndarray of bool, shape (regions,)
        Whether the nodes of a region are places by themselves.
    whole : bool
        Whether places send each other whole gradients in one round (`exchange_rounds`).
    last : float
        Part of one layer (`passed_on_s`).
    sums : float
        How many there are, one behind the other (`polygon.cost.overlap.sums_in_step`).
    """
    found, i = 0, 0
    while i < count:
        r = links.region[pools[i]]
        end, total = i, 0
        while end < count and links.region[pools[end]] == r:
            total += nodes[end]
            end += 1
        room.first[found], room.nodes[found], room.places[found] = i, total, total if apart[r] else 1
        room.leaders[found] = 1 if apart[r] else total
        found += 1
        i = end
    places = places_in(found, room)
    find_turns(room.leaders[:found], links.sum_turns, room.turns)
    if links.message_s > 0:
        _find_messages(found, places, whole, sums * links.message_s, room)
    node_s, region_s, card_s, room.tree_s[0] = 0.0, 0.0, 0.0, 0.0
    for a in range(found):
        i, end = room.first[a], room.first[a + 1] if a + 1 < found else count
        r, total = links.region[pools[i]], room.nodes[a]
        workers, latency, rate, nccl = 0, 0.0, np.inf, True
        room.latency_s[a], room.bytes_per_s[a] = 0.0, np.inf
        for j in range(i, end):
            workers += nodes[j] * members[j]
            nccl = nccl and links.collective[pools[j], 4] > 0
            for k in range(i, end):
                if k != j or nodes[j] > 1:
                    latency = max(latency, links.ring_latency_s[pools[j], pools[k]])
                    rate = min(rate, links.ring_bytes_per_s[pools[j], pools[k]])
                    room.latency_s[a] = max(room.latency_s[a], links.latency_s[pools[j], pools[k]])
                    room.bytes_per_s[a] = min(room.bytes_per_s[a], links.bytes_per_s[pools[j], pools[k]])
        own_s, own_node_s, most = 0.0, 0.0, 0.0
        for j in range(i, end):
            p = pools[j]
            if nccl:
                near = members[j] if apart[r] else workers
                d = degrees[j]
                each = apart_sums_s(n_bytes / d, spread_bytes / d, spread, near, members[j], p, latency, rate, 2, links)
                own_s = max(own_s, each)
            else:
                # A node's first worker gets the experts of all others as well.
                here = n_bytes + (min(spread, members[j]) - 1) * spread_bytes
                passes = passes_of_card(members[j], total > 1 or places > 1)
                each = lent_s(here, members[j], links.node_latency_s[p], links.node_bytes_per_s[p], passes)
                own_node_s, most = max(own_node_s, each), max(most, here)
        if not nccl and not apart[r]:
            passes = passes_of_card(total, whole and places > 1)
            own_s = links.collective[pools[i], 5] * lent_s(most, total, latency, rate, passes)
        node_s, region_s = max(node_s, own_node_s), max(region_s, own_s)
        if total > 1 and not apart[r] and places > 1:
            leaders = 1 if whole else total
            sent = 2 * wire_bytes * (places - 1) / places / leaders
            card_s = max(card_s, sent / links.card_bytes_per_s[pools[i]])
        room.near_s[a] = own_node_s + own_s
    if places == 1:
        return node_s, region_s, 0.0, 0.0, 0.0
    across_s, far_s = across_of(found, pools, wire_bytes / places, pair_share, links, places, whole, last, room)
    return node_s, region_s, across_s, far_s, card_s


@kernel
def streamed_s(node_s: float, region_s: float, across_s: float, latency_s: float, card_s: float, last: float) -> float:
    """Seconds of sums whose layers pass the levels one behind the other: those of the busiest level, and the others' of
    one layer, the part `last` of all. Cards pass what is summed in a region and what leaves it; the other parameters
    are what `levels_s` gives."""
    total = node_s + region_s + across_s
    if total == np.inf:
        return total
    busiest = min(max(node_s, region_s + card_s, across_s - latency_s), total - latency_s)
    return latency_s + busiest + last * (total - latency_s - busiest)


@kernel
def across_of(
    found: int,
    pools: np.ndarray,
    part_bytes: float,
    pair_share: np.ndarray,
    links: LinkArrays,
    places: int,
    whole: bool,
    last: float,
    room: LevelsRoom,
) -> tuple[float, float]:
    """Seconds between places that send each other so many bytes in each round, and the latency of the longest way.

    Ways over a third place are the longest that comes there and the longest that goes from there: regions twice are
    looked at, not three times. Other parameters are those of `levels_s`.
    """
    across_s, far_s, all_rates, least_rate = 0.0, 0.0, 0.0, np.inf
    for k in range(found):
        for i in range(3):
            room.comes[i, k], room.goes[i, k] = 0.0, 0.0
    for a in range(found):
        rates = 0.0
        for b in range(found):
            latency, rate = between(a, b, pools, part_bytes, pair_share, links, places, whole, room)
            if rate == 0:
                return np.inf, latency
            room.rates[a, b] = max(0.0, rate)
            if rate > 0:
                part_s = part_bytes / rate
                rates += rate
                # A part goes to every place, and its sum comes back from there (or whole ones, once).
                across_s, far_s = max(across_s, latency + 2 * part_s), max(far_s, latency)
                for i in range(3):
                    way_s = latency + (0.0 if i == 0 else last * part_s if i == 1 else part_s)
                    room.comes[i, b], room.goes[i, a] = max(room.comes[i, b], way_s), max(room.goes[i, a], way_s)
        all_rates, least_rate = all_rates + rates, min(least_rate, rates)
    if exchange_rounds(places, whole) == 2:
        for k in range(found):
            far_s = max(far_s, room.comes[0, k] + room.goes[0, k])
            # The longer of both halves takes all its time, the other one layer's (`passed_on_s`).
            across_s = max(across_s, room.comes[2, k] + room.goes[1, k], room.comes[1, k] + room.goes[2, k])
        messages_s, nodes = 0.0, 0
        for a in range(found):
            nodes += room.leaders[a]
            messages_s = max(messages_s, room.messages_s[a]) if links.message_s > 0 else 0.0
        if room.trees[0] and not room.ideal[0] and places == found <= TREE_REGIONS and nodes <= TREE_NODES:
            busy_s = max(unequal_parts_s(part_bytes * places, found, room), messages_s)
            latency_s = far_s
            if far_s + (1 + last) * busy_s < across_s:
                across_s, room.tree_s[0] = far_s + (1 + last) * busy_s, busy_s
            trees_s = over_trees_s(part_bytes * places, places, all_rates, least_rate, messages_s, last)
            if TREES_FAR * far_s + trees_s < across_s:
                across_s, latency_s = TREES_FAR * far_s + trees_s, TREES_FAR * far_s
                room.tree_s[0] = least_over_trees_s(part_bytes * places, places, all_rates, least_rate)
            return across_s, latency_s
    return across_s, far_s


@kernel
def unequal_parts_s(wire_bytes: float, regions: int, room: LevelsRoom) -> float:
    """Seconds in which links are busy where every region adds up a part of its own, as much as its links let it.

    The link between a and b carries the parts of both, each way. So parts p add up to most where p_a + p_b is no more
    than each passes in the time: half of the slowest link of each, and then what is left, one region after another,
    those with the fastest first.
    """
    rates, parts, total = room.rates, room.parts, 0.0
    for a in range(regions):
        least = np.inf
        for b in range(regions):
            if b != a:
                rates[a, b] = rates[b, a] = min(rates[a, b], rates[b, a])
                least = min(least, rates[a, b])
        parts[a] = least / 2
    for _ in range(regions):
        best, more = 0, 0.0
        for a in range(regions):
            left = np.inf
            for b in range(regions):
                if b != a:
                    left = min(left, rates[a, b] - parts[b])
            if left - parts[a] > more:
                best, more = a, left - parts[a]
        if more == 0.0:
            break
        parts[best] += more
    for a in range(regions):
        total += parts[a]
    return wire_bytes / total if total > 0 else np.inf


@kernel
def over_trees_s(
    wire_bytes: float, places: int, all_rates: float, least_rate: float, messages_s: float, last: float
) -> float:
    """Seconds of a sum over the trees that let most pass, latencies apart, if all links of a way are as busy.

    What `least_over_trees_s` says, whose parameters are the same, is mostly reached, as no group of regions has links
    to the others much slower than the slowest region's.

    Parameters
    ----------
    messages_s : float
        In which a leader sends and receives its messages where every region adds up an equal part.
    """
    busy_s = max(least_over_trees_s(wire_bytes, places, all_rates, least_rate), TREE_MESSAGES * messages_s)
    return (1 + (TREE_HOPS - 1) * last) * busy_s


@kernel
def least_over_trees_s(wire_bytes: float, places: int, all_rates: float, least_rate: float) -> float:
    """Least seconds in which links pass a sum over any trees: every tree has an edge at each region, and one fewer than
    regions in all (Nash-Williams 1961, Tutte 1961).

    Parameters
    ----------
    all_rates, least_rate : float
        Bytes/s of all ways from region to region, and of those from the one that has least.
    """
    return max(wire_bytes / least_rate, 2 * (places - 1) * wire_bytes / all_rates)


@kernel
def find_turns(leaders: np.ndarray, most: int, turns: np.ndarray) -> None:
    """Fill in how many turns each region deals out what it adds up (`turns_of_region`).

    Parameters
    ----------
    leaders : ndarray of int, shape (regions,)
        Nodes of a place of each that lead; 0 where it has no part.
    most : int
        `Runtime.sum_turns`.
    turns : ndarray of int, shape (at least regions,)
        Out.
    """
    for a in range(len(leaders)):
        turns[a] = dealt_turns(leaders, a, most) if leaders[a] > 0 else 1


@kernel
def pairs_at_once(nodes: int, others: int, turns: int, other_turns: int) -> float:
    """How many pairs of nodes of two regions share what these exchange, by what falls to the pair with most.

    Half of what they exchange is added up by each. The first node of both has most of either half.

    Parameters
    ----------
    nodes, others : int
        Of the two regions.
    turns, other_turns : int
        In which each deals out what it adds up (`turns_of_region`).
    """
    return float(2 / (largest_share(nodes, others, turns) + largest_share(others, nodes, other_turns)))


@kernel
def largest_share(nodes: int, others: int, turns: int) -> float:
    """Most that two nodes share of what a region of so many adds up, its cells dealt out in so many turns.

    A stretch of another region is as long as turns / others rounds of cells: of each whole one every node has a cell,
    and of the rest no more than a cell.
    """
    rounds = turns // others
    return float((rounds + min(1.0, (turns - rounds * others) * nodes / others)) / (nodes * turns))


@kernel
def part_of_pair(node: int, nodes: int, other: int, others: int, turns: int, other_turns: int) -> float:
    """Part of what two regions exchange that falls to a node of each, by their places among so many.

    The largest is 1 / `pairs_at_once`, whose parameters are the same.
    """
    return 0.5 * (
        _share_of_pair(node, nodes, other, others, turns) + _share_of_pair(other, others, node, nodes, other_turns)
    )


@kernel
def _share_of_pair(node: int, nodes: int, other: int, others: int, turns: int) -> float:
    """Part of what a region of so many nodes adds up that is in the cells of one of them and in another region's
    stretch of such a place."""
    cells, cell = nodes * turns, others  # a cell in parts of itself: then stretches begin at whole numbers
    met = 0
    for end, sign in (((other + 1) * cells, 1), (other * cells, -1)):
        rounds, rest = end // (nodes * cell), end % (nodes * cell)
        met += sign * (rounds * cell + min(max(rest - node * cell, 0), cell))
    return float(met / (cells * cell))


@kernel
def messages_of_leader(nodes: int, others: int, turns: int, other_turns: int, rounds: int) -> float:
    """Messages that a node of a place sends to and receives from those of another in one sum, as a mean over it.

    Its stretch of what the other place adds up meets cells of so many nodes there, its own cells meet stretches of so
    many; in one round (two places) both are in the same messages, in two raw numbers go there and their sums come back.
    Parameters are those of `pairs_at_once`.
    """
    given = min(float(others), max(1.0, other_turns * others / nodes))
    added = min(float(others), max(float(turns), others / nodes))
    return 2 * max(given, added) if rounds == 1 else 2 * (given + added)


@kernel
def _find_messages(found: int, places: int, whole: bool, message_s: float, room: LevelsRoom) -> None:
    """Fill `messages_s`, where a message to or from a node takes so long in all sums together."""
    rounds = exchange_rounds(places, whole)
    for a in range(found):
        count = 0.0
        for b in range(found if not room.ideal[0] else 0):
            mine, theirs = (1, 1) if whole else (room.leaders[a], room.leaders[b])
            others = room.places[b] - (1 if a == b else 0)
            count += others * messages_of_leader(mine, theirs, room.turns[a], room.turns[b], rounds)
        room.messages_s[a] = message_s * count


@kernel
def places_in(found: int, room: LevelsRoom) -> int:
    """Places in so many regions."""
    places = 0
    for a in range(found):
        places += room.places[a]
    return places


@kernel
def between(
    a: int,
    b: int,
    pools: np.ndarray,
    part_bytes: float,
    pair_share: np.ndarray,
    links: LinkArrays,
    places: int,
    whole: bool,
    room: LevelsRoom,
) -> tuple[float, float]:
    """Latency and bytes/s of what a place in one region sends to a place in another, or to another in the same: so many
    bytes in each round, no sooner than leaders of either can send and receive the messages of both.

    The rate is 0 without a link, and -1 where there is nobody to send to.
    """
    # Which pool stands for a region does not matter: links between regions are the same for all its pools.
    pa, pb = pools[room.first[a]], pools[room.first[b]]
    ra, rb = links.region[pa], links.region[pb]
    # Nodes of a place that lead: all, but for whole gradients, which one sends.
    ka, kb = (1, 1) if whole else (room.leaders[a], room.leaders[b])
    # A card sends to all the other places at once, or hears them.
    card = min(links.card_bytes_per_s[pa] * ka, links.card_bytes_per_s[pb] * kb) / (places - 1)
    if links.message_s > 0 and part_bytes > 0:
        messages_s = max(room.messages_s[a], room.messages_s[b])
        card = min(card, 2 * part_bytes / messages_s) if messages_s > 0 else card
    if a == b:
        return (room.latency_s[a], min(room.bytes_per_s[a], card)) if room.places[a] > 1 else (0.0, -1.0)
    stages = max(1.0, pair_share[ra, rb]) * room.places[a]
    # What leaves a region goes to all places elsewhere at once.
    capacity = links.capacity_bytes_per_s[ra, rb] / room.places[b]
    capacity = min(capacity, links.egress_bytes_per_s[ra] / (places - room.places[a])) / stages
    pairs = float(ka * kb) if room.ideal[0] else pairs_at_once(ka, kb, room.turns[a], room.turns[b])
    return links.latency_s[pa, pb], min(links.bytes_per_s[pa, pb] * pairs, card, capacity)


@kernel
def passed_on_s(there_s: float, on_s: float, last: float) -> float:
    """Seconds of a way of two links, each busy so long with all layers: one passes on what the other has brought.

    While it does, later layers still come over the first: only one layer has both for itself, the last where the first
    link is the slower one, else the first. What goes the other way in the meantime, first come first served, may hold
    the last layers up; this is left out.

    Parameters
    ----------
    last : float
        Part of one layer.
    """
    return max(there_s, on_s) + last * min(there_s, on_s)


@general
def ways_s(
    found: int,
    pools: np.ndarray,
    wire_bytes: float,
    pair_share: np.ndarray,
    links: LinkArrays,
    whole: bool,
    packing_s: float,
    near_s: np.ndarray,
    cards_s: np.ndarray,
    last: float,
    room: LevelsRoom,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Seconds from region to region of all gradients and of the part that no backward hides, [target, source] each,
    and `Ways.busy_s`.

    In one round every place sends to every other. In two, the place that adds up a part sends the sum on: of a way over
    a third region each link carries its half, one layer after another (`passed_on_s`), of one that ends or begins there
    the link carries both rounds.

    A layer passes the sums of a region, the way and the sums of the other region one after the other, while others are
    ahead of it or behind. Of n layers the way has the first after 1 / n of half a region's sums, and ends no sooner
    than that region's cards have all behind them but handing out the last; then 1 / n of the other's half follows.
    What is gathered and what is handed out share a card evenly, and while a sum is on its way nothing of it is there to
    be handed out: the last gathering is done earlier by half that time, or by half of all sums at most.

    Parameters
    ----------
    found : int
        Regions, as `levels_s` left them in `room`; the parameters named alike are its.
    packing_s : float
        Of packing and unpacking.
    near_s : ndarray, shape (found,)
        Of the sums inside each region: half before the way, half after it.
    cards_s : ndarray, shape (found,)
        In which the cards of each region's leaders send what its sums need.
    last : float
        Part of all that is not latency which no backward hides.
    """
    places = places_in(found, room)
    part_bytes = wire_bytes / places
    far_s, half_s = np.full((found, found), -1.0), np.zeros((found, found))
    for a in range(found):
        for b in range(found):
            latency, rate = between(a, b, pools, part_bytes, pair_share, links, places, whole, room)
            if rate >= 0:
                far_s[a, b], half_s[a, b] = latency, part_bytes / rate if rate > 0 else np.inf
    all_s, end_s = np.full((found, found), -np.inf), np.full((found, found), -np.inf)
    rounds = exchange_rounds(places, whole)
    for a in range(found):
        # Nobody ends before the sums of the own region, and what its leaders send for them.
        own_s = max(near_s[a], cards_s[a])
        all_s[a, a], end_s[a, a] = own_s, last * own_s
        # What is sent last leaves when the cards have nothing else to do, but to hand out that.
        sent_s, first_s = own_s - 0.5 * last * near_s[a], 0.5 * last * near_s[a]
        for b in range(found):
            ends_s, back_s = packing_s + 0.5 * (near_s[a] + near_s[b]), packing_s + 0.5 * last * near_s[b]
            for k in range(-1, found if rounds == 2 else 0):  # straight, or over a third that adds up
                linked = far_s[a, b] >= 0 if k < 0 else min(far_s[a, k], far_s[k, b]) >= 0
                if linked:
                    latency = far_s[a, b] if k < 0 else far_s[a, k] + far_s[k, b]
                    there_s, on_s = (half_s[a, b], half_s[a, b]) if k < 0 else (half_s[a, k], half_s[k, b])
                    way_s = 2 * there_s if k < 0 else passed_on_s(there_s, on_s, last)
                    ahead_s = 0.5 * min(latency, near_s[a])
                    all_s[b, a] = max(all_s[b, a], latency + max(sent_s - ahead_s, first_s + way_s) + back_s)
                    end_s[b, a] = max(end_s[b, a], latency + last * (ends_s + there_s + on_s))
    return all_s, end_s, 2 * half_s.max()


@kernel
def copies_s(
    n_bytes: float,
    count: int,
    pools: np.ndarray,
    nodes: np.ndarray,
    degrees: np.ndarray,
    apart: np.ndarray,
    links: LinkArrays,
) -> float:
    """Seconds to sum between the shard groups of a stage, inside places, what ZeRO has scattered in each.

    A group lies in one pool. Every node of the smallest sends its part of the gradient, all at the same time.
    Parameters are those of `levels_s`.
    """
    longest, i = 0.0, 0
    while i < count:
        if apart[links.region[pools[i]]]:
            i += 1
            continue
        end, least = i, nodes[i]
        while end < count and links.region[pools[end]] == links.region[pools[i]]:
            least = min(least, nodes[end])
            end += 1
        latency, rate, nccl = 0.0, np.inf, True
        for j in range(i, end):
            nccl = nccl and links.collective[pools[j], 4] > 0
            for k in range(i, end):
                if k != j:
                    latency = max(latency, links.ring_latency_s[pools[j], pools[k]])
                    rate = min(rate, links.ring_bytes_per_s[pools[j], pools[k]])
        part = n_bytes / max(1, least)
        for j in range(i, end if end - i > 1 else i):
            if nccl:
                each = collective_s(part / degrees[j], end - i, 1, pools[j], latency, rate, 2, links)
            else:
                each = links.collective[pools[j], 5] * ring_s(part, end - i, latency, rate)
            longest = max(longest, each)
        i = end
    return longest


@kernel
def least_sum_s(n_bytes: float, nodes: int, pool: int, links: LinkArrays) -> float:
    """What the sum of a worker's gradients over so many nodes of a pool takes at least; 0 inside a node.

    Each node's part passes its card in a ring; a tree sends as much, and has fewer latencies.
    """
    if nodes < 2:
        return 0.0
    latency_s = links.ring_latency_s[pool, pool] * links.collective[pool, 5]
    part = (nodes - 1) / nodes
    return float(2 * np.ceil(np.log2(nodes)) * latency_s + 2 * part * n_bytes / links.bytes_per_s[pool, pool])


def least_part(runtime: Runtime, batch: Batch) -> float:
    """Least part of an all-reduce that a step sees of it: ZeRO scatters gradients, and gathers weights, which a
    runtime may hide."""
    weight_bytes, gradient_bytes, _ = state_bytes(batch)
    gathered = 0.0 if runtime.dp_overlap == "full" else min(1.0, weight_bytes / gradient_bytes)
    return 0.5 + 0.5 * gathered


@kernel
def unpackings(places: int, whole: bool) -> float:
    """How often a leader unpacks as much as its part of a gradient, where so many places add up."""
    return places - 1.0 if whole else 2 * (places - 1) / places
