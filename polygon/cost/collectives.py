"""Times of collective operations in the alpha-beta model: pure functions of bytes, ranks, latency and bandwidth.

Conventions, for every function here:

- ``n_bytes`` is M: the buffer of every rank (all-reduce), the whole output (all-gather), the whole input
  (reduce-scatter), the message (broadcast, point-to-point), the whole send buffer with the own part (all-to-all).
- ``latency_s`` is the cost of a message whatever its size, ``bytes_per_s`` what one port moves in ONE direction
  (ports are full duplex: a link sold as 600 GB/s "bidirectional" is 300e9 here).
- arguments may be numpy arrays that broadcast together; scalars in give scalars out. One rank takes 0 seconds.
- `ring_pass_s` may be called by numba kernels as well: it is compiled into them, and stays plain Python here.
- additions, kernel launches and other traffic are left out.

Which operation is best by which of them on which network: `polygon.overhead.collective_table`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

Number = Any
"""A float, or an array of them."""


def log2_ceil(ranks: Number) -> Number:
    """Smallest whole L with 2**L >= ranks; exact, also for arrays."""
    if isinstance(ranks, (int, np.integer)):
        return (int(ranks) - 1).bit_length()
    return np.frexp(np.asarray(ranks, dtype=float) - 1)[1]


def log2_floor(ranks: Number) -> Number:
    """Largest whole L with 2**L <= ranks; exact, also for arrays."""
    if isinstance(ranks, (int, np.integer)):
        return int(ranks).bit_length() - 1
    return np.frexp(np.asarray(ranks, dtype=float))[1] - 1


def bus_bandwidth_factor(op: str, ranks: int) -> float:
    """Factor from algorithm bandwidth M/T to the bus bandwidth that nccl-tests prints.

    References
    ----------
    nccl-tests, doc/PERFORMANCE.md.
    """
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}.get(op, 1.0)


# ---------------------------------------------------------------------------------------------------------- rings


@register_jitable
def ring_pass_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""Once round a ring, a p-th of the buffer per round: an all-gather or a reduce-scatter.

    .. math:: T = (p - 1) (\alpha + M / (p B))

    References
    ----------
    Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
    """
    return (ranks - 1) * (latency_s + n_bytes / (ranks * bytes_per_s))


def ring_all_reduce_s(n_bytes: float, latency_s: np.ndarray, bytes_per_s: np.ndarray) -> float:
    r"""Ring all-reduce over unequal links, in synchronous rounds.

    .. math:: T = 2 (p - 1) \max_i (\alpha_i + M / (p B_i))

    Parameters
    ----------
    n_bytes : float
        Size M of the buffer that every rank holds [bytes].
    latency_s, bytes_per_s : ndarray, shape (p,)
        Of the link from rank i to the next [s], [bytes/s].

    References
    ----------
    Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009.
    """
    ranks = len(latency_s)
    return 2 * float(np.max(ring_pass_s(n_bytes, ranks, np.asarray(latency_s), np.asarray(bytes_per_s))))


def both_ways_pass_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""All-gather or reduce-scatter on a ring whose links work in both directions at once, each block the short way.

    .. math:: T = \lceil (p - 1) / 2 \rceil \alpha + (p - 1) M / (2 p B)

    With an even p the block from opposite comes half from each side. Needs p >= 3 (two ranks have one link).

    References
    ----------
    Jain and Sabharwal, ICS 2010 (bidirectional rings of a torus).
    """
    return (ranks // 2) * latency_s + (ranks - 1) * n_bytes / (2 * ranks * bytes_per_s)


# ------------------------------------------------------------------------------------ pipelines, chains and trees


def best_pieces(fixed_steps: Number, per_piece: Number, n_bytes: Number, latency_s: Number, piece_s: Number) -> Number:
    r"""Whole number k of pieces that minimises (a + c k) (alpha + m / k).

    .. math:: k^* = \sqrt{a m / (c \alpha)}

    rounded to the better neighbour, at least 1 and at most one piece per byte.

    Parameters
    ----------
    fixed_steps, per_piece : a and c, steps to fill the pipeline and steps per further piece.
    piece_s : m, seconds that the whole message would occupy the link.
    """
    most = np.maximum(1.0, np.floor(n_bytes))
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(np.asarray(fixed_steps * piece_s) / (per_piece * np.asarray(latency_s, dtype=float)))
    root = np.where(np.isnan(root), 1.0, root)
    low = np.clip(np.floor(root), 1.0, most)
    high = np.clip(np.ceil(root), 1.0, most)

    def steps_s(k: Number) -> Number:
        return (fixed_steps + per_piece * k) * (latency_s + piece_s / k)

    best = np.where(steps_s(low) <= steps_s(high), low, high)
    return float(best) if best.ndim == 0 else best


def pipelined_s(hops: Number, n_bytes: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""A message in k pieces through a chain (or along the longest branch of a tree of separate links).

    .. math:: T = (h - 1 + k) (\alpha + M / (k B))

    with the best whole k; 0 for no hop.

    References
    ----------
    Chan, Heimlich, Purkayastha and van de Geijn, Concurrency Computat. 19(13), 2007.
    """
    fixed = np.maximum(np.asarray(hops) - 1, 0)
    k = best_pieces(fixed, 1, n_bytes, latency_s, n_bytes / bytes_per_s)
    time_s = np.where(np.asarray(hops) > 0, (fixed + k) * (latency_s + n_bytes / (k * bytes_per_s)), 0.0)
    return float(time_s) if time_s.ndim == 0 else time_s


