"""The parity ledger: what its rows promise, and what levels allow."""

from dataclasses import replace

import pytest

from polygon.cost import convergence as parity
from polygon.cost.transfers import matrix_values, packed_bytes
from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.model import Batch
from polygon.domain.plan import COMPRESSIONS, PARITY_LEVELS, Constraints, Problem
from polygon.formats import catalogue
from tests.exported_plans import wide
from tests.small_problems import small_cluster

ALL = (*parity.TRAFFIC, "local_steps")


def problem_of(model="gpt3-1.3b", **constraints):
    return Problem(
        cluster=small_cluster(2, 2),
        model=catalogue.model(model),
        batch=Batch(global_batch=8, seq_len=512),
        constraints=Constraints(**constraints),
    )


@pytest.mark.parametrize("traffic", ALL)
def test_every_row_has_a_level_and_every_lossy_one_its_evidence(traffic):
    """Levels are known; whatever changes the numbers says what was shown and by whom."""
    for kind, row in parity.rows(traffic).items():
        assert row.level in PARITY_LEVELS
        assert row.parameters[0] < row.parameters[1]
        if kind not in ("none", 1):
            assert row.level != "exact"
            assert row.shown and row.source


@pytest.mark.parametrize("traffic", parity.TRAFFIC)
def test_ratios_are_those_of_the_cost_model(traffic):
    """bf16 activations and fp32 weight gradients shrink by the row's ratio (to 2 %); the ledger knows all kinds."""
    model = catalogue.model("gpt3-1.3b")
    element_bytes = 4 if traffic == "weight_gradients" else 2
    values = matrix_values(model)
    for mode, row in parity.rows(traffic).items():
        if mode == "powersgd":  # its ratio grows with the matrices
            continue
        ratio = values * element_bytes / packed_bytes(values, element_bytes, mode, values)
        assert ratio == pytest.approx(row.ratio, rel=0.02)
    assert set(parity.rows("weight_gradients")) == set(COMPRESSIONS)


def test_levels_are_nested_and_begin_with_nothing_lossy():
    """Each level allows what the one before does; `exact` allows the numbers themselves in every step alone."""
    for model in ("gpt2", "gpt3-1.3b", "gpt3-175b"):
        before = parity.allowed(problem_of(model, parity="exact"))
        assert (before.activations, before.weight_gradients, before.local_steps) == (("none",), ("none",), (1,))
        for level in PARITY_LEVELS[1:]:
            now = parity.allowed(problem_of(model, parity=level))
            assert all(set(getattr(before, name)) <= set(getattr(now, name)) for name in ALL)
            before = now


def test_known_is_known_for_the_sizes_shown_only():
    """Local steps are known for 1.3e9 parameters to 100 of them, for 175e9 not at all; any level allows them all."""
    assert max(parity.allowed(problem_of("gpt3-1.3b", parity="known")).local_steps) == 100
    assert parity.allowed(problem_of("gpt3-175b", parity="known")).local_steps == (1,)
    assert max(parity.allowed(problem_of("gpt3-175b", parity="any")).local_steps) == 500


def test_a_steps_row_stands_for_fewer_steps_too():
    """17 local steps need what 30 need; more than any row has are known nowhere."""
    problem = problem_of("gpt3-1.3b")
    assert parity.level_needed(problem, "local_steps", 17) == "known"
    assert parity.level_needed(problem, "local_steps", 1) == "exact"
    assert parity.level_needed(problem, "local_steps", 5000) == "any"
    assert parity.level_needed(problem_of("gpt2"), "local_steps", 200) == "known"


def test_what_no_row_speaks_of_needs_the_last_level():
    """PowerSGD of activations can be written in a plan: it is named as what nobody has shown, not a fault."""
    problem, plan = wide()
    assert parity.level_needed(problem, "activations", "powersgd") == PARITY_LEVELS[-1]
    links = tuple(replace(use, activations="powersgd", activation_gradients="powersgd") for use in plan.links)
    lines = parity.assumptions(problem, replace(plan, links=links))
    shown = parity.NOTHING_SHOWN.shown
    kinds = [line["what"] for line in lines if line["shown"] == shown]
    assert kinds == [Message(f"loss.{name}", mode="powersgd") for name in ("activations", "activation_gradients")]


def test_lists_in_the_constraints_take_the_ledgers_place():
    """A list of packings holds for all messages that can be packed so; a list of steps beside it."""
    may = parity.allowed(problem_of(compressions=("none", "int4", "powersgd"), local_steps=(1, 7)))
    assert (may.activations, may.weight_gradients) == (("none", "int4"), ("none", "int4", "powersgd"))
    assert may.local_steps == (1, 7)
    wider = parity.at_parity(problem_of(compressions=("none",)), "any")
    assert "topk" in parity.allowed(wider).activations


def test_constraints_refuse_levels_and_steps_that_are_none():
    """One line with the nearest level; no steps below 1."""
    with pytest.raises(InputError, match="parity: found 'knwon', expected 'known'"):
        Constraints(parity="knwon")
    with pytest.raises(InputError, match="local_steps: found 0"):
        replace(Constraints(), local_steps=(0,))
