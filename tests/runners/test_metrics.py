"""Figures of all ranks together: a case worked out by hand, and clocks that differ."""

import json
import math
from dataclasses import replace

import pytest

from polygon.cost.compute import model_flops_per_step
from polygon.export.measured import placed
from runners.engine.metrics import StepFigures, flat
from runners.engine.summary import summarise, write_steps
from tests.routed_plans import plain_plan
from tests.small_problems import routed_problem


def lines(offset_s=0.0):
    """Two ranks of two stages for one step; the clock of rank 1 is ahead by `offset_s`.

    Rank 0 hands over F0 at 1.0 s and is done at 6.0; it waits for B0 from 2.0 to 5.5, handed over at 5.0. Rank 1 waits
    for F0 from 0.5 to 1.25 and is done at 5.0. All sums are there at 6.5. In an outer step they wait from 7.0 and from
    7.5 to 9.0.
    """
    common = {
        "step": 4, "loss": 2.0, "gradient_norm": 1.0, "seconds": 10.0, "tokens_per_s": 25.6, "together": True,
        "start_s": 1000.0, "reduced_s": 6.5, "device_memory": {},
        "seconds_by_kind": {"compute": 4.0, "forward": 1.0, "backward": 3.0, "wait": 2.0, "exposed": 0.5},
    }  # fmt: skip
    first = {
        "handed_s": {"F0": 1.0}, "waited_s": {"B0": [2.0, 5.5]}, "schedule_end_s": 6.0, "clock_offset_s": 0.0,
        "outer_s": [7.0, 9.0],
        "idle": 0.5, "memory_bytes": 10, "packing_error": {"activations": 0.01}, "sent_bytes": {"1": 100},
    }  # fmt: skip
    second = {
        "handed_s": {"B0": 5.0}, "waited_s": {"F0": [0.5, 1.25]}, "schedule_end_s": 5.0, "clock_offset_s": offset_s,
        "outer_s": [7.5, 9.0],
        "idle": 0.3, "memory_bytes": 30, "packing_error": {"activations": 0.02, "weight_gradients": 0.1},
        "sent_bytes": {"0": 50},
    }  # fmt: skip
    return [common | first, common | second | {"start_s": 1000.0 + offset_s}]


@pytest.mark.parametrize("offset_s", [0.0, 3.25])
def test_waits_are_parted_into_bubble_and_exposed_communication(offset_s):
    """Bubble until the neighbour hands over or the last rank is done, exposed communication after that."""
    problem, plan = routed_problem(2)
    first, second = StepFigures(problem, plan).waits(lines(offset_s))
    assert first == pytest.approx((3.0 + 0.5, 0.5 + 0.5 + 1.5))
    assert second == pytest.approx((0.5 + 1.0, 0.25 + 0.5 + 1.5))


def test_figures_of_a_step_are_those_of_all_ranks():
    """Sums of bytes by direction, means of waits, the largest memory and error; MFU by the planner's own FLOP."""
    problem, plan = routed_problem(2)
    merged = StepFigures(problem, plan).merge(lines())
    assert merged["mfu"] == pytest.approx(model_flops_per_step(problem.model, problem.batch) / (10.0 * 2 * 1e10))
    assert merged["bubble"] == pytest.approx((3.5 + 1.5) / 2 / 10)
    assert merged["exposed_communication"] == pytest.approx((2.5 + 2.25) / 2 / 10)
    assert merged["link_bytes"] == {"region-0 -> region-1": 100, "region-1 -> region-0": 50}
    assert merged["seconds_by_part"] == {"forward": 1.0, "backward": 3.0, "optimizer": 0.0, "communication": 2.5}
    assert (merged["cross_region_bytes"], merged["memory_bytes"], merged["idle"]) == (150, 30, 0.4)
    assert merged["packing_error"] == {"activations": 0.02, "weight_gradients": 0.1}
    named = dict(flat(json.loads(json.dumps(merged))))
    assert named["link_bytes/region-0 -> region-1"] == 100
    assert all(isinstance(value, int | float) for value in named.values())


