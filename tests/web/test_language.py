"""One catalogue of words: the server speaks the language that it is asked for, and knows its own sentences."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from polygon.domain.errors import InputError
from polygon.export.targets import TARGETS, export
from polygon.parity import NOTHING_SHOWN, TRAFFIC, rows
from polygon.planning.engine import Effort, find_plan
from polygon.planning.explain import Explainer
from polygon.planning.whatif import usual_changes
from polygon.schema import ProblemSpec, check
from polygon.web.jobs import problem_of
from polygon.web.language import PLACE, catalogue, in_chinese, in_language, preferred
from polygon.web.views import view
from polygon.web.whatif import Changes, price
from tests.exported_plans import drawn, planned, wide

PHRASE = re.compile(r"[a-z]{3,} [a-z]{3,}")
"""Two English words in a row: no name of a model, a device, a unit or an option has them."""


@pytest.mark.parametrize(
    ("header", "language"),
    [("", "en"), ("de", "en"), ("zh-CN,zh;q=0.9,en;q=0.8", "zh"), ("en-US,zh;q=0.9", "en"), ("fr, zh;q=0.2", "zh"),
     ("en;q=x, zh", "zh"), ("*", "en")],
)  # fmt: skip
def test_the_better_of_two_languages_is_chosen(header, language):
    """By the weights of Accept-Language; English for everybody else."""
    assert preferred(header) == language


def test_both_languages_have_every_word_and_the_same_places():
    """No entry is empty, and a template names in Chinese what it names in English."""
    words = catalogue()
    for english, chinese in [*words["page"].values(), *words["server"]]:
        assert english and chinese
        assert sorted(PLACE.findall(english)) == sorted(PLACE.findall(chinese)), english


def test_no_template_hides_another():
    """Every template, its places filled with numbers, is put into its own Chinese."""
    for english, chinese in catalogue()["server"]:
        text = PLACE.sub("7", english)
        assert in_chinese(text) == PLACE.sub("7", chinese), english


def test_names_stay_as_they_are():
    """Only words are translated: a region called like a word of the catalogue keeps its name."""
    text = "regions[0].name: found 'weights', expected one of head, time"
    assert in_chinese(text) == "regions[0].name：得到 'weights'，应为以下之一：head, time"
    assert in_chinese("Thus spoke nobody") is None


def sentences():
    """What the planner says of plans: views, formulas, explanations, losses, reasons, faults of input."""
    for problem, plan in (planned(), wide()):
        priced = price(problem, plan, Changes())
        shown = view(priced)
        yield shown["estimate"]["limited_by"]
        for stage in shown["stages"]:
            yield stage["layers"]
            yield from (worker["memory_owner"] for worker in stage["workers"])
        yield from (idea for idea, _, _ in Explainer(problem, plan).ideas())
        nothing = np.zeros((len(problem.cluster.regions),) * 2)
        yield from (change.text for change in usual_changes(problem, nothing))
        for target in TARGETS:
            result = export(problem, plan, target)
            if result is not None:
                yield from (loss.what for loss in result.losses)
                yield from result.notes
    for problem, plan, tables in drawn(8):
        for target in ("deepspeed", "megatron"):
            result = export(problem, plan, target, tables=tables)
            if result is not None:
                yield from (loss.what for loss in result.losses)
    yield from reasons()
    yield from faults()


def reasons():
    """Why problems have no plan."""
    cluster = {"regions": [{"name": "a", "nodes": [{"device": "t4", "count": 1, "devices_per_node": 2}]}]}
    batch = {"global_batch": 4, "seq_len": 512}
    asked = (
        ("gpt3-175b", {}), ("gpt3-1.3b", {"memory_headroom": 0.6}), ("opt-350m", {"forbidden_devices": ["t4"]}),
        ("opt-350m", {"most_step_s": 1e-6}),
    )  # fmt: skip
    for model, limits in asked:
        problem = problem_of({"cluster": cluster, "model": model, "batch": batch, "constraints": limits})
        effort = Effort(fluid_evaluations=50, exact_evaluations=2)
        found = find_plan(problem, np.random.default_rng(0), effort=effort)
        assert found.plan is None
        yield found.reason


def faults():
    """Lines of the validator."""
    good = {"cluster": {"regions": [{"name": "a", "nodes": [{"device": "t4", "count": 1}]}]}, "model": "opt-350m",
            "batch": {"global_batch": 4, "seq_len": 512}}  # fmt: skip
    changes = (
        {"constraints": {"memory_headroom": 2.0}}, {"constraints": {"most_stages": 0}}, {"model": "opt"},
        {"constraints": {"forbidden_regions": ["b"]}}, {"batch": {"global_batch": 4}}, {"extra": 1},
        {"batch": {"global_batch": -1, "seq_len": 512}}, {"cluster": {"regions": []}}, {"constraints": []},
        {"batch": {"global_batch": 4, "seq_len": 512, "precision": "bf17"}},
    )  # fmt: skip
    for change in changes:
        with pytest.raises(InputError) as fault:
            problem_of(good | change)
        yield str(fault.value)
    with pytest.raises(InputError) as fault:
        check(ProblemSpec, good)
    yield str(fault.value)


def test_every_sentence_of_the_server_has_a_chinese_one():
    """Met in real plans, exports, explanations and faults: a template fits each, and leaves no English phrase."""
    seen = set(sentences())
    assert len(seen) > 60
    unknown = {text for text in seen if in_chinese(text) is None}
    assert unknown == set()
    phrases = {text for text in seen if PHRASE.search(in_chinese(text)) and "python -m" not in text}
    assert phrases == set()


def test_every_row_of_the_parity_ledger_has_a_chinese_one():
    """Evidence and caveats of every kind, and that of none; papers keep their names."""
    known = [row for traffic in (*TRAFFIC, "local_steps") for row in rows(traffic).values() if row.shown]
    for row in [*known, NOTHING_SHOWN]:
        for text in (row.shown, f"{row.shown}; {row.caveat}" if row.caveat else row.shown):
            chinese = in_chinese(f"int8 activations (safe): {text} [{row.source}]")
            assert chinese is not None and not PHRASE.search(chinese.split(" [")[0]), chinese
    assert in_chinese(NOTHING_SHOWN.source) and in_chinese("none for this scheme")


def written(module: Path):
    """What a module can say of bad input: texts of errors, of what was found and of what is expected."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(str(v.value) if isinstance(v, ast.Constant) else "7" for v in node.values)
        return str(node.value) if isinstance(node, ast.Constant) else ""

    tree = ast.parse(module.read_text("utf-8"))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        position = {"require": 3, "_refuse": 1, "HTTPException": 1, "InputError": 0, "Phrase": 0}.get(name)
        if position is not None and len(call.args) > position:
            yield text(call.args[position])
        elif name == "append" and module.stem == "violations":
            yield text(call.args[0])


def test_what_the_code_of_the_server_can_say_of_bad_input_has_a_chinese_one():
    """Read from the source of every module that the server loads, so that a new line without one is found."""
    list_modules = "import sys, polygon.web.app as app; print(*(m.__file__ for k, m in sys.modules.items()\n"
    list_modules += "if k.startswith('polygon.') and m.__file__), sep='\\n')"
    modules = subprocess.run([sys.executable, "-c", list_modules], capture_output=True, text=True, check=True).stdout
    said = {line for module in modules.split() if Path(module).name != "cli.py" for line in written(Path(module))}
    assert len(said) > 150
    said = {line for line in said if PHRASE.search(line)}
    assert {line for line in said if in_chinese(line) is None or PHRASE.search(in_chinese(line))} == set()


def test_formulas_are_translated_where_they_have_words():
    """What remains of English in formulas and numbers are symbols."""
    rows = in_language(view(price(*wide(), Changes()))["formulas"], "zh")
    left = [row[key] for row in rows for key in ("formula", "numbers") if re.search(r"[A-Za-z]{4,}", row[key])]
    assert left == []
