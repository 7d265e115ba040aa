"""Plans side by side, their timelines, and what notebooks show of them."""

import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

import polygon
from polygon.api import plots
from polygon.cost.step_times import step_times
from polygon.formats import files

SMALL = polygon.Effort(fluid_evaluations=300, exact_evaluations=12, patience=150)
EVIL = "<b>x</b>"


def problem_of(name="two-campus", **settings):
    cluster = polygon.Cluster.from_yaml(f"instances/{name}.yaml")
    return polygon.Problem(cluster, "gpt3-1.3b", polygon.Batch(global_batch=32, seq_len=512), **settings)


@pytest.fixture(scope="module")
def plan():
    return problem_of().search(effort=SMALL).plan


@pytest.fixture(scope="module")
def front():
    return problem_of().front(effort=SMALL)


def test_a_plan_beside_itself_differs_in_nothing(plan):
    """Speed-up 1, every ratio 1 (or nothing by nothing), and no clear winner."""
    same = plan.compare(plan)
    assert same.speedup == 1 and not same.is_clear
    assert all(row.ratio == 1 or row.this == row.other == 0 for row in same.differences)


def test_a_comparison_turned_around_is_its_inverse(plan, front):
    """What one gains the other loses; terms of both add up to their steps."""
    other = front.plans[-1]
    there, back = plan.compare(other), other.compare(plan)
    assert there.speedup * back.speedup == pytest.approx(1) and there.is_clear == back.is_clear
    values = {row.quantity: row for row in there.differences}
    terms = [row for row in there.differences if row.quantity.removesuffix("_s") in plan.evaluate().terms]
    assert sum(row.this for row in terms) == pytest.approx(values["step_s"].this)
    assert sum(row.other for row in terms) == pytest.approx(values["step_s"].other)
    assert str(there).count("\n") == len(there.differences)
    assert there.to_dict()["speedup"] == there.speedup


def test_plans_of_other_work_are_not_compared(plan):
    """Another batch is another size of step: one line that names it."""
    cluster = plan.problem.cluster
    other = polygon.Problem(cluster, "gpt3-1.3b", polygon.Batch(global_batch=64, seq_len=512))
    with pytest.raises(polygon.InputError, match=r'^other\.batch: found "Batch\(global_batch=64'):
        plan.compare(polygon.Plan(other, plan.data))
    with pytest.raises(polygon.InputError, match=r"^other: found nothing, expected a polygon\.Plan$"):
        plan.compare(None)


def test_a_timeline_ends_with_the_step_and_nobody_computes_twice_at_once(plan):
    """Every micro-batch forward and backward in every stage; a worker's computations do not overlap."""
    timeline = plan.timeline()
    computed = [i for i in timeline if i.kind == "compute"]
    assert len(computed) == 2 * plan.data.micro_batches * plan.stages
    for place in {(i.stage, i.worker) for i in computed}:
        mine = sorted((i.start_s, i.end_s) for i in computed if (i.stage, i.worker) == place)
        assert all(b[0] >= a[1] * (1 - 1e-9) for a, b in pairwise(mine))
    times = step_times(plan.data, plan.problem.tables)
    assert max(i.end_s for i in timeline if i.kind != "send") == pytest.approx(float(np.max(times.done_s)))
    one = plan.timeline(most_workers=1)
    assert len({(i.stage, i.worker) for i in one}) == 1 and set(one) < set(timeline)
    with pytest.raises(polygon.InputError, match="most_workers: found 0"):
        plan.timeline(0)


def test_a_front_is_ordered_and_nothing_on_it_is_beaten(front):
    """Fastest first, cheapest last, every plan runs."""
    assert len(front) == len(front.plans) == len(front.bills) > 0
    for before, after in pairwise(front.bills):
        assert before.step_s < after.step_s and before.usd > after.usd
    assert all(plan.violations() == [] for plan in front.plans)


def test_a_front_within_limits_that_nobody_keeps_says_why():
    """No plan, and the bill of one that exceeds the deadline."""
    none = problem_of(constraints=polygon.Constraints(most_step_s=1e-6)).front(effort=SMALL)
    assert len(none) == 0 and none.plans == () and none.over.step_s > 1e-6 and "of which 1e-06" in str(none.reason)


