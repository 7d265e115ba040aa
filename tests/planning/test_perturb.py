"""Plans that small changes do not reach: places of groups, chunks, packings that follow."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polygon.cost.tables import CostTables
from polygon.domain.plan import LinkUse, Plan
from polygon.formats.files import read_problem
from polygon.planning.checker import violations
from polygon.planning.decode import Decoder
from polygon.planning.efforts import EFFORTS
from polygon.planning.perturb import improved, perturbations, swapped
from polygon.planning.polish import fitted, interleavings
from polygon.planning.search_engine import find_plan

NATIVE = Path(__file__).parents[2] / "instances" / "native"


@pytest.fixture(scope="module")
def labs() -> Decoder:
    """Six devices in three places."""
    return Decoder(read_problem(NATIVE / "tiny-6-three-labs.yaml"))


@pytest.fixture(scope="module")
def quick(labs: Decoder) -> Plan:
    """What a quick search finds there."""
    plan = find_plan(labs.problem, np.random.default_rng(0), effort=EFFORTS["quick"], tables=labs.tables).plan
    assert plan is not None and len(plan.stages) > 2
    return plan


def test_workers_change_places_and_layers_stay(quick):
    """With their routes and spans; the same change again gives the plan back, but for what is recomputed."""
    last = len(quick.stages) - 1
    other = swapped(quick, 0, last)
    assert other.stages[0].workers == quick.stages[last].workers
    assert [(s.first_layer, s.last_layer) for s in other.stages] == [
        (s.first_layer, s.last_layer) for s in quick.stages
    ]
    assert (other.routes[:, 0] == quick.routes[:, last]).all() and other.spans[0] == quick.spans[last]
    back = swapped(other, 0, last)
    assert [s.workers for s in back.stages] == [s.workers for s in quick.stages]
    assert (back.routes == quick.routes).all() and back.spans == quick.spans


def test_groups_of_several_chunks_change_places_in_all():
    """A worker stays with all its chunks; what is recomputed is left to `fitted`."""
    problem = read_problem(NATIVE / "small-8-a100-experts.yaml")
    plan = find_plan(problem, np.random.default_rng(0), effort=EFFORTS["quick"]).plan
    assert plan is not None
    plan = plan if plan.chunks > 1 else next(interleavings(plan))
    other = swapped(plan, 0, 1)
    for c in range(plan.chunks):
        assert other.stages[2 * c].workers == plan.stages[2 * c + 1].workers == plan.stages[1].workers
    tables = CostTables(problem)
    fits = fitted(other, tables)
    assert fits is not None and violations(problem, fits, tables) == []


def test_neighbours_change_places_first(quick):
    """And in plans of many groups they alone do."""
    count = len(quick.stages)
    drafts = [draft for draft in perturbations(quick) if draft.chunks == 1]
    moved = [[a.workers != b.workers for a, b in zip(d.stages, quick.stages, strict=True)].index(True) for d in drafts]
    assert len(drafts) == count * (count - 1) // 2 and moved[: count - 1] == list(range(count - 1))
    stage = replace(quick.stages[0], last_layer=1)
    stages = tuple(replace(stage, first_layer=n, last_layer=n + 1) for n in range(12))
    many = replace(quick, stages=stages, routes=np.zeros((4, 12), int), spans=((1,),) * 12)
    assert sum(draft.chunks == 1 for draft in perturbations(many)) == 11


def test_a_change_of_places_pays_once_packings_and_borders_follow(labs):
    """A thorough search of this problem without it ended at 0.6534 s."""
    found = find_plan(labs.problem, np.random.default_rng(0), effort=EFFORTS["thorough"], tables=labs.tables)
    assert found.value_s < 0.99 * 0.6534


def test_what_comes_out_is_never_worse_and_keeps_the_rules(labs, quick):
    """Links that pack badly are packed anew; without evaluations or time, the plan itself comes back."""
    unpacked = replace(quick, links=tuple(LinkUse(source=u.source, target=u.target) for u in quick.links))
    better = improved(unpacked, labs, evaluations=30)
    assert labs.plan_value(better) < labs.plan_value(unpacked)
    assert violations(labs.problem, better, labs.tables) == []
    assert improved(quick, labs, evaluations=0) is quick
    assert improved(quick, labs, evaluations=30, expired=lambda: True) is quick