def binomial_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""Broadcast (or reduce) along a binomial tree, whole messages.

    .. math:: T = L (\alpha + M / B), \quad L = \lceil \log_2 p \rceil

    References
    ----------
    Chan et al. 2007, minimum spanning tree broadcast.
    """
    return log2_ceil(ranks) * (latency_s + n_bytes / bytes_per_s)


def two_tree_broadcast_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""Two binary trees, each rank inner in at most one of them, half of the message through each, k pieces.

    .. math:: T = (2 L + 2 k) (\alpha + M / (2 k B)) \approx 2 L \alpha + M / B + 2 \sqrt{2 L \alpha M / B}

    References
    ----------
    Sanders, Speck and Träff, Parallel Computing 35(12), 2009.
    """
    levels = log2_ceil(ranks)
    k = best_pieces(2 * levels, 2, n_bytes / 2, latency_s, n_bytes / (2 * bytes_per_s))
    time_s = np.where(np.asarray(ranks) > 1, (2 * levels + 2 * k) * (latency_s + n_bytes / (2 * k * bytes_per_s)), 0.0)
    return float(time_s) if time_s.ndim == 0 else time_s


def double_tree_all_reduce_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""All-reduce over two complementary binary trees: a reduce to the roots, then a broadcast from them.

    .. math:: T = 2 (2 L + 2 k) (\alpha + M / (2 k B)) \approx 4 L \alpha + 2 M / B + 4 \sqrt{2 L \alpha M / B}

    NCCL streams both directions together and reaches a latency of 2 L alpha; the bandwidth term is the same.

    References
    ----------
    Sanders, Speck and Träff 2009; NCCL, src/graph/tuning.cc.
    """
    return 2 * two_tree_broadcast_s(n_bytes, ranks, latency_s, bytes_per_s)


# --------------------------------------------------------------------------------- logarithmic on a full crossbar


def circulant_pass_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""All-gather (Bruck) or its mirror image, reduce-scatter, in log2 rounds for ANY number of ranks.

    .. math:: T = L \alpha + (p - 1) M / (p B)

    With a power of two, recursive doubling and halving cost the same.

    References
    ----------
    Bruck et al., IEEE TPDS 8(11), 1997; Träff, arXiv:2410.14234 (reduce-scatter for any p).
    """
    return log2_ceil(ranks) * latency_s + (ranks - 1) * n_bytes / (ranks * bytes_per_s)


def circulant_all_reduce_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""All-reduce as reduce-scatter and all-gather, each in log2 rounds for any number of ranks.

    .. math:: T = 2 L \alpha + 2 (p - 1) M / (p B)

    References
    ----------
    Träff, arXiv:2410.14234.
    """
    return 2 * circulant_pass_s(n_bytes, ranks, latency_s, bytes_per_s)


def halving_doubling_all_reduce_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""Recursive halving, then doubling (Rabenseifner); ranks beyond the power of two q fold in first and out last.

    .. math:: T = 2 \log_2 q \, \alpha + 2 (q - 1) M / (q B) + [p > q] \, 2 (\alpha + M / B)

    References
    ----------
    Thakur, Rabenseifner and Gropp 2005, section 4.4.
    """
    power = 2 ** log2_floor(ranks)
    core_s = 2 * log2_floor(ranks) * latency_s + 2 * (power - 1) * n_bytes / (power * bytes_per_s)
    return core_s + (ranks > power) * 2 * (latency_s + n_bytes / bytes_per_s)


def scatter_all_gather_broadcast_s(
    n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number, *, ring: bool = False
) -> Number:
    r"""Broadcast of a long message: binomial scatter, then an all-gather in log2 rounds (or round a ring).

    .. math:: T = (L + L) \alpha + 2 (p - 1) M / (p B), \quad \text{ring: } (L + p - 1) \alpha + \ldots

    References
    ----------
    Thakur, Rabenseifner and Gropp 2005; van de Geijn.
    """
    scatter_s = circulant_pass_s(n_bytes, ranks, latency_s, bytes_per_s)
    gather = ring_pass_s if ring else circulant_pass_s
    return scatter_s + gather(n_bytes, ranks, latency_s, bytes_per_s)


