"""From allocation to allocation: in other classes, with idle devices, and which of several outcomes is better."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from polygon.domain.message import Message
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.planning import nearby
from polygon.planning.decode import Allocation, Decoder, carried_over
from polygon.planning.nearby import Outcome, best_of, best_starts, better_of, fresh_starts, with_idle
from tests.linked_regions import cluster_of, small_gpt

PROBLEM = Problem(
    cluster=cluster_of([[("a100-40gb", 1, 4)], [("t4", 1, 2)]]),
    model=small_gpt(),
    batch=Batch(global_batch=8, seq_len=512),
    constraints=Constraints(most_stages=3),
)


@pytest.fixture(scope="module")
def decoder():
    """Four fast devices on a node, two slow ones far away."""
    return Decoder(PROBLEM)


def allocation(decoder, *rows, **more):
    """Stages as numbers of workers by (pool, degree)."""
    workers = np.zeros((3, len(decoder.classes)), dtype=np.int64)
    for s, row in enumerate(rows):
        for key, count in row.items():
            workers[s, decoder.classes.index(key)] = count
    return Allocation(workers=workers, micro_batch_size=more.pop("size", 1), **more)


def rows_of(decoder, x):
    """The other way."""
    return [{decoder.classes[c]: int(row[c]) for c in np.flatnonzero(row)} for row in x.workers]


def ended(step_s):
    """A plan that can be run."""
    return Outcome(plan=None, bill=SimpleNamespace(step_s=step_s))


def test_only_classes_that_the_other_problem_has_are_carried_over(decoder):
    """Workers in their stages, empty ones left out; no more stages than it may have."""
    only = replace(PROBLEM, constraints=Constraints(most_stages=2, forbidden_regions=("r0",)))
    other = Decoder(only, tables=decoder.tables.for_problem(only))
    x = allocation(decoder, {(0, 1): 2}, {}, {(1, 1): 1, (0, 2): 1}, cp=2)
    found = carried_over(x, decoder, other)
    assert found.workers.shape == (2, len(other.classes))
    assert rows_of(other, found) == [{}, {(1, 1): 1}]
    assert (found.cp, found.micro_batch_size) == (2, 1)
    free = replace(PROBLEM, constraints=Constraints(most_stages=1))
    one = Decoder(free, tables=decoder.tables.for_problem(free))
    assert rows_of(one, carried_over(x, decoder, one)) == [{(0, 1): 2}]


def test_idle_devices_join_one_stage_or_all(decoder):
    """Two of the first pool at degree 1 and 2: as whole workers, the larger part first."""
    x = allocation(decoder, {(0, 1): 1}, {(1, 1): 1})
    found = [rows_of(decoder, y)[:2] for y in with_idle(decoder, x, 0, 3)]
    assert found == [
        [{(0, 1): 4}, {(1, 1): 1}],
        [{(0, 1): 1}, {(1, 1): 1, (0, 1): 3}],
        [{(0, 1): 3}, {(1, 1): 1, (0, 1): 1}],
        [{(0, 1): 1, (0, 2): 1}, {(1, 1): 1}],
        [{(0, 1): 1}, {(1, 1): 1, (0, 2): 1}],
        [{(0, 1): 1, (0, 2): 1}, {(1, 1): 1}],
    ]
    # Of two parts of a sequence each: a worker of one device at either part.
    found = [rows_of(decoder, y)[0] for y in with_idle(decoder, replace(x, cp=2), 0, 3)]
    assert found[0] == {(0, 1): 3}
    assert len(found) == 3
    assert not list(with_idle(decoder, x, 1, 0))


def test_a_fresh_look_is_at_half_and_twice_the_size(decoder, monkeypatch):
    """The own allocation first, none twice, no more than `MOST_STARTS` beside it."""
    own = allocation(decoder, {(0, 1): 4}, size=2)
    found = fresh_starts(decoder, own)
    assert found[0] is own
    assert {x.micro_batch_size for x in found} == {1, 2, 4}
    assert len({(x.micro_batch_size, x.workers.tobytes()) for x in found[1:]}) == len(found) - 1
    monkeypatch.setattr(nearby, "MOST_STARTS", len(found) - 1)
    assert len(fresh_starts(decoder, own)) == len(found)
    monkeypatch.setattr(nearby, "MOST_STARTS", 3)
    few = fresh_starts(decoder, own)
    assert len(few) == 4
    assert [x.workers.tobytes() for x in (few[1], few[-1])] == [x.workers.tobytes() for x in (found[1], found[-1])]


def test_the_best_starts_come_first(decoder):
    """By the relaxation; those that nothing can be made of are left out."""
    fast, slow = allocation(decoder, {(0, 1): 4}), allocation(decoder, {(1, 1): 1})
    none = allocation(decoder)
    assert best_starts(decoder, [slow, none, fast], 3) == [fast, slow]
    assert best_starts(decoder, [slow, none, fast], 1) == [fast]


def test_the_shorter_step_is_better_and_any_is_better_than_none():
    """Of equal ones the first."""
    none = Outcome(reason=Message("reason.no_such_plan"))
    one, same, less = ended(2.0), ended(2.0), ended(1.0)
    assert better_of(one, less) is less and better_of(less, one) is less
    assert better_of(one, same) is one
    assert better_of(none, one) is one and better_of(one, none) is one and better_of(none, none) is none


def test_the_best_of_several_is_priced_exactly(decoder):
    """Its allocation is with it; of none, or of what memory does not hold, a reason."""
    fast, slow = allocation(decoder, {(0, 1): 4}), allocation(decoder, {(1, 1): 1})
    found = best_of(decoder, [slow, fast])
    assert found.allocation is fast
    assert found.bill.step_s <= decoder.bill(decoder.decode(fast)).step_s
    assert best_of(decoder, [slow]).allocation is slow
    assert best_of(decoder, []).reason.kind == "reason.no_such_plan"
    assert best_of(decoder, [allocation(decoder)]).bill is None
    assert best_of(decoder, [fast, slow], tries=0).bill is None
