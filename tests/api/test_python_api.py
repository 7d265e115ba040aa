"""Laws of the Python API: cheap to import, the same answers as the commands, and every outcome as a result."""

import copy
import dataclasses
import doctest
import importlib
import inspect
import json
import math
import pickle
import pkgutil
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import polygon
from polygon.__main__ import main
from polygon.api import choices, inputs, planner
from polygon.commands import cli
from polygon.domain import clock
from polygon.planning.efforts import EFFORTS
from polygon.planning.objectives import OBJECTIVES

ROOT = Path(__file__).resolve().parents[2]
SMALL = polygon.Effort(fluid_evaluations=300, exact_evaluations=12, patience=150)
NODE = {"device": "a100-40gb", "count": 1, "devices_per_node": 2}
PAIR = {
    "name": "pair",
    "regions": [
        {"name": "near", "nodes": [NODE]},
        {"name": "far", "nodes": [{"device": "t4", "count": 1, "devices_per_node": 2}]},
    ],
    "links": [{"between": ["near", "far"], "latency_ms": 20, "bandwidth_gbps": 1}],
}


def pair_problem(**settings):
    batch = polygon.Batch(global_batch=16, seq_len=512)
    return polygon.Problem(polygon.Cluster.from_dict(PAIR), "opt-350m", batch, **settings)


@pytest.fixture(scope="module")
def result():
    return pair_problem().search(effort=SMALL)


