"""Sets of times: arrays of shape (n, 2) with start and end of each span."""

from __future__ import annotations

import numpy as np


def merged(spans: np.ndarray) -> np.ndarray:
    """The same times as spans that neither touch nor overlap, in order."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    starts = np.flatnonzero(first)
    return np.column_stack([spans[starts, 0], ends[np.append(starts[1:], len(spans)) - 1]])


def length(spans: np.ndarray) -> float:
    """Time that the spans cover, counted once."""
    covered = merged(spans)
    return float((covered[:, 1] - covered[:, 0]).sum())


def common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Times in both."""
    a, b = merged(a), merged(b)
    if not len(a) or not len(b):
        return np.zeros((0, 2))
    # Of each span of a, the spans of b from the first that ends after its start to the last that starts before its end.
    low = np.searchsorted(b[:, 1], a[:, 0], side="right")
    high = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(high - low, 0)
    of_a = np.repeat(np.arange(len(a)), counts)
    of_b = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
    return np.column_stack([np.maximum(a[of_a, 0], b[of_b, 0]), np.minimum(a[of_a, 1], b[of_b, 1])])


def without(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Times in a that are not in b."""
    a = merged(a)
    if not len(a):
        return a
    b = common(b, np.array([[a[0, 0], a[-1, 1]]]))
    edges = np.concatenate([[a[0, 0]], b.ravel(), [a[-1, 1]]]).reshape(-1, 2)
    return common(a, edges)
