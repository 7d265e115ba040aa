"""Who sends which message to whom, and what these share: all of messages that links and packings do not change.

Kept with the workers' places: plans that differ in links, packings or spans have the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from polygon.cost.kept import Kept
from polygon.jit.compilation import kernel

KEPT_PACKINGS = 4
"""Of the messages between the same ends: a plan's, and those that it is held against."""


class Thing(NamedTuple):
    """Something that several node pairs may share, of every message (-1: not by this one).

    Attributes
    ----------
    number : ndarray of int64, shape (messages,)
    different : int
    part : ndarray, shape (2, micro_batches, stages - 1)
        What the sender's own messages may use of it, if all that share it send all the time.
    """

    number: np.ndarray
    different: int
    part: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageEnds:
    """Both ends of every message between stages; arrays have the shape of `Messages`: (2, micro_batches, stages - 1).

    Attributes
    ----------
    routes : ndarray of int64, shape (micro_batches, stages)
        Workers, counted over all stages.
    sender, receiver, pool_s, pool_r, region_s, region_r, node_s, node_r : ndarray of int64
        Of sender and receiver.
    holder : ndarray of int64
        Number of the devices that the sender is on: several stages may be on the same.
    workers, nodes, regions : int
        How many there are; nodes and regions of the cluster.
    """

    routes: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    pool_s: np.ndarray
    pool_r: np.ndarray
    node_s: np.ndarray
    node_r: np.ndarray
    region_s: np.ndarray
    region_r: np.ndarray
    holder: np.ndarray
    workers: int
    nodes: int
    regions: int

    @classmethod
    def of(
        cls,
        routes: np.ndarray,
        of_workers: tuple[np.ndarray, np.ndarray, np.ndarray],
        *,
        chunks: int,
        nodes: int,
        regions: int,
    ) -> MessageEnds:
        """Of routes, and of pool, node and region of all workers; chunks as in `Plan`."""
        a, b = routes[:, :-1], routes[:, 1:]
        sender, receiver = np.stack([a, b]), np.stack([b, a])
        pool, node, region = of_workers
        workers = len(pool)
        return cls(
            routes=routes,
            sender=sender,
            receiver=receiver,
            pool_s=pool[sender],
            pool_r=pool[receiver],
            node_s=node[sender],
            node_r=node[receiver],
            region_s=region[sender],
            region_r=region[receiver],
            holder=sender % (workers // chunks),
            workers=workers,
            nodes=nodes,
            regions=regions,
        )

    @cached_property
    def packed(self) -> Kept[tuple[np.ndarray, float, np.ndarray]]:
        """Bytes of messages and seconds of packing by who asked for them (`polygon.cost.transfers`)."""
        return Kept(KEPT_PACKINGS)

    @cached_property
    def same_node(self) -> np.ndarray:
        """Whether a message stays on its node, where it shares nothing."""
        found: np.ndarray = self.node_s == self.node_r
        return found

    @cached_property
    def far(self) -> np.ndarray:
        """Whether it leaves its region."""
        found: np.ndarray = self.region_s != self.region_r
        return found

    @cached_property
    def channels(self) -> tuple[np.ndarray, int]:
        """Channel of each message (one per sender, receiver and direction), and how many there are."""
        direction = np.arange(2)[:, None, None]
        keys = (direction * self.workers + self.sender) * self.workers + self.receiver
        channel, _, channels = number_keys(keys.ravel())
        return channel.reshape(self.sender.shape), int(channels)

    @cached_property
    def pair_part(self) -> np.ndarray:
        """What the sender's own messages may use of what its node has with the receiver's."""
        return self._part(self.node_s * self.nodes + self.node_r)

    @cached_property
    def pairs(self) -> tuple[np.ndarray, int, np.ndarray]:
        """Node pair of each message (inside a node its channel), how many there are, and a message of each."""
        inside = self.nodes * self.nodes + self.channels[0]
        keys = np.where(self.same_node, inside, self.node_s * self.nodes + self.node_r)
        numbers, _, different = number_keys(keys.ravel())
        first = np.empty(different, dtype=np.int64)
        first[numbers[::-1]] = np.arange(len(numbers))[::-1]
        return numbers, int(different), first

    @cached_property
    def cards(self) -> Thing:
        """The sender's card, which all that leaves a node passes."""
        return self._thing(np.where(self.same_node, -1, self.node_s))

    @cached_property
    def capacities(self) -> Thing:
        """What two regions share, one way."""
        return self._thing(np.where(self.far, self.region_s * self.regions + self.region_r, -1))

    @cached_property
    def egress(self) -> Thing:
        """What all share that leaves a region."""
        return self._thing(np.where(self.far, self.region_s, -1))

    def _thing(self, thing: np.ndarray) -> Thing:
        number, _, different = number_keys(thing.ravel())
        return Thing(number, int(different), self._part(thing))

    def _part(self, group: np.ndarray) -> np.ndarray:
        """Part of what `group` shares that the sender's own messages may use, by how many messages each has to send."""
        keys = np.where(self.same_node, -1, group)
        own = np.where(self.same_node, -1, group * self.workers + self.holder)
        found: np.ndarray = (number_keys(own.ravel())[1] / number_keys(keys.ravel())[1]).reshape(group.shape)
        return found


def number_keys(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Number the different values of `keys` (>= 0) in order of appearance and count them, by hashing.

    Returns
    -------
    numbers : ndarray of int64, shape (n,)
        Number of each entry's value; -1 for negative entries.
    counts : ndarray, shape (n,)
        How often each entry's value occurs; 1 for negative entries.
    different : int
    """
    size = 1 << max(1, (2 * len(keys) - 1).bit_length())
    table, number_of = np.full(size, -1, dtype=np.int64), np.empty(size, dtype=np.int64)
    numbers, tally, counts = np.full(len(keys), -1, dtype=np.int64), np.zeros(len(keys)), np.ones(len(keys))
    return numbers, counts, fill_numbers(keys, table, number_of, tally, numbers, counts)


@kernel
def fill_numbers(
    keys: np.ndarray,
    table: np.ndarray,
    number_of: np.ndarray,
    tally: np.ndarray,
    numbers: np.ndarray,
    counts: np.ndarray,
) -> int:
    """The hashing of `number_keys`: returns how many values differ.

    Parameters
    ----------
    table, number_of : ndarray of int64, shape (a power of two,)
        Room; `table` full of -1.
    tally : ndarray, shape (n,)
        Room, zeros.
    numbers, counts : ndarray, shape (n,)
        In as -1 and 1, out.
    """
    size = table.shape[0]
    different = 0
    for i in range(keys.shape[0]):
        key = keys[i]
        if key < 0:
            continue
        slot = (key * 2654435761 + (key >> 13)) & (size - 1)
        while table[slot] != -1 and table[slot] != key:
            slot = (slot + 1) & (size - 1)
        if table[slot] == -1:
            table[slot] = key
            number_of[slot] = different
            different += 1
        numbers[i] = number_of[slot]
        tally[numbers[i]] += 1
    for i in range(keys.shape[0]):
        if numbers[i] >= 0:
            counts[i] = tally[numbers[i]]
    return different
