"""Laws of samples by number."""

import numpy as np
import pytest

from polygon.domain.errors import InputError
from runners.engine.data import english_text, samples_for
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