def test_exports_are_those_of_the_command(plan, tmp_path):
    """Files in a folder; without one, only returned; an unknown target is one line."""
    made = plan.export("slurm", tmp_path / "job")
    assert {path.name for path in (tmp_path / "job").iterdir()} == set(made.files)
    assert files.read_plan(tmp_path / "job" / "plan.json").plan.device_ranks == plan.data.device_ranks
    assert plan.export("slurm").files == made.files
    with pytest.raises(polygon.InputError, match="target: found 'slrm', expected 'slurm'"):
        plan.export("slrm")


def pictures(plan, front):
    yield plan.plot_map()
    yield plan.plot_stages()
    yield plan.plot_timeline()
    yield plan.problem.cluster.plot_map()
    yield front.plot()


def test_pictures_are_figures_with_named_axes(plan, front, tmp_path):
    """Each has a title, axes with units, something drawn, and can be saved; none touches pyplot's global state."""
    matplotlib = pytest.importorskip("matplotlib")
    for number, figure in enumerate(pictures(plan, front)):
        assert isinstance(figure, matplotlib.figure.Figure)
        drawn = [artist for axes in figure.axes for artist in (*axes.patches, *axes.collections, *axes.lines)]
        assert drawn and all(axes.get_xlabel() for axes in figure.axes)
        assert figure.get_suptitle() or any(axes.get_title() for axes in figure.axes)
        figure.savefig(tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 3000
        assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    assert "matplotlib.pyplot" not in sys.modules or matplotlib.pyplot.get_fignums() == []


def test_without_matplotlib_a_picture_is_one_line():
    """The error says what to install; nothing else of the API needs it."""
    program = (
        "import sys; sys.modules['matplotlib'] = None\nimport polygon\n"
        "lab = polygon.Cluster.from_yaml('instances/two-campus.yaml')\n"
        "try: lab.plot_map()\nexcept polygon.InputError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == "plot_map: found no matplotlib, expected it (pip install matplotlib)\n"


def test_regions_without_places_lie_as_far_apart_as_their_latency():
    """Where latencies are distances of a plane, scaling gives them back; given places are kept."""
    rng = np.random.default_rng(3)
    where = rng.uniform(0, 50, (5, 2))
    apart = np.linalg.norm(where[:, None] - where[None], axis=-1)
    names = [f"r{i}" for i in range(5)]
    node = {"device": "t4", "count": 1, "devices_per_node": 1}
    links = [
        {"between": [names[i], names[j]], "latency_ms": float(apart[i, j]), "bandwidth_gbps": 1}
        for i in range(5)
        for j in range(i)
    ]
    cluster = polygon.Cluster.from_dict({"regions": [{"name": n, "nodes": [node]} for n in names], "links": links})
    places, on_earth = plots.region_places(cluster.data)
    assert not on_earth
    assert np.allclose(np.linalg.norm(places[:, None] - places[None], axis=-1), apart, atol=1e-6)
    placed = {"name": "a", "nodes": [node], "latitude": 10, "longitude": 20}
    assert plots.region_places(polygon.Cluster.from_dict({"regions": [placed]}).data)[0].tolist() == [[20, 10]]


def test_notebooks_get_tables_and_no_markup_of_others(plan, front):
    """Well-formed tables; a name with markup is text."""
    result = problem_of().search(effort=SMALL)
    hopeless = polygon.Problem(plan.problem.cluster, "gpt3-175b", polygon.Batch(global_batch=8, seq_len=2048))
    shown = [plan, front, plan.compare(plan), plan.problem.cluster, result, hopeless.search(effort=SMALL)]
    node = {"device": "t4", "count": 1, "devices_per_node": 1}
    shown.append(polygon.Cluster.from_dict({"name": EVIL, "regions": [{"name": EVIL, "nodes": [node]}]}))
    for thing in shown:
        text = thing._repr_html_()
        assert text.startswith("<table>") and text.endswith("</table>")
        for tag in ("table", "tr", "td", "th"):
            assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>")
        assert EVIL not in text