# ----------------------------------------------------------------------------------------- all-to-all, one message


def ring_all_to_all_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""All-to-all round a ring in one direction: every block is carried past all ranks before its target.

    .. math:: T = (p - 1) \alpha + (p - 1) M / (2 B)

    References
    ----------
    Link loads: a link carries the blocks of distance d from d sources, sum of d M / p over d = 1..p-1.
    """
    return (ranks - 1) * latency_s + (ranks - 1) * n_bytes / (2 * bytes_per_s)


def cycle_load(ranks: Number) -> Number:
    r"""Part of M that the busiest link direction of a cycle carries in an all-to-all, each block the short way.

    p / 8 for an even p (blocks from opposite go half each way), (p^2 - 1) / (8 p) for an odd one. Two ranks share a
    single link: 1/2.
    """
    even = ranks % 2 == 0
    load = (ranks * ranks - (1 - even)) / (8 * ranks)
    return load + (ranks == 2) * (0.5 - load)


def line_load(ranks: Number) -> Number:
    r"""Part of M that the middle link of a line carries per direction in an all-to-all: floor(p/2) ceil(p/2) / p."""
    return (ranks // 2) * (ranks - ranks // 2) / ranks


def pairwise_all_to_all_s(n_bytes: Number, ranks: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""All-to-all in p - 1 rounds of pairs on a full crossbar.

    .. math:: T = (p - 1) \alpha + (p - 1) M / (p B)

    References
    ----------
    Thakur, Rabenseifner and Gropp 2005.
    """
    return ring_pass_s(n_bytes, ranks, latency_s, bytes_per_s)


def bruck_blocks(ranks: int) -> int:
    """Blocks that a rank sends in Bruck's all-to-all: the ones in the binary numbers 0 .. ranks - 1."""
    total, bit = 0, 1
    while bit < ranks:
        total += ranks // (2 * bit) * bit + max(0, ranks % (2 * bit) - bit)
        bit *= 2
    return total


