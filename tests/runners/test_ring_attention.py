"""Keys and values that pass round a ring: what each rank computes, and that it trains as one rank does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from polygon.domain.errors import InputError
from polygon.domain.uniform import ParallelConfig
from polygon.formats import catalogue
from runners.engine.context import part_of
from runners.engine.options import Options
from runners.engine.ring_attention import check_ring, part_of_ring, ring_attention
from tests.real_ranks import run_ranks
from tests.runners.test_every_dimension import planned
from tests.runners.test_training import run_rank
from tests.runners.test_windows import LLAMA

OPTIONS = Options(steps=3, learning_rate=3e-3, clip_norm=0.5)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("per_rank", [4, 5])
def test_every_query_meets_every_key_before_it_once(size, per_rank):
    """Whole pieces as they are, the own ones causally; of two pieces a rank everyone has as much at every step."""
    halved, tokens = per_rank % 2 == 0, size * per_rank
    places = [part_of(torch.arange(tokens)[None], SimpleNamespace(size=size, place=p))[0] for p in range(size)]
    met = torch.zeros(tokens, tokens, dtype=torch.int64)
    for step in range(size):
        computed = []
        for own in range(size):
            others = (own - step) % size
            part = part_of_ring(own, others, per_rank, halved=halved)
            if part is None:
                assert not halved and others > own
                continue
            for i in places[own][part.queries].tolist():
                for j in places[others][part.keys].tolist():
                    met[i, j] += not part.causal or j <= i
            computed.append(len(places[own][part.queries]) * len(places[others][part.keys]))
        assert len(set(computed)) <= 1
    assert torch.equal(met, torch.ones(tokens, tokens, dtype=torch.int64).tril())


class Neighbours:
    """A ring of ranks whose tensors wait in a table: each rank computes alone, one after another."""

    def __init__(self, table, place, size):
        self.table, self.place, self.size, self.turn = table, place, size, 0

    def pass_on(self, x):
        self.table[self.turn, (self.place + 1) % self.size] = x.clone()
        key, self.turn = (self.turn, self.place), self.turn + 1
        shape = x.shape
        return lambda: self.table.get(key, torch.zeros(shape))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("per_rank", [6, 5])
def test_outputs_and_gradients_are_those_of_whole_attention(kv_heads, per_rank):
    """Three ranks; what is passed on is repeated until it has come round."""
    size, tokens = 3, 3 * per_rank
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, tokens, 8) for heads in (4, kv_heads, kv_heads)]
    whole = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator)
    repeated = [whole[0], *(x.repeat_interleave(4 // kv_heads, 1) for x in whole[1:])]
    expected = functional.scaled_dot_product_attention(*repeated, is_causal=True)
    gradients = torch.autograd.grad((expected * weight).sum(), whole)

    groups = [SimpleNamespace(size=size, place=place) for place in range(size)]

    def mine(x, place):
        return part_of(x.detach().transpose(1, 2), groups[place]).transpose(1, 2)

    table, parts = {}, [[mine(x, p).requires_grad_() for x in whole] for p in range(size)]
    for _ in range(2 * size):  # every round one more of the messages is right
        found = []
        for place in range(size):
            out = ring_attention(*parts[place], Neighbours(table, place, size), halved=per_rank % 2 == 0)
            found.append((out, torch.autograd.grad((out * mine(weight, place)).sum(), parts[place])))
    for place, (out, own) in enumerate(found):
        torch.testing.assert_close(out, mine(expected, place), rtol=0, atol=2e-6)
        for ours, theirs in zip(own, gradients, strict=True):
            torch.testing.assert_close(ours, mine(theirs, place), rtol=0, atol=5e-6)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_ring_trains_as_one_rank_does(recompute):
    """Of four real ranks; the same plan under the usual runtime exchanges heads instead."""
    problem, plan = planned(LLAMA, ParallelConfig(cp=4, recompute=recompute))
    ring = replace(problem, runtime=catalogue.runtime("polygon-ring"))
    [expected] = run_ranks(run_rank, 1, *planned(LLAMA, ParallelConfig()), OPTIONS)
    for losses in run_ranks(run_rank, 4, ring, plan, OPTIONS):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_the_kernel_of_gpus_takes_16_bits_alone():
    """Said in one line before a step; cores take what there is."""
    check_ring(torch.device("cpu"), torch.float32)
    check_ring(torch.device("cuda"), torch.bfloat16)
    with pytest.raises(InputError, match=r"batch\.precision: found torch\.float32 with a ring of keys, expected bf16"):
        check_ring(torch.device("cuda"), torch.float32)