def test_importing_polygon_imports_nothing_else():
    """Neither the numerical libraries nor anything of the planner is loaded before a name is used."""
    program = (
        "import sys, polygon; dir(polygon)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('numba', 'scipy', 'pydantic', 'numpy', 'yaml')"
        " or m.startswith('polygon.')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_is_there_documented_and_no_modules():
    """A module of a public name would take its place once imported; the one that there is refuses to be."""
    assert set(dir(polygon)) == {*polygon.__all__, "__version__"}
    for name in polygon.__all__:
        assert inspect.getdoc(getattr(polygon, name)), name
    modules = {module.name for module in pkgutil.iter_modules(polygon.__path__)}
    assert modules & set(polygon.__all__) == {"calibrate"}
    with pytest.raises(ImportError, match=r"polygon\.commands\.calibrate"):
        importlib.import_module("polygon.calibrate")
    assert callable(polygon.calibrate)
    with pytest.raises(AttributeError, match="'Plann'"):
        _ = polygon.Plann


def test_the_command_of_a_functions_name_still_runs():
    """`python -m polygon.calibrate` is the command, `polygon.calibrate` the function."""
    done = subprocess.run(
        [sys.executable, "-m", "polygon.calibrate", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: polygon calibrate")


WITH_EXAMPLES = sorted(
    f"polygon.{'.'.join(path.relative_to(ROOT / 'polygon').with_suffix('').parts)}".removesuffix(".__init__")
    for path in (ROOT / "polygon").rglob("*.py")
    if "\n    >>> " in (text := path.read_text("utf-8")) or "\n>>> " in text
)


def test_modules_with_examples_are_found():
    """Those of the API at least."""
    assert {"polygon", "polygon.api.inputs", "polygon.api.planner"} <= set(WITH_EXAMPLES)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_hold(module):
    """What docstrings show is what happens."""
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0 and found.failed == 0


def public_functions():
    """The API's functions, classes and their methods, by dotted name; not records of deeper layers."""
    for name in polygon.__all__:
        thing = getattr(polygon, name)
        if not thing.__module__.startswith("polygon.api."):
            continue
        yield name, thing
        if inspect.isclass(thing):
            for part, member in inspect.getmembers(thing, callable):
                if not part.startswith("_") and part in vars(thing):
                    yield f"{name}.{part}", member


FUNCTIONS = dict(public_functions())
MADE_BY_POLYGON = ("Comparison", "Front", "Milestone", "Result")
"""Records that are handed out: their fields say for themselves what they are."""


@pytest.mark.parametrize(("name", "function"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_every_parameter_is_explained(name, function):
    """A docstring each; where a function has several parameters, or a class any, the section names each of them."""
    text = inspect.getdoc(function)
    assert text and text.split("\n")[0].endswith(".")
    names = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
    if (len(names) < 2 and not inspect.isclass(function)) or name in MADE_BY_POLYGON:
        return
    section = text.split("Parameters\n")[1]
    for parameter in names:
        assert re.search(rf"^\S.*\b{parameter}\b|^{parameter}\b", section, re.MULTILINE), parameter


def test_words_of_a_search_are_those_of_the_planner():
    """Type, command line and planner agree on what may be asked for."""
    assert set(choices.OBJECTIVES) == set(OBJECTIVES)
    assert set(choices.get_args(choices.EffortName)) == set(EFFORTS)


def test_effort_in_rounds_ends_at_the_gap_that_was_asked_for():
    """A wide gap ends after the first round, none lets all run; the plan is no worse for more of them."""
    problem = pair_problem()
    effort = dataclasses.replace(SMALL, rounds=3)
    one, all_of_them = (problem.search(effort=effort, until_gap=part) for part in (1e6, 0.0))
    assert one.evaluations == problem.search(effort=SMALL).evaluations < all_of_them.evaluations
    assert one.estimate.step_s >= all_of_them.estimate.step_s
    with pytest.raises(polygon.InputError, match="until_gap"):
        problem.search(objective="money", until_gap=0.1)
    with pytest.raises(polygon.InputError, match="effort: found 0"):
        problem.search(effort=0)


@pytest.mark.parametrize("objective", ["money", "energy", "tokens-per-usd"])
def test_a_gap_is_over_what_no_plan_can_beat_in_what_was_to_be_least(objective):
    """Not in time, in which a cheap plan may be as slow as it likes; and so says the report."""
    found = pair_problem().search(effort=SMALL, objective=objective)
    bounds, priced = found.plan.bounds, found.estimate
    least, value = (bounds.energy_j, priced.energy_j) if objective == "energy" else (bounds.usd, priced.cost_usd)
    assert 0 <= found.gap == pytest.approx(value / least - 1)
    assert (
        f"none costs less than {bounds.usd:.3g} USD (gap {bounds.gap(priced, 'money'):.0%}), or"
        in found.plan.describe()
    )
    assert f"{found.gap:.1%}" in found._repr_html_()


def test_nothing_is_above_what_is_free():
    """Own cards without a price: nan, and the report tells of energy alone."""
    lab = {"regions": [{"name": "lab", "nodes": [NODE | {"price_usd_per_hour": 0}]}]}
    problem = polygon.Problem(polygon.Cluster.from_dict(lab), "gpt2", polygon.Batch(global_batch=8, seq_len=128))
    found = problem.search(effort=SMALL, objective="money")
    assert math.isnan(found.gap) and "nan" not in found._repr_html_()
    assert "              none draws less than" in found.plan.describe()
    tpus = {"regions": [{"name": "lab", "nodes": [{"device": "tpu-v5e", "count": 1, "devices_per_node": 4}]}]}
    problem = polygon.Problem(polygon.Cluster.from_dict(tpus), "gpt2", polygon.Batch(global_batch=8, seq_len=128))
    text = problem.search(effort=SMALL, objective="energy").plan.describe()
    assert "; tpu-v5e at 0 USD an hour; tpu-v5e at 0 W\n" in text and "none " not in text


def test_a_result_has_plan_estimate_bound_and_history(result):
    """bound <= step, the gap between them, and a history that only improves within a phase."""
    assert result.status == "feasible" and result.reason is None
    assert result.plan.violations() == []
    assert result.estimate == result.plan.evaluate()
    assert result.bound.seconds <= result.estimate.step_s
    assert result.gap == pytest.approx(result.estimate.step_s / result.bound.seconds - 1)
    assert result.evaluations > 0 and result.history
    for before, after in pairwise(result.history):
        assert after.seconds >= before.seconds
        assert after.phase != before.phase or after.value < before.value
    assert result.history[-1].value >= result.estimate.step_s * (1 - 1e-9)


def test_results_travel_between_processes(result):
    """What a pool's worker gives back, and a copy, says the same as here; prices are not sent along."""
    for sent in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert sent.plan.data.stages == result.plan.data.stages
        assert sent.plan.evaluate() == sent.estimate == result.estimate
        assert sent.bound == result.bound
        problem = sent.plan.problem
        assert "tables" not in pickle.loads(pickle.dumps(problem)).__dict__
        assert polygon.Plan(problem, result.plan.data).evaluate() == result.estimate


def test_the_command_finds_the_same_plan(result, tmp_path, capsys):
    """`polygon search` is this search: the same seed and effort, the same plan and numbers."""
    problem = pair_problem()
    problem.cluster.save(tmp_path / "pair.yaml")
    whole = problem.search(effort="thorough", seed=3)
    options = ["--model", "opt-350m", "--global-batch", "16", "--seq-len", "512", "--seed", "3", "--json"]
    out = tmp_path / "plan.json"
    assert cli.run(main, ["search", "--cluster", str(tmp_path / "pair.yaml"), *options, "-o", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step_s"] == whole.estimate.step_s and printed["gap"] == whole.gap
    again = polygon.load(out)
    assert isinstance(again, polygon.Plan) and again.evaluate() == whole.estimate
    whole.plan.save(tmp_path / "saved.json")
    assert (tmp_path / "saved.json").read_text() == out.read_text()
    assert result.estimate.step_s >= whole.estimate.step_s * (1 - 0.2)


def test_progress_is_told_and_may_end_the_search():
    """A KeyboardInterrupt from the callback keeps the best so far."""
    told = []

    def progress(phase, part, best):
        told.append((phase, part, best))
        if len(told) == 2:
            raise KeyboardInterrupt

    stopped = pair_problem().search(effort=SMALL, progress=progress)
    assert len(told) >= 2 and all(0 <= part <= 1 for _, part, _ in told)
    assert stopped.status == "interrupted"
    assert stopped.plan is not None and stopped.plan.violations() == []


def test_who_interrupts_does_not_wait_for_the_bound(monkeypatch):
    """It is as whole as a moment allows; asked for by itself it is whole."""
    monkeypatch.setattr(planner, "BOUND_AFTER_INTERRUPT_S", 0.0)

    def progress(*told):
        raise KeyboardInterrupt

    stopped = pair_problem().search(effort=SMALL, progress=progress)
    assert stopped.status == "interrupted" and stopped.bound.cut_short
    assert not stopped.plan.problem.bound().cut_short


def test_what_does_not_fit_is_a_result_with_its_reason():
    """No plan, no estimate, no gap; the reason says by how much."""
    found = polygon.Problem(
        polygon.Cluster.from_dict(PAIR), "gpt3-175b", polygon.Batch(global_batch=8, seq_len=2048)
    ).search(effort=SMALL)
    assert (found.status, found.plan, found.estimate, found.bound, found.gap) == ("infeasible", None, None, None, None)
    assert found.reason.kind == "reason.too_large" and found.reason["lacking_bytes"] > 0


def test_a_small_problem_is_proved_and_nothing_found_is_better(result):
    """The exhaustive method's plan is at least as fast as any other method's, and above the bound."""
    problem = pair_problem(constraints=polygon.Constraints(most_stages=2))
    proved = problem.search(method="exhaustive", effort=SMALL)
    grid = problem.search(method="grid3d")
    assert proved.status == "proved" and grid.status == "feasible"
    assert problem.bound().seconds <= proved.estimate.step_s <= grid.estimate.step_s * (1 + 1e-9)
    assert proved.estimate.step_s <= problem.search(effort=SMALL).estimate.step_s * (1 + 1e-9)


def refuse_to_begin(*told):
    """Progress of a search that must not have begun."""
    raise AssertionError(told)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"objective": "tme"}, "objective: found 'tme', expected 'time' \\(nearest\\)"),
        ({"objective": None}, "objective: found nothing, expected one of energy, money, time"),
        ({"until_gap": "a"}, "until_gap: found 'a', expected a number >= 0"),
        ({"method": "magic"}, "method: found 'magic'"),
        ({"effort": 1.5}, "effort: found 1.5, expected quick, thorough, long, a whole number or a polygon.Effort"),
        ({"effort": True}, "effort: found True, expected a whole number >= 1"),
        ({"effort": "quik"}, "effort: found 'quik', expected 'quick' \\(nearest\\)"),
        ({"method": "exhaustive", "objective": "money"}, "objective: found 'money'"),
        ({"method": "grid3d", "until_gap": 0.1}, "until_gap: found 0.1, expected the objective time and the method"),
        ({"robust": True, "objective": "money"}, "objective: found 'money', expected time for a robust plan"),
        ({"configurations": "x.json"}, "configurations: found 'x.json', expected none, but of the method grid3d"),
    ],
)
def test_unknown_words_are_refused(words, message):
    """One line that says what is allowed, before anything is searched."""
    with pytest.raises(polygon.InputError, match=message):
        pair_problem().search(progress=refuse_to_begin, **words)
    assert issubclass(polygon.InputError, polygon.PolygonError)


@pytest.mark.parametrize("ask", ["search", "front"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"seed": -1}, "seed: found -1, expected a whole number >= 0"),
        ({"seed": "a"}, "seed: found 'a', expected a whole number >= 0"),
        ({"time_limit_s": float("nan")}, "time_limit_s: found nan, expected a number >= 0"),
        ({"time_limit_s": -1}, "time_limit_s: found -1, expected a number >= 0"),
        ({"groups": 5}, "groups: found 5, expected a polygon.Groups"),
        ({"progress": 5}, "progress: found 5, expected a function"),
    ],
)
def test_seeds_and_limits_that_are_none_are_refused(ask, words, message):
    """As the commands do, and not by an error of the random numbers."""
    with pytest.raises(polygon.InputError) as refused:
        getattr(pair_problem(), ask)(**{"effort": SMALL, **words})
    assert str(refused.value) == message


def test_numbers_of_arrays_are_numbers():
    """As from a loop over `numpy.arange`; what is saved of them is JSON."""
    batch = polygon.Batch(global_batch=np.int64(8), seq_len=np.int32(512))
    assert batch == polygon.Batch(global_batch=8, seq_len=512)
    assert type(batch.global_batch) is type(batch.seq_len) is int


def test_inputs_that_do_not_fit_together_are_refused_at_once():
    """Sequences longer than the model's positions, a region that does not exist, a model that nobody knows."""
    with pytest.raises(polygon.InputError, match=r"batch\.seq_len"):
        polygon.Problem(polygon.Cluster.from_dict(PAIR), "opt-350m", polygon.Batch(global_batch=8, seq_len=4096))
    with pytest.raises(polygon.InputError, match="forbidden_regions: found 'fr'"):
        pair_problem(constraints=polygon.Constraints(forbidden_regions=("fr",)))
    with pytest.raises(polygon.InputError, match="found model 'opt-351m', expected 'opt-350m'"):
        polygon.Model.from_catalogue("opt-351m")


def test_calibration_and_profiles_change_what_is_predicted(result):
    """A factor of two on every device's compute is felt; the plan's file holds no measurement."""
    twice = polygon.Calibration(compute={"a100-40gb": 2.0, "t4": 2.0})
    slower = polygon.Plan(pair_problem(calibration=twice), result.plan.data).evaluate()
    # What is seen of ZeRO's traffic beside compute does not double.
    assert slower.terms["compute"] == pytest.approx(2 * result.estimate.terms["compute"], rel=0.02)
    assert slower.sources["compute"] == "calibrated run"


CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}