def bruck_all_to_all_s(n_bytes: Number, ranks: int, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""All-to-all in log2 rounds at the price of more bytes: for short messages.

    .. math:: T = L \alpha + W M / (p B), \quad W = \sum_{j < p} \mathrm{popcount}(j)

    L M / (2 B) for a power of two.

    References
    ----------
    Bruck et al., IEEE TPDS 8(11), 1997.
    """
    return log2_ceil(ranks) * latency_s + bruck_blocks(ranks) * n_bytes / (ranks * bytes_per_s)


def point_to_point_s(n_bytes: Number, latency_s: Number, bytes_per_s: Number) -> Number:
    r"""One message over one link, :math:`\alpha + M / B`."""
    return latency_s + n_bytes / bytes_per_s


# ------------------------------------------------------------------------------------------------------- two levels


def hierarchical_pass_s(
    n_bytes: Number,
    per_node: Number,
    nodes: Number,
    intra: tuple[Number, Number],
    inter: tuple[Number, Number],
    *,
    logarithmic: bool = False,
) -> Number:
    r"""All-gather or reduce-scatter in two levels: each rank deals with its own g-th of the buffer between nodes.

    .. math:: T = (g - 1) (\alpha_1 + M / (g B_1)) + (N - 1) (\alpha_2 + M / (g N B_2))

    Parameters
    ----------
    per_node, nodes : g and N.
    intra, inter : (latency [s], bandwidth per rank [bytes/s]) inside a node and between nodes.
    logarithmic : between nodes in log2 rounds in place of a ring.

    References
    ----------
    Cho et al., BlueConnect, MLSys 2019.
    """
    across = circulant_pass_s if logarithmic else ring_pass_s
    return ring_pass_s(n_bytes, per_node, *intra) + across(n_bytes / per_node, nodes, *inter)


MOST_PIECES = 512
"""Of different sizes; where they grow by a tenth already, a hundred do."""


class LevelsPass(NamedTuple):
    """A pass over two levels in pieces, each on one level while another is on the other."""

    seconds: float
    pieces: int
    least_bytes: float
    """Of the whole buffer: the piece that one level waits for, the first inside the nodes or the last between them."""
    far_always_busy: bool
    """The level between the nodes waits for the first piece alone; else it does the last piece alone."""


def pipelined_levels_pass_s(
    n_bytes: float, per_node: int, nodes: int, intra: tuple[float, float], inter: tuple[float, float]
) -> LevelsPass:
    r"""`hierarchical_pass_s` in k pieces: one is inside the nodes while the one before it is between them.

    .. math:: T = a(c) + k L \alpha_2 + (N - 1) M / (g N B_2), \quad
        a(c) = L_g \alpha_1 + (g - 1) c / (g B_1), \quad b(c) = L \alpha_2 + (N - 1) c / (g N B_2)

    A flow shop of two machines, each level in log2 rounds. Pieces follow :math:`a(c_{i+1}) = b(c_i)`, so that neither
    level waits but for the first piece, c; or they are equal, and T is as above or, where the inside takes longer,
    :math:`k L_g \alpha_1 + (g - 1) M / (g B_1) + b(c)`. Parameters are those of `hierarchical_pass_s`, numbers only.

    Returns
    -------
    LevelsPass
        The best of both with whole k. Of equal pieces the best real k is that of one of the two sums, where they meet,
        or an end (one piece, a piece for each byte); of others k up to `MOST_PIECES` are tried.
    """
    near_fixed_s, far_fixed_s = log2_ceil(per_node) * intra[0], log2_ceil(nodes) * inter[0]
    near_s = (per_node - 1) / per_node * n_bytes / intra[1]
    far_s = (nodes - 1) / (nodes * per_node) * n_bytes / inter[1]

    def in_equal_pieces(k: int) -> LevelsPass:
        far_longer = far_fixed_s + far_s / k >= near_fixed_s + near_s / k
        fill_s = near_fixed_s + near_s / k if far_longer else far_fixed_s + far_s / k
        whole_s = k * far_fixed_s + far_s if far_longer else k * near_fixed_s + near_s
        return LevelsPass(fill_s + whole_s, k, n_bytes / k, far_longer)

    most = max(1, int(n_bytes))
    roots = [0.0, most]
    roots += [math.sqrt(near_s / far_fixed_s)] if far_fixed_s > 0 else []
    roots += [math.sqrt(far_s / near_fixed_s)] if near_fixed_s > 0 else []
    roots += [(near_s - far_s) / (far_fixed_s - near_fixed_s)] if far_fixed_s != near_fixed_s else []
    tried = {min(max(1, int(root) + more), most) for root in roots for more in (0, 1)}
    found = [in_equal_pieces(k) for k in sorted(tried)]
    if near_s > 0 and far_s > 0:
        found += [
            LevelsPass(near_fixed_s + near_s * first + k * far_fixed_s + far_s, k, first * n_bytes, True)
            for k, first in _never_waiting(far_s / near_s, (far_fixed_s - near_fixed_s) / near_s, n_bytes)
        ]
    return min(found)


def _never_waiting(ratio: float, more: float, n_bytes: float) -> Iterator[tuple[int, float]]:
    """Numbers k of pieces, and the first of them as a part of all, where c[i + 1] = ratio c[i] + more; of bytes at
    least."""
    # The i-th piece is `factor` times the first, and `rest`.
    factor, rest, factors, rests = 1.0, 0.0, 1.0, 0.0
    for k in range(1, MOST_PIECES + 1):
        first = (1.0 - rests) / factors
        # The pieces grow or shrink all the way: the first and the last are the ends. One that is a billion times
        # smaller than another is rounding.
        if k > 1 and (min(first, factor * first + rest) * n_bytes < 1 or not 1e-9 < factor < 1e9):
            return
        yield k, first
        factor, rest = factor * ratio, rest * ratio + more
        factors, rests = factors + factor, rests + rest


def flat_ring_bytes_per_s(per_node: int, nodes: int, intra_bytes_per_s: float, inter_bytes_per_s: float) -> float:
    """Bandwidth of a ring that enters and leaves every node once, its node crossing spread over all of its cards."""
    if nodes == 1:
        return intra_bytes_per_s
    if per_node == 1:
        return inter_bytes_per_s
    return min(intra_bytes_per_s, per_node * inter_bytes_per_s)


def flat_ring_pass_s(
    n_bytes: float, per_node: int, nodes: int, intra: tuple[float, float], inter: tuple[float, float]
) -> float:
    r"""All-gather or reduce-scatter round one ring through all nodes, as NCCL counts it.

    .. math:: T = (p - N) \alpha_1 + (N - 1) \alpha_2 + (p - 1) M / (p \min(B_1, g B_2))

    References
    ----------
    NCCL, src/graph/tuning.cc (a block's way round the ring crosses N - 1 node boundaries).
    """
    ranks = per_node * nodes
    rate = flat_ring_bytes_per_s(per_node, nodes, intra[1], inter[1])
    return (ranks - nodes) * intra[0] + (nodes - 1) * inter[0] + (ranks - 1) * n_bytes / (ranks * rate)
