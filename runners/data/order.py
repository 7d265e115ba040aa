"""An order of n items that is drawn from a seed and takes no memory: the k-th is computed, not looked up.

A permutation in memory takes 8 bytes an item: 2.5 GB on every rank for 20 GB of tokens in windows of 32.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6
"""Of the Feistel network: with 4 it is as good as drawn at random (Luby and Rackoff, SIAM J. Comput. 17(2), 1988)."""
_MASK = 2**64 - 1


class Order:
    """A permutation of 0..n-1: a Feistel network over the next power of 4, walked until it lands inside.

    Parameters
    ----------
    n : int
        Items; at least 1.
    *seed : int
        What the permutation is drawn from.
    """

    def __init__(self, n: int, *seed: int) -> None:
        self._n, self._half = n, max(1, ((n - 1).bit_length() + 1) // 2)
        drawn = np.random.default_rng(list(seed)).integers(0, _MASK, size=ROUNDS, dtype=np.uint64, endpoint=True)
        self._keys = [int(key) for key in drawn]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, place: int) -> int:
        """The item at a place."""
        if not 0 <= place < self._n:
            raise IndexError(place)
        half, low = self._half, (1 << self._half) - 1
        item = place
        while True:
            left, right = item >> half, item & low
            for key in self._keys:
                left, right = right, left ^ (_mixed(right ^ key) & low)
            item = left << half | right
            if item < self._n:
                return item


def _mixed(x: int) -> int:
    """A number of 64 bits of which every bit hangs on every bit of another (splitmix64's last lines)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