def test_anything_is_loaded_by_its_content(result, tmp_path):
    """Plans, groups, problems, clusters, models and measurements, whatever their files are called."""
    kinds = {}

    def written(name, text):
        path = tmp_path / name
        path.write_text(text)
        kinds[name] = type(polygon.load(path))
        return path

    plan = tmp_path / "a"
    result.plan.save(plan)
    for brief in (False, True):
        said = result.plan.to_dict(brief=brief)
        assert json.loads(json.dumps(said, allow_nan=False)) == said
    problem = json.loads(plan.read_text())["problem"]
    written("b", json.dumps(problem))
    hosts = written("c", "node-0 slots=4 type=a100-40gb\nnode-1 slots=4 type=t4\n")
    config = written("d", json.dumps(CONFIG))
    written("e", json.dumps(polygon.Calibration().to_dict()))
    written("f", json.dumps(PAIR))
    model = written("g", json.dumps(polygon.Model.from_hf(CONFIG).to_dict()))
    groups = tmp_path / "h"
    pair = tmp_path / "f"
    wanted = ["--model", "opt-350m", "--global-batch", "16", "--seq-len", "512", "--stages", "2", "--quiet"]
    assert cli.run(main, ["init", str(pair), *wanted, "-o", str(groups)]) == 0
    kinds["a"], kinds["h"] = type(polygon.load(plan)), type(polygon.load(groups))
    names = ["Plan", "Problem", "Cluster", "Model", "Calibration", "Cluster", "Model", "Groups"]
    assert {name: kind.__name__ for name, kind in kinds.items()} == dict(zip("abcdefgh", names, strict=True))
    assert polygon.Cluster.from_hostfile(hosts).devices == 8
    assert polygon.Model.from_hf(config).parameters == polygon.Model.from_yaml(model).parameters
    assert polygon.Problem.from_file(tmp_path / "b").cluster.to_dict() == result.plan.problem.cluster.to_dict()
    sailor = polygon.load("instances/measured/sailor_profiles.json")
    assert isinstance(sailor, tuple) and len(sailor) > 1
    assert polygon.load("instances/ptafm-7dc.txt").to_dict()["regions"]
    from_groups = polygon.Problem.of(polygon.load(groups).problem).search(groups=polygon.load(groups), effort=SMALL)
    assert from_groups.status == "feasible"


