"""Laws of samples by number."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.errors import InputError
from runners.engine.data import IGNORED, TextSamples, english_text, hold_out, samples_for
from tests.small_problems import small_model


def test_a_sample_depends_on_its_number_alone():
    """However samples are batched, sample i is the same; targets are the inputs one place on."""
    samples, again = (samples_for(small_model(), 16, seed=3) for _ in range(2))
    inputs, targets = samples.batch(range(100, 108))
    for i in (107, 100, 103):
        one, target = again.batch(range(i, i + 1))
        assert one[0].equal(inputs[i - 100])
        assert target[0].equal(targets[i - 100])
    assert inputs[:, 1:].equal(targets[:, :-1])


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order(tmp_path):
    """Nothing is seen twice before all was seen."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(81))
    samples = samples_for(small_model(), 8, seed=0, path=path)
    first, second = ([int(x[0]) for x in samples.batch(range(e * 10, e * 10 + 10))[0]] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(0, 80, 8))
    assert first != second


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([[1, 2]]), "expected one row of whole numbers"),
        (np.full(50, 300), "largest token: found 300, expected less than 256"),
        (np.arange(5), "tokens: found 5, expected at least 9"),
    ],
)
def test_unfit_data_is_refused(tmp_path, content, message):
    """One line that says what is wrong."""
    path = tmp_path / "tokens.npy"
    np.save(path, content)
    with pytest.raises(InputError, match=message):
        samples_for(small_model(), 8, seed=0, path=path)
    with pytest.raises(InputError, match="vocab_size: found 100, expected at least 256"):
        samples_for(small_model(vocab_size=100), 8, seed=0)
    with pytest.raises(InputError, match=r"--data .*: No such file"):
        samples_for(small_model(), 8, seed=0, path=tmp_path / "none.txt")


def test_there_is_english_text_without_a_download():
    """Enough for a rehearsal, and it reads like prose."""
    text = english_text()
    assert len(text) > 300_000
    assert text.count(b" the ") > 3000


@given(fraction=st.floats(0.01, 0.99), most=st.none() | st.integers(1, 300), seed=st.integers(0, 5))
def test_what_is_held_out_is_never_trained_on(fraction, most, seed):
    """Training and validation share no item, miss none, and the choice does not hang on the seed of the order."""
    whole = TextSamples(tokens=np.arange(8 * 200 + 1), seq_len=8, seed=seed)
    training, held = hold_out(whole, fraction, most)
    parts = [{int(part.batch(range(i, i + 1))[0][0, 0]) // 8 for i in range(len(part))} for part in (training, held)]
    assert parts[0] | parts[1] == set(range(200)) and not parts[0] & parts[1]
    assert len(parts[1]) == min(round(200 * fraction), most or 200)
    again = hold_out(replace(whole, seed=seed + 1), fraction, most)[1]
    assert held.chosen is not None and np.array_equal(held.chosen, again.chosen)


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
