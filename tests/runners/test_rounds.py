"""When regions that train by themselves meet, and when fragments of their weights are exchanged."""

from dataclasses import replace

import pytest
import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.line import SumLine
from polygon_comm.members import members_of
from polygon_comm.reduction import SumGroup
from polygon_comm.transport import Wires
from torch import nn
from torch.distributed import HashStore

from polygon.domain.errors import InputError
from runners.engine.gradients import Bucket
from runners.engine.options import Options
from runners.engine.rounds import Rounds
from tests.patience import PATIENCE_S

OPTIONS = Options(steps=20, synchronous_steps=0, outer_rate=1.0, outer_momentum=0.0)


@pytest.fixture
def rounds_of():
    """Rounds of one rank in one region, whose outer steps change nothing."""
    lines = []

    def rounds(local_steps, names=("blocks.0", "blocks.1", "blocks.2"), common="", **options):
        wires = Wires(HashStore(), 0, {}, address="127.0.0.1", timeout_s=PATIENCE_S, accelerator=Accelerator())
        group = SumGroup(members_of("one", [0], {0: 0}), wires)
        buckets = [Bucket(name, {"w": nn.Parameter(torch.ones(2))}, group) for name in names]
        for bucket in buckets:
            bucket.fraction = None if bucket.name == common else 1.0
        lines.append(SumLine(Accelerator()))
        return Rounds(buckets, group, local_steps, replace(OPTIONS, **options), lines[-1])

    yield rounds
    for line in lines:
        line.close()


def test_regions_are_alone_after_the_first_steps(rounds_of):
    """A fifth of all, if nothing else is said; never with one local step."""
    assert [rounds_of(4).alone(step) for step in (0, 7)] == [True, True]
    default = rounds_of(4, synchronous_steps=None)  # 20 // 5
    assert [default.alone(step) for step in (0, 3, 4, 5)] == [False, False, True, True]
    assert not rounds_of(1).alone(7)


def test_all_meet_at_the_end_of_a_round(rounds_of):
    """Every third step after the first two, which all are."""
    rounds = rounds_of(3, synchronous_steps=2)
    assert [step for step in range(12) if rounds.meets(step, wanted=False)] == [0, 1, 4, 7, 10]
    # Fragments in turn, or exchanges that may take a step: only where it is wanted.
    for streams in ({"outer_fragments": 2}, {"outer_overlap": 1}):
        rounds = rounds_of(4, **streams)
        assert not any(rounds.meets(step, wanted=False) for step in range(12))
        assert [step for step in range(12) if rounds.meets(step, wanted=True)] == [3, 7, 11]


def test_fragments_go_in_turn_and_arrive_later(rounds_of):
    """Of two, by every fourth step: one after 4, 8, ... steps, the other in between; each ends a step later."""
    rounds = rounds_of(4, outer_fragments=2, outer_overlap=1)
    weights = {name: outer.weights for name, outer in rounds.outer.items()}
    changed = []
    for step in range(8):
        for tensor in weights.values():
            tensor += 1.0
        changed.append(rounds.go_on(step, stop=False))
    # Fragment 1 begins after 2 and 6 steps, fragment 0 after 4 and 8.
    first, second = {"blocks.0", "blocks.2"}, {"blocks.1"}
    assert changed == [set(), set(), second, set(), first, set(), second, set()]
    starts = {name: outer.start.tolist() for name, outer in rounds.outer.items()}
    assert starts == {"blocks.0": [5, 5], "blocks.1": [7, 7], "blocks.2": [5, 5]}
    assert all(tensor.tolist() == [9, 9] for tensor in weights.values())
    assert rounds.meet() == first | second
    assert {tuple(outer.start.tolist()) for outer in rounds.outer.values()} == {(9, 9)}


def test_without_overlap_an_exchange_ends_in_its_step(rounds_of):
    """And where all go at once nothing is begun in between."""
    rounds = rounds_of(4, outer_fragments=2)
    first, second = {"blocks.0", "blocks.2"}, {"blocks.1"}
    assert [rounds.go_on(step, stop=False) for step in range(5)] == [set(), second, set(), first, set()]
    assert not any(rounds_of(4).go_on(step, stop=False) for step in range(8))


def test_what_both_ends_hold_is_in_the_first_fragment(rounds_of):
    """Tied weights have another place on the other stage."""
    rounds = rounds_of(4, ("blocks.0", "tied", "blocks.1", "blocks.2"), outer_fragments=2)
    for tensor in (outer.weights for outer in rounds.outer.values()):
        tensor += 1.0
    rounds.go_on(1, stop=False)  # the second fragment
    moved = [name for name, outer in rounds.outer.items() if outer.start.tolist() == [2, 2]]
    assert moved == ["blocks.2"]


def test_who_wants_to_stop_is_heard_with_the_next_whole_round(rounds_of):
    """Said with the first fragment; then all meet where the next round ends."""
    rounds = rounds_of(4, outer_fragments=2)
    rounds.go_on(1, stop=True)
    assert not rounds.meets(3, wanted=False)
    rounds.go_on(3, stop=True)
    assert rounds.meets(7, wanted=False) and not rounds.meets(5, wanted=False)
    rounds.go_on(7, stop=False)
    assert not rounds.meets(11, wanted=False)


def test_only_what_regions_sum_apart_is_exchanged(rounds_of):
    """A bucket without a part of the samples belongs to all regions in every step."""
    rounds = rounds_of(2, common="blocks.1")
    assert list(rounds.outer) == ["blocks.0", "blocks.2"]
    for outer in rounds.outer.values():
        outer.weights.fill_(5.0)
    rounds.restart()
    assert all(outer.start.tolist() == [5, 5] for outer in rounds.outer.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"outer_fragments": 5}, "--outer-fragments: found 5"), ({"outer_overlap": 5}, "--outer-overlap: found 5")],
)
def test_exchanges_fit_into_a_round(rounds_of, options, message):
    """As many fragments as local steps at most, and a step or more for each; borders included."""
    with pytest.raises(InputError, match=message):
        rounds_of(4, **options)
    with pytest.raises(InputError, match=r"fragments \(2\)"):
        rounds_of(4, outer_fragments=2, outer_overlap=3)
    rounds_of(4, outer_fragments=4, outer_overlap=1)
    rounds_of(4, outer_fragments=2, outer_overlap=2)
    rounds_of(1, **options)