def test_hosts_without_a_type_have_the_one_that_is_given(tmp_path):
    """A line's own type stays; without either the line is refused."""
    hosts = tmp_path / "hostfile"
    hosts.write_text("n1 slots=8\nn2 slots=4 type=T4\n", "utf-8")
    cluster = polygon.Cluster.from_hostfile(hosts, device="h100-sxm")
    found = {(pool.device.name, pool.nodes, pool.devices_per_node) for pool in cluster.data.pools}
    assert found == {("h100-sxm", 1, 8), ("t4", 1, 4)}
    with pytest.raises(polygon.InputError, match="line 1: found 'n1 slots=8' without a type"):
        polygon.Cluster.from_hostfile(hosts)


@pytest.mark.parametrize("field", ["cluster", "model", "batch", "runtime", "constraints", "calibration"])
def test_a_problem_names_the_part_that_is_of_another_kind(field):
    """A path in place of what is read from it, numbers in place of a batch."""
    parts = {
        "cluster": polygon.Cluster.from_dict(PAIR),
        "model": "opt-350m",
        "batch": polygon.Batch(global_batch=8, seq_len=512),
    }
    with pytest.raises(polygon.InputError, match=f"^{field}: found 3, expected a polygon.{field.capitalize()}$"):
        polygon.Problem(**{**parts, field: 3})
    for profiles in ("cpu.json", ["cpu.json"], [(3,)]):
        with pytest.raises(
            polygon.InputError, match=r"^profiles\[0\]: found .*, expected one of those that polygon.load"
        ):
            polygon.Problem(**parts, profiles=profiles)


