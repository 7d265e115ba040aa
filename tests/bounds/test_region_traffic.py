"""No division of layers and micro-batches among regions needs less time than their borders allow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.bounds.region_traffic import Layers, RegionTraffic, borders


def drawn(regions, rng):
    out = 1e6 * rng.random((regions, regions)) ** 2
    np.fill_diagonal(out, 0.0)
    egress = np.where(rng.random(regions) < 0.3, 5e5 * rng.random(regions), np.inf)
    layers = int(rng.integers(2, 9))
    work = rng.random(layers)
    return (
        RegionTraffic(
            borders=borders(out, out, egress, np.full(regions, 2e6), 1e9 * rng.random(regions)),
            layers=Layers(
                work=work / work.sum(),
                gradient_bytes=1e6 * rng.random(layers),
                state_bytes=1e8 * rng.random(layers),
            ),
            part=rng.random(regions),
            message_bytes=(1e6 * rng.random(), 1e6 * rng.random()),
        ),
        out,
        egress,
    )


def needed_s(traffic, out, egress, share):
    """Seconds that a division takes: compute, messages each over its own link, and gradients of layers held by several.

    Parameters
    ----------
    share : ndarray, shape (regions, layers)
        Part of the micro-batches that compute a layer in a region; sums to 1 over the regions.
    """
    regions = len(share)
    of = traffic.layers
    longest = float((share @ of.work / traffic.part).max())
    down, up = traffic.message_bytes
    carried = np.zeros((regions, regions))
    for before, after in zip(share.T[:-1], share.T[1:], strict=True):
        gone, come = np.maximum(before - after, 0), np.maximum(after - before, 0)
        moved = np.outer(gone, come) / gone.sum() if gone.sum() else np.zeros_like(carried)
        carried += moved * down + moved.T * up
    summed = np.zeros((regions, regions))
    for layer in range(share.shape[1]):
        held = share[:, layer] > 0
        n = int(held.sum())
        if n > 1:
            summed += 2 * of.gradient_bytes[layer] / n * np.outer(held, held) * ~np.eye(regions, dtype=bool)
    for sent in (carried, summed):
        used = sent > 0
        if used.any():
            longest = max(longest, float((sent[used] / out[used]).max()))
        longest = max(longest, float((sent.sum(axis=1) / egress).max()))
    return max(longest, float((carried.sum(axis=1) / 2e6).max()))


@given(regions=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_no_division_takes_less_than_the_bound(regions, seed):
    rng = np.random.default_rng(seed)
    traffic, out, egress = drawn(regions, rng)
    layers, held_bytes = traffic.layers, traffic.borders.memory_bytes[:regions]
    for _ in range(30):
        share = rng.random((regions, len(layers.work)))
        kind = rng.integers(4)
        if kind == 0:  # every layer in one region
            share = (share == share.max(axis=0)).astype(float)
        elif kind == 1:  # blocks of layers
            ends = np.sort(rng.integers(0, len(layers.work) + 1, regions - 1))
            where = np.searchsorted(ends, np.arange(len(layers.work)), side="right")
            share = (rng.permutation(regions)[where][None, :] == np.arange(regions)[:, None]).astype(float)
        elif kind == 2:  # the same part of all layers
            share = np.repeat(share[:, :1] * (rng.random((regions, 1)) < 0.7) + 1e-12, len(layers.work), axis=1)
        share /= share.sum(axis=0)
        if ((share > 0) @ layers.state_bytes > held_bytes).any():
            continue
        assert traffic.least_s <= needed_s(traffic, out, egress, share) * (1 + 1e-6)


def test_a_thin_link_keeps_regions_from_sharing_the_work():
    """Two alike regions: all activations or all gradients pass, or one of them computes everything."""
    layers = Layers(work=np.full(4, 0.25), gradient_bytes=np.full(4, 1e9), state_bytes=np.zeros(4))

    def least_s(rate, compute):
        rates = np.array([[0.0, rate], [rate, 0.0]])
        of = borders(rates, rates, np.full(2, np.inf), np.full(2, np.inf), np.ones(2))
        return RegionTraffic(borders=of, layers=layers, part=np.full(2, compute), message_bytes=(1e8, 1e8)).least_s

    assert least_s(1e9, 1.0) == pytest.approx(0.5, rel=1e-3)  # computing
    # The messages of a step, or one region alone, which gradients of few layers may help.
    assert 0.97 < least_s(1e8, 1.0) <= 1.0
    assert least_s(1e6, 1.0) == pytest.approx(1.0, rel=1e-3)
    assert least_s(1e7, 0.05) == pytest.approx(10.0, rel=1e-3)  # twenty seconds alone, ten with every message


def test_one_region_has_no_border():
    of = borders(np.zeros((1, 1)), np.zeros((1, 1)), np.full(1, np.inf), np.full(1, np.inf), np.ones(1))
    layers = Layers(work=np.ones(1), gradient_bytes=np.ones(1), state_bytes=np.ones(1))
    traffic = RegionTraffic(borders=of, layers=layers, part=np.array([0.25]), message_bytes=(1.0, 1.0))
    assert traffic.least_s == 4.0
