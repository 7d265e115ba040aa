"""All recipes that come along: the small ones run and agree with one process, the large ones fit their devices."""

import json
import re
from pathlib import Path

import pytest

from runners.recipes.backends import Job
from runners.recipes.backends.engine_backend import problem_and_plan
from runners.recipes.needs import needs, stage_parameters
from runners.recipes.recipe_schema import read_recipe
from runners.recipes.replicas.zero import said_if_slow
from runners.train import main
from tests.nightly import at_night
from tests.patience import eventually
from tests.real_programs import ran
from tests.small_problems import small_model

FOLDER = Path("instances/recipes")
SMALL = sorted(FOLDER.glob("llm-*-tiny.yaml"))
LARGE = sorted(set(FOLDER.glob("llm-*.yaml")) - set(SMALL))
TRAINED = ("4d", "moe", "zero", *at_night("1d", "2d", "3d", "5d"))
"""Every degree of parallelism above 1, and ZeRO."""


def test_small_recipes_agree_with_one_process(tmp_path):
    """Small language recipes train; losses are those of one process to 1e-5, peaks as predicted to 20 %."""
    recipes = [FOLDER / f"llm-{name}-tiny.yaml" for name in TRAINED]
    words = ["--table", *recipes, "--json", "--steps", "2", "--set", f"data.cache={tmp_path / 'cache'}"]
    code, out, said = ran(main, [*words, "-o", tmp_path], Path.cwd())
    assert code == 0, said[-4000:]
    rows = json.loads(out)
    assert [row["recipe"] for row in rows] == [path.stem for path in recipes]
    for row in rows:
        assert row["steps"] == 2 and row["largest_difference"] < 1e-5
        assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.2)


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_small_recipes_fit_a_processor(path, capsys):
    """All of them can be planned, with as many ranks as their degrees say."""
    assert len(SMALL) >= 7
    recipe = read_recipe(path)
    rows = needs(*problem_and_plan(Job(recipe, FOLDER, Path())))
    assert sum(row["ranks"] for row in rows) == recipe.parallel.world_size
    assert main([str(path), "--check"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == recipe.parallel.pp


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_large_recipes_fit_their_devices(path, capsys):
    """Qwen2.5-3B's shape: 3.09e9 parameters, split as the degrees say, within the devices' memory."""
    recipe = read_recipe(path)
    problem, plan = problem_and_plan(Job(recipe, FOLDER, Path()))
    parallel, model = recipe.parallel, problem.model
    rows = needs(problem, plan)
    assert sum(row["ranks"] for row in rows) == parallel.world_size
    if not model.experts:
        assert model.parameters == pytest.approx(3.086e9, rel=1e-3)
    # A tied head that is apart from the embedding is a second copy; norms and biases are on every device.
    copies = model.head_weight_parameters() if parallel.pp > 1 and model.tied_embeddings else 0
    experts = 0 if not model.experts else model.blocks * model.experts * 3 * model.hidden_size * model.expert_ffn_size
    expected = (model.parameters - experts + copies) / parallel.tp + experts / parallel.tp / parallel.ep
    assert sum(row["parameters"] for row in rows) == pytest.approx(expected, rel=1e-3)
    assert main([str(path), "--check"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == parallel.pp


def test_too_little_memory_is_said(capsys):
    """Without splitting anything the recipe does not fit a T4: exit code 3, and by how much."""
    assert main([str(FOLDER / "llm-1d.yaml"), "--check", "--set", "hardware.device=t4"]) == 3
    assert "GB more than its devices have" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model",
    [
        small_model(),
        small_model(tied_embeddings=False, gated_mlp=True, rms_norm=True, learned_positions=False, linear_bias=False),
        small_model(experts=4, experts_per_token=2, expert_ffn_size=32, shared_experts=1),
    ],
)
def test_built_layers_have_the_parameters_that_the_planner_counts(model):
    """Whole layers on the meta device have as many parameters as `Model.layer_parameters` says."""
    assert stage_parameters(model, 0, model.layers) == model.parameters
    for layer in range(model.layers - 1):
        assert stage_parameters(model, layer, layer + 1) == model.layer_parameters(layer)


def test_a_table_marks_what_cannot_run_and_shows_the_rest(tmp_path):
    """Finished rows are not thrown away; the reason stands in the row and on stderr, and the exit code is not 0."""
    broken = tmp_path / "broken.yaml"
    broken.write_text(f"{SMALL[0].read_text()}\nbackend: plan\nplan: none.json\n")
    words = ["--table", broken, SMALL[0], "--steps", "2", "--set", f"data.cache={tmp_path / 'cache'}", "-o", tmp_path]
    code, out, said = ran(main, words, Path.cwd())
    assert code == 1, said[-4000:]
    lines = out.splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| broken | - | plan | cannot run: ") and "none.json" in lines[2]
    assert lines[3].startswith(f"| {SMALL[0].stem} | ") and "cannot run" not in lines[3]
    assert re.search(r"^train: broken: .*none\.json", said, re.MULTILINE)
    assert "Traceback" not in said


def test_a_start_that_takes_long_is_said(capfd):
    """Once, while it goes on; nothing is said of a short one."""
    with said_if_slow("still compiling", 30.0):
        pass
    said = []

    def has_spoken():
        said.append(capfd.readouterr().err)
        return any(said)

    with said_if_slow("still compiling", 0.05):
        assert eventually(has_spoken)
    assert "".join([*said, capfd.readouterr().err]) == "still compiling\n"
