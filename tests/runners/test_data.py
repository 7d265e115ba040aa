"""Laws of samples by number: their order, what is held out, mixtures and packing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.errors import InputError
from runners.data.mixture import BLOCK, Mixture, Together, parts_of_block
from runners.data.order import Order
from runners.data.packing import PackedSamples
from runners.data.samples import IGNORED, TextSamples, count_targets, digest_of, hold_out
from runners.data.sources import english_text, samples_for
from tests.small_problems import small_model


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 9))
def test_an_order_is_a_permutation(n, seed, epoch):
    """Every item has one place, and the same seed gives the same order."""
    order = Order(n, seed, epoch)
    found = [order[place] for place in range(n)]
    assert sorted(found) == list(range(n))
    assert found == [Order(n, seed, epoch)[place] for place in range(n)]


def test_an_order_is_as_random_as_a_drawn_one():
    """Where items land in tenths of the places (chi-square, 81 degrees of freedom), and that neighbours part."""
    n = 20_000
    for seed in range(5):
        order = Order(n, seed)
        items = np.array([order[place] for place in range(n)])
        counts, _, _ = np.histogram2d(np.arange(n), items, bins=10)
        # The sum of squares has mean 81 and deviation 12.7.
        assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 81 + 5 * 12.7
        assert (np.abs(np.diff(items)) == 1).sum() < 2 + 5 * math.sqrt(2)
        assert abs(np.corrcoef(items[:-1], items[1:])[0, 1]) < 5 / math.sqrt(n)


def test_a_sample_depends_on_its_number_alone():
    """However samples are batched, sample i is the same; targets are the inputs one place on."""
    samples, again = (samples_for(small_model(), 16, seed=3) for _ in range(2))
    inputs, targets = samples.batch(range(100, 108))
    for i in (107, 100, 103):
        one, target = again.batch(range(i, i + 1))
        assert one[0].equal(inputs[i - 100])
        assert target[0].equal(targets[i - 100])
    assert inputs[:, 1:].equal(targets[:, :-1])


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order():
    """Nothing is seen twice before all was seen."""
    samples = TextSamples(tokens=np.arange(81), seq_len=8, seed=0)
    first, second = ([int(x[0]) for x in samples.batch(range(e * 10, e * 10 + 10))[0]] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(0, 80, 8))
    assert first != second


def test_there_is_english_text_without_a_download():
    """Enough for a rehearsal, and it reads like prose."""
    text = english_text()
    assert len(text) > 300_000
    assert text.count(b" the ") > 3000


def windows(samples):
    """Numbers of the windows of 8 that are all of these samples."""
    return [int(samples.batch(range(i, i + 1))[0][0, 0]) // 8 for i in range(len(samples))]


@given(fraction=st.floats(0.01, 0.99), most=st.none() | st.integers(1, 300), seed=st.integers(0, 5))
def test_what_is_held_out_is_never_trained_on(fraction, most, seed):
    """Training and validation share no item, miss none, and the choice does not hang on the seed of the order."""
    whole = TextSamples(tokens=np.arange(8 * 200 + 1), seq_len=8, seed=seed)
    training, held = map(windows, hold_out(whole, fraction, most))
    assert sorted(training + held) == list(range(200))
    assert len(held) == min(round(200 * fraction), most or 200)
    assert set(held) == set(windows(hold_out(replace(whole, seed=seed + 1), fraction, most)[1]))


def test_blank_samples_fill_the_last_batch():
    """Beyond the last sample come zeros whose targets count nothing; nothing to hold out is refused."""
    samples = TextSamples(tokens=np.arange(1, 8 * 5 + 2), seq_len=8, seed=0)
    inputs, targets = samples.batch_or_fill(3, 4)
    expected = samples.batch(range(3, 5))
    assert torch.equal(inputs[:2], expected[0]) and torch.equal(targets[:2], expected[1])
    assert not inputs[2:].any() and bool((targets[2:] == IGNORED).all())
    assert bool((samples.batch_or_fill(8, 4)[1] == IGNORED).all())
    with pytest.raises(InputError, match=r"validation\.fraction: found 0.01"):
        hold_out(samples, 0.01)


@given(weights=st.lists(st.floats(0.1, 100), min_size=1, max_size=6))
def test_weights_are_kept_in_every_block(weights):
    """Each set has its share of a block to less than one sample."""
    counts = parts_of_block(weights)
    assert counts.sum() == BLOCK
    assert np.abs(counts - np.array(weights) / sum(weights) * BLOCK).max() < 1


def test_a_mixture_shows_each_set_in_its_own_order():
    """By weights, no sample of a set twice before all were seen, and each by its number alone."""
    parts = [TextSamples(tokens=np.arange(8 * n + 1) + 10**6 * n, seq_len=8, seed=1) for n in (30, 50)]
    mixture = Mixture(parts, (1, 3), seed=5)
    inputs, _ = mixture.batch(range(2 * BLOCK))
    for k, (part, share) in enumerate(zip(parts, (BLOCK // 4, 3 * BLOCK // 4), strict=True)):
        first = 10**6 * len(part)
        seen = [(int(x[0]) - first) // 8 for x in inputs if first <= x[0] < first + 1000]
        assert len(seen) == 2 * share
        assert np.ptp(np.bincount(seen)) <= 1
        # Inside a block too: of 200 samples 50 and 150 are expected, with a deviation of 6.
        assert abs(sum(mixture.place(i)[0] == k for i in range(200)) - share / 50) < 31
    alone = Mixture(parts, (1, 3), seed=5).batch(range(777, 778))
    assert alone[0][0].equal(inputs[777])
    places = sorted(mixture.place(i) for i in range(BLOCK))
    assert places == [(0, i) for i in range(2500)] + [(1, i) for i in range(7500)]
    assert digest_of(mixture) != digest_of(Mixture(parts, (1, 2), seed=5))
    with pytest.raises(InputError, match="--data-weights: found 0, expected numbers > 0"):
        parts_of_block((1, 0))
    with pytest.raises(InputError, match=r"found 1e-09, expected at least 1/10000 of their sum"):
        parts_of_block((1, 1e-9))


def test_sets_together_show_every_sample_once():
    """For validation on all that was held out."""
    parts = [TextSamples(tokens=np.arange(8 * n + 1) + 1000 * n, seq_len=8, seed=1) for n in (3, 5)]
    together = Together(seed=0, parts=parts)
    inputs, _ = together.batch(range(len(together)))
    assert sorted(int(x[0]) for x in inputs) == [3000 + 8 * i for i in range(3)] + [5000 + 8 * i for i in range(5)]
    assert count_targets(together, range(8), 1) == 64


lengths_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(lambda found: max(found) > 1)


@given(lengths=lengths_of_documents, seq_len=st.integers(1, 20))
def test_packing_learns_every_token_of_a_document_but_its_first(lengths, seq_len):
    """Once an epoch each, from the token before it in the same document; none across documents."""
    documents = np.cumsum([0, *lengths])
    # A token says its document and its place in it.
    tokens = np.array([100 * d + i for d, length in enumerate(lengths) for i in range(length)])
    packed = PackedSamples(tokens=tokens, documents=documents, seq_len=seq_len, seed=0)
    inputs, targets = packed.batch(range(len(packed)))
    counted = targets != IGNORED
    assert packed.targets(range(len(packed))) == int(counted.sum())
    learned = sorted(targets[counted].tolist())
    assert learned == sorted(100 * d + i for d, length in enumerate(lengths) for i in range(1, length))
    assert (inputs[counted] + 1).equal(targets[counted])


@given(lengths=lengths_of_documents, seq_len=st.integers(1, 20))
def test_positions_begin_anew_with_every_document(lengths, seq_len):
    """The place of an input in its document, or in the stretch of it that a sample holds; what fills up is apart."""
    documents = np.cumsum([0, *lengths])
    tokens = np.array([100 * d + i for d, length in enumerate(lengths) for i in range(length)])
    packed = PackedSamples(tokens=tokens, documents=documents, seq_len=seq_len, seed=0)
    for number in range(len(packed)):
        [inputs], [positions] = packed.batch(range(number, number + 1))[0], packed.positions(range(number, number + 1))
        start, stop = packed.spans[packed.item(number)]
        held = min(int(stop - start) - 1, seq_len)
        first = inputs[0] % 100
        for at in range(held):
            begun = int(first) if inputs[at] // 100 == inputs[0] // 100 else 0
            assert positions[at] == inputs[at] % 100 - begun
        assert positions[held:].tolist() == list(range(seq_len - held))


def test_packing_fills_samples_with_whole_documents():
    """As many as fit, in turn; a document that is longer than a sample is cut with one token of overlap."""
    documents = np.cumsum([0, 3, 4, 9, 2])
    packed = PackedSamples(tokens=np.arange(18), documents=documents, seq_len=6, seed=0)
    assert packed.spans.tolist() == [[0, 7], [7, 14], [13, 18]]
    row = next(i for i in range(3) if packed.item(i) == 0)
    assert packed.batch(range(row, row + 1))[1].tolist() == [[1, 2, IGNORED, 4, 5, 6]]