def test_a_whole_run_is_of_some_tokens():
    """None costs nothing, or takes for ever."""
    problem = polygon.Problem(polygon.Cluster.from_dict(PAIR), "opt-350m", polygon.Batch(global_batch=8, seq_len=512))
    plan = problem.search(effort="quick").plan
    for tokens in (0, -1, math.nan, math.inf, "1e9"):
        with pytest.raises(polygon.InputError, match=r"^tokens: found .*, expected a number > 0$"):
            plan.whole_run(tokens)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (polygon.load, '{"weather": 1}', "x: content: found the keys weather, expected a plan, groups"),
        (polygon.load, "[1, 2]", "x: content: found list"),
        (polygon.load, '{"format": "polygon-plan"}', "x: "),
        (polygon.Model.from_hf, '{"regions": 1}', "x: config: found the keys regions"),
        (polygon.Cluster.from_hostfile, "regions: []", "x: line 1: found 'regions: \\[\\]'"),
    ],
)
def test_other_files_are_refused_in_one_line(read, text, message, tmp_path, monkeypatch):
    """File, place, found, expected."""
    monkeypatch.chdir(tmp_path)
    Path("x").write_text(text)
    with pytest.raises(polygon.InputError, match=f"^{message}") as error:
        read("x")
    assert "\n" not in str(error.value)


