"""How fast rotary positions turn, stretched in every way, and what turning does, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from polygon.domain.block import RotaryScaling
from runners.engine.positions import Turns, frequencies, rotate

LLAMA3 = RotaryScaling(kind="llama3", factor=4.0, low_frequency=1.0, high_frequency=4.0, original_tokens=16)
YARN = RotaryScaling(kind="yarn", factor=4.0, original_tokens=64, fast=8.0, slow=2.0, rounded=False)


def turned(x, base=10000.0, scaling=None, positions=None):
    """Queries or keys turned by positions, which are 0, 1, 2, ... where none are given."""
    return rotate(x, *Turns(base, scaling).of(x, positions))


def found(scaling, half=4, base=16.0):
    """Base 16 halves the frequency from each of four pairs to the next."""
    return frequencies(half, base, scaling, torch.device("cpu")).tolist()


def test_pairs_turn_ever_more_slowly():
    """1, 1/2, 1/4, 1/8 radians a token; a linear stretch divides all."""
    assert found(None) == pytest.approx([1, 0.5, 0.25, 0.125])
    assert found(RotaryScaling(kind="linear", factor=5.0)) == pytest.approx([0.2, 0.1, 0.05, 0.025])


def test_llama3_stretches_long_waves_alone():
    """Turns in 16 tokens: 8/pi, 4/pi, 2/pi, 1/pi; the first two lie between 1 and 4, the others below."""
    left = [(8 / math.pi - 1) / 3, (4 / math.pi - 1) / 3, 0, 0]
    plain = [1, 0.5, 0.25, 0.125]
    expected = [p / 4 * (1 - part) + p * part for p, part in zip(plain, left, strict=True)]
    assert found(LLAMA3) == pytest.approx(expected)
    assert found(replace(LLAMA3, high_frequency=2.0))[0] == 1.0
    # Without anything between them, what turns more often than both is left.
    step = replace(LLAMA3, low_frequency=1.1, high_frequency=1.1)
    assert found(step) == pytest.approx([1, 0.5, 0.0625, 0.03125])
    # A wave that turns exactly as often as said is stretched: 2 pi tokens are none, but the border can be put there.
    border = float(torch.tensor(16.0) / (2 * math.pi))
    assert found(replace(LLAMA3, low_frequency=border, high_frequency=border))[0] == 0.25


def test_yarns_ramp_is_over_the_pairs():
    """Pair n turns 64 / (2 pi) 2**-n times: 8 at log2(4 / pi), twice at two pairs more."""
    first = math.log2(4 / math.pi)
    left = [1 - min(max((n - first) / 2, 0), 1) for n in range(4)]
    plain = [1, 0.5, 0.25, 0.125]
    expected = [p / 4 * (1 - part) + p * part for p, part in zip(plain, left, strict=True)]
    assert found(YARN) == pytest.approx(expected)
    # Rounded, the ramp lies between pairs 0 and 3.
    left = [1, 2 / 3, 1 / 3, 0]
    expected = [p / 4 * (1 - part) + p * part for p, part in zip(plain, left, strict=True)]
    assert found(replace(YARN, rounded=True)) == pytest.approx(expected)


def test_yarns_ramp_has_ends():
    """It begins at pair 0 at the earliest, ends at the last number of the head, and may have no width."""
    plain = [1, 0.5, 0.25, 0.125]
    # Pair -7.7 turns 2000 times, pair 1.3 so rarely: only the end is in the head.
    early = replace(YARN, fast=64 / (2 * math.pi) * 2**8, slow=64 / (2 * math.pi) / 2)
    assert found(early) == pytest.approx([1, 0.125, 0.0625, 0.03125])
    # Pairs 1 and 20 as borders: the ramp ends at 2 half - 1 = 7.
    late = replace(YARN, fast=64 / (2 * math.pi) / 2, slow=64 / (2 * math.pi) / 2**20)
    left = [1, 1, 5 / 6, 4 / 6]
    expected = [p / 4 * (1 - part) + p * part for p, part in zip(plain, left, strict=True)]
    assert found(late) == pytest.approx(expected)
    # Equal borders, at pair 0.35: what is behind is stretched by the whole factor.
    assert found(replace(YARN, fast=8.0, slow=8.0)) == pytest.approx([1, 0.125, 0.0625, 0.03125])


def test_halves_of_a_head_make_the_pairs():
    """Numbers (1, 2, 3, 4, 5) of the token at place 1: 1 with 3, 2 with 4; the odd one is left."""
    x = torch.tensor([[[[9.0, 9, 9, 9, 9], [1, 2, 3, 4, 5]]]])
    plain = turned(x, base=4.0)
    assert plain[0, 0, 0].tolist() == [9, 9, 9, 9, 9]
    (c, s), (d, t) = (math.cos(1), math.sin(1)), (math.cos(0.5), math.sin(0.5))
    assert plain[0, 0, 1].tolist() == pytest.approx([c - 3 * s, 2 * d - 4 * t, 3 * c + s, 4 * d + 2 * t, 5])
    placed = turned(x, base=4.0, positions=torch.tensor([[1, 0]]))
    assert placed[0, 0, 1].tolist() == [1, 2, 3, 4, 5]
    assert placed[0, 0, 0, 0].item() == pytest.approx(9 * c - 9 * s)


def test_every_sequence_of_a_batch_has_its_positions():
    """Two sequences, two heads: all heads of one turn alike."""
    x = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    both = turned(x, positions=torch.tensor([[0, 1, 2], [5, 6, 7]]))
    torch.testing.assert_close(both[:1], turned(x[:1]))
    long = torch.cat([torch.zeros(1, 2, 5, 4), x[1:]], dim=2)
    torch.testing.assert_close(both[1:], turned(long)[:, :, 5:])
    assert turned(x.bfloat16()).dtype == torch.bfloat16


def test_yarn_makes_queries_and_keys_longer():
    """By its factor, whatever their place."""
    x = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    longer = turned(x, scaling=replace(YARN, attention_factor=1.5))
    torch.testing.assert_close(longer, 1.5 * turned(x, scaling=YARN))
    torch.testing.assert_close(longer.norm(dim=-1), 1.5 * x.norm(dim=-1))


def test_turns_are_made_once_for_all_that_ask_for_the_same():
    """Queries and keys, block after block; other lengths, formats and places get their own."""
    x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    turns = Turns()
    first = turns.of(x)
    assert turns.of(x[:, :1])[0] is first[0]
    longer = torch.cat([x, x], dim=2)
    torch.testing.assert_close(turns.of(longer)[0][:3], first[0])
    assert turns.of(x.bfloat16())[0].dtype == torch.bfloat16
    places = torch.tensor([[2, 0, 1]])
    torch.testing.assert_close(turns.of(x, places)[1][0, 0, 1:], first[1][:2])
    torch.testing.assert_close(turns.of(x, places + 1)[1][0, 0, 1], first[1][1])
