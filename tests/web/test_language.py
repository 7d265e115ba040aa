"""The server speaks the language that it is asked for."""

import json
import re
from collections.abc import Iterator
from importlib import resources

import numpy as np
import pytest

from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.domain.message import Message, plain, say
from polygon.export.targets import TARGETS, export
from polygon.formats.convert_plan import plan_data
from polygon.formats.schema import ProblemSpec, check
from polygon.formats.serialization import format_json
from polygon.planning.alternatives import Explainer
from polygon.planning.limits import limits
from polygon.planning.search_engine import Effort, find_plan
from polygon.planning.what_ifs import usual_changes
from polygon.web import questions
from polygon.web.answers import compact
from polygon.web.jobs import problem_of
from polygon.web.language import in_language, preferred
from polygon.web.plan_routes import question_of
from polygon.web.sliders import Changes, price
from polygon.web.views import view
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


def test_the_page_has_every_word_in_both_languages_with_the_same_places():
    """No entry is empty, and a template names in Chinese what it names in English."""
    words = json.loads(resources.files("polygon.web").joinpath("strings.json").read_text("utf-8"))["page"]
    place = re.compile(r"\{(\w+)")
    for english, chinese in words.values():
        assert english and chinese
        assert sorted(place.findall(english)) == sorted(place.findall(chinese)), english


def test_the_page_speaks_of_no_option_of_the_command_line():
    """Not in its own words, nor in the planner's about a plan; commands that somebody is to type are another thing."""
    page = json.loads(resources.files("polygon.web").joinpath("strings.json").read_text("utf-8"))["page"]
    planner = json.loads(resources.files("polygon.domain").joinpath("words.json").read_text("utf-8"))["messages"]
    about = ("idea.", "change.", "reason.", "limit.", "limits.", "resource.", "loss.", "plan.", "formula.",
             "numbers.", "lost.", "note.", "missing.", "check.violations", "refused.rehearsals",
             "refused.busy")  # fmt: skip
    said = [*page.items(), *((kind, both) for kind, both in planner.items() if kind.startswith(about))]
    assert [kind for kind, both in said if any(re.search(r"(^|\W)--[a-z]", text) for text in both)] == []


def test_names_stay_as_they_are():
    """Only words are translated: a region called like a word of the catalogue keeps its name, and text without a
    message stays as it is."""
    found = Message("input.expected", where="regions[0].name", found=repr("nothing"), expected="a name")
    assert say(found, "zh") == "regions[0].name：得到 'nothing'，应为名称"
    assert in_language({"note": "weights", "n": 1}, "zh") == {"note": "weights", "n": 1}


def test_an_answer_is_said_wherever_a_message_stands_in_it():
    """As a message, as one that was stored, in lists, and in the bytes that are sent."""
    message = Message("resource.pair", region="a", other="b")
    data = {"one": message, "stored": [plain(message)], "rest": (1, "b")}
    for language, words in (("en", "the link between a and b"), ("zh", "a 与 b 之间的链路")):
        assert in_language(data, language) == {"one": words, "stored": [words], "rest": [1, "b"]}
        assert json.loads(compact({"one": [message]}, language)) == {"one": [words]}


def sentences():
    """What the planner says of plans: views, formulas, explanations, losses, reasons, faults of input."""
    for problem, plan in (planned(), wide()):
        priced = price(problem, plan, Changes())
        shown = view(priced)
        yield limits(problem, plan, CostTables(problem)).said
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
    for model, within in asked:
        problem = problem_of({"cluster": cluster, "model": model, "batch": batch, "constraints": within})
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
        yield fault.value.message
    with pytest.raises(InputError) as fault:
        check(ProblemSpec, good)
    yield fault.value.message


def test_every_sentence_of_the_server_has_a_chinese_one():
    """Met in real plans, exports, explanations and faults: all are messages, and leave no English phrase."""
    seen = list(sentences())
    assert len({str(message) for message in seen}) > 60
    assert {message for message in seen if isinstance(message, str) and PHRASE.search(message)} == set()
    said = {say(message, "zh") for message in seen}
    assert {text for text in said if PHRASE.search(re.sub(r"(python -m|polygon) .*", "", text))} == set()


def test_formulas_are_translated_where_they_have_words():
    """What remains of English in formulas and numbers are symbols."""
    rows = in_language(view(price(*wide(), Changes()))["formulas"], "zh")
    left = [row[key] for row in rows for key in ("formula", "numbers") if re.search(r"[A-Za-z]{4,}", row[key])]
    assert left == []


ARGUMENTS = {"timeline": {"opened": (), "from_s": 0.0, "to_s": None, "messages": True},
             "export": {"target": "torchrun"}, "limit": {"index": 0}}  # fmt: skip


def test_what_has_no_words_is_asked_once_for_all_languages():
    """Every answer but those that are said to have words is the same in both languages, and so is what asks for it."""
    it = questions.load(format_json(plan_data(*planned())), {})
    for what in questions.QUESTIONS:
        found = questions.answer(what, it, Changes(), ARGUMENTS.get(what, {}))
        whole = list(found)[-1] if isinstance(found, Iterator) else found
        differs = compact(whole, "en") != compact(whole, "zh")
        assert differs == (what in questions.WORDED), what
        asked = {question_of("plan", what, language, Changes()) for language in ("en", "zh")}
        assert len(asked) == 1 + differs, what