def test_a_cluster_written_is_the_cluster_read(tmp_path):
    """Dictionary, file and object say the same."""
    cluster = polygon.Cluster.from_dict(PAIR)
    cluster.save(tmp_path / "pair.yaml")
    assert inputs.Cluster.from_yaml(tmp_path / "pair.yaml").to_dict() == cluster.to_dict()
    assert polygon.Cluster.from_dict(cluster.to_dict()).to_dict() == cluster.to_dict()


def test_thorough_polishes_what_is_nearly_as_good():
    """On six devices an effort that polishes its best plan alone ends at 0.6607 s."""
    problem = polygon.Problem.from_file(ROOT / "instances" / "native" / "tiny-6-three-labs.yaml")
    assert problem.search(effort="thorough").estimate.step_s < 0.99 * 0.6607


def test_a_time_limit_is_one_of_the_whole_answer(monkeypatch, tmp_path):
    """A search that leaves nothing for the bound has a plan with a weaker one, which its file keeps; asked for by
    itself the bound is whole."""
    now_s, find = [0.0], planner.find_within_limits

    def late(*args, **more):
        now_s[0] += 100
        return find(*args, **{**more, "effort": SMALL})

    monkeypatch.setattr(clock, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(planner, "find_within_limits", late)
    problem = pair_problem()
    found = problem.search(time_limit_s=5)
    assert found.bound.cut_short and found.bound.seconds <= problem.bound().seconds
    found.plan.save(tmp_path / "plan.json")
    said = json.loads((tmp_path / "plan.json").read_text())["estimate"]
    assert said["bound_cut_short"] is True and said["lower_bound_s"] == found.bound.seconds
    assert "; no time for stages and regions)" in found.plan.describe()
    assert not problem.bound().cut_short and found.bound.cut_short
    whole = problem.search(time_limit_s=1e9)
    assert not whole.bound.cut_short and "no time" not in whole.plan.describe()


def test_what_is_good_enough_is_worked_out_within_the_limit_too(monkeypatch):
    """Until a gap is reached: the bound that says so has a part of the time alone."""
    asked = []
    monkeypatch.setattr(clock, "perf_counter", lambda: 0.0)
    bound = planner.lower_bound
    monkeypatch.setattr(planner, "lower_bound", lambda tables, **how: asked.append(how) or bound(tables, **how))
    pair_problem().search(effort=SMALL, time_limit_s=100, until_gap=1e6)
    first, last = (how["seconds_left"]() for how in asked)
    assert first == 100 * planner.BOUND_PART < last == 100
