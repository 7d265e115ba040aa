"""Pieces of sequences: dealt out and brought back in their order, and as much of causal attention for every rank."""

from types import SimpleNamespace

import pytest
import torch

from runners.engine.context import dealt, in_order, part_of, spans_of


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
