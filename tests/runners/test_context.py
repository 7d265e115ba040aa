"""Pieces of sequences: dealt out and brought back in their order, and as much of causal attention for every rank."""

from types import SimpleNamespace

import pytest
import torch

from runners.engine.context import dealt, in_order, part_of, spans_of, to_heads, to_tokens


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("per_rank", [6, 7])
def test_what_is_dealt_out_comes_back_in_its_order(size, per_rank):
    whole = torch.arange(2 * size * per_rank * 3).reshape(2, size * per_rank, 3)
    groups = [SimpleNamespace(size=size, place=place) for place in range(size)]
    parts = torch.stack([part_of(whole, group) for group in groups], 1)
    assert parts.shape == (2, size, per_rank, 3)
    assert torch.equal(in_order(parts, 1), whole)
    assert torch.equal(dealt(whole, size, 1), parts)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_have_as_much_of_causal_attention(size):
    """Token i attends to i + 1: each rank's tokens to as many together, where they can be halved."""
    tokens = 4 * size
    attended = []
    for place in range(size):
        spans = spans_of(tokens, SimpleNamespace(size=size, place=place))
        assert sum(end - begin for begin, end in spans) == 4
        attended.append(sum(i + 1 for begin, end in spans for i in range(begin, end)))
    assert len(set(attended)) == 1


class _Swap:
    """A group of two whose ranks are asked in turn: what each has sent is there when both were asked once."""

    size = 2

    def __init__(self, rank, sent):
        self.rank, self.sent = rank, sent

    def swap(self, blocks):
        self.sent[self.rank] = blocks
        return torch.stack([self.sent.get(source, blocks)[self.rank] for source in range(self.size)])


def test_tokens_are_exchanged_for_heads_and_back():
    """Every rank has its heads of all tokens in their order, and after the way back all heads of its own tokens."""
    whole = torch.arange(2 * 4 * 8 * 3.0).reshape(2, 4, 8, 3)
    mine = [part.contiguous() for part in dealt(whole, 2, 2).unbind(2)]
    there, back = {}, {}
    for _ in range(2):
        heads = [to_heads(mine[r], -mine[r], 2 * mine[r], _Swap(r, there)) for r in range(2)]
    for rank, (query, key, value) in enumerate(heads):
        expected = whole[:, 2 * rank : 2 * rank + 2]
        assert torch.equal(query, expected) and torch.equal(key, -expected) and torch.equal(value, 2 * expected)
    for _ in range(2):
        tokens = [to_tokens(heads[r][0], _Swap(r, back)) for r in range(2)]
    assert all(torch.equal(got, own) for got, own in zip(tokens, mine, strict=True))