@pytest.mark.parametrize(("seconds", "step_s"), [([9], 9), ([9, 1], 1), ([9, 1, 3], 2), ([9, 1, 3, 1, 3, 8], 2)])
def test_a_runs_step_is_the_usual_pair_without_its_first(tmp_path, seconds, step_s):
    """Regions that lead by turns make steps alternate: their mean, and none of a step that opens connections."""
    for rank, line in enumerate(lines()):
        steps = [{**line, "type": "step", "step": n, "seconds": float(s)} for n, s in enumerate(seconds)]
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert summarise(*routed_problem(2), tmp_path)["median_step_s"] == step_s


def test_a_runs_bytes_are_those_of_all_its_steps(tmp_path):
    """Of local steps only every third sends anything, the last one too: a third of its bytes a step."""
    for rank, line in enumerate(lines()):
        steps = [{**line, "type": "step", "step": n} | ({} if n % 3 == 2 else {"sent_bytes": {}}) for n in range(6)]
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert summarise(*routed_problem(2), tmp_path)["cross_region_bytes_per_step"] == 150 / 3


def test_between_outer_steps_ranks_wait_for_their_own_region():
    """With local updates the other region's last rank is nobody's bubble: what is waited for then is communication."""
    problem, plan = routed_problem(2)
    apart = [line | {"together": False} for line in lines()]
    first, second = StepFigures(problem, plan).waits(apart)
    assert first == pytest.approx((3.0 + 0.5, 0.5 + 0.5 + 1.5))
    assert second == pytest.approx((0.5 + 0.0, 0.25 + 1.5 + 1.5))


def test_bytes_within_a_region_cross_none_and_the_largest_of_every_memory_counts():
    """Four ranks in two regions; a kind that a rank does not name is 0 there."""
    problem, plan = routed_problem(4)
    line = lines()[0] | {"waited_s": {}, "seconds_by_kind": {"forward": 1.0, "reduce": 1.0}}
    ranks = [
        line | {"sent_bytes": {"1": 7, "2": 11}, "device_memory": {"weights": 4, "peak": 9}},
        line | {"sent_bytes": {"0": 5}, "device_memory": {"weights": 6}},
        line | {"sent_bytes": {"3": 3, "0": 2}, "device_memory": {"weights": 1, "peak": 2}},
        line | {"sent_bytes": {}, "device_memory": {"weights": 2}, "packing_error": {}},
    ]
    merged = StepFigures(problem, plan).merge(ranks)
    assert merged["link_bytes"] == {
        "region-0 -> region-0": 12, "region-0 -> region-1": 11, "region-1 -> region-0": 2, "region-1 -> region-1": 3
    }  # fmt: skip
    assert merged["cross_region_bytes"] == 13
    assert merged["device_memory"] == {"weights": 6, "peak": 9}
    assert merged["packing_error"] == {"activations": 0.01}
    assert merged["model_flops_per_s"] == pytest.approx(model_flops_per_step(problem.model, problem.batch) / 10)
    assert (merged["step"], merged["loss"], merged["seconds"]) == (4, 2.0, 10.0)
    assert StepFigures(problem, plan, step_flops=8e10).mfu(2.0) == pytest.approx(8e10 / (2.0 * 4 * 1e10))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("F3", (1, "F3")),
        ("recv B12.1", (3, "recv B12")),
        ("send F0.1", (3, "send F0")),
        ("reduce blocks.3", (1, "reduce blocks.3")),
    ],
)
def test_intervals_of_several_stages_are_told_apart(name, expected):
    """A worker of the second of two groups holds stages 1 and 3."""
    plan = replace(plain_plan(4, 1, 2, span=1), chunks=2)
    assert placed(plan, 1, name) == expected


def test_lines_of_steps_are_json_where_a_loss_is_no_number(tmp_path):
    """NaN and infinity, which JSON lacks and other readers refuse, are null."""
    write_steps(tmp_path / "run.jsonl", [{"loss": math.nan, "seconds_by_part": {"forward": math.inf}}, {"loss": 1.5}])
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert lines == ['{"loss": null, "seconds_by_part": {"forward": null}}', '{"loss": 1.5}']
