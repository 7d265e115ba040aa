"""The catalogue of messages: both languages say the same things of the same arguments, and nothing reads them."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from string import Formatter
from typing import get_args

import pytest

from polygon.cost.convergence import NOTHING_SHOWN, TRAFFIC, QualityRow, rows
from polygon.cost.memory import MemoryBreakdown
from polygon.domain.message import LANGUAGES, Message, Violation, message_from, say, words
from polygon.formats.serialization import format_json, parse_json
from polygon.planning.checker import violations
from polygon.planning.left_out import LeftOut
from polygon.planning.limits import Kind
from polygon.planning.objectives import ENERGY, MEASURES, MONEY
from tests.planning.test_checker import BROKEN, LAYERS, problem_of

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "polygon").rglob("*.py"))
FAMILIES = {
    "memory.": [field.name for field in fields(MemoryBreakdown) if field.name != "context"],
    "loss.": list(TRAFFIC),
    "resource.": list(get_args(Kind)),
    "more.": [measure.name for measure in MEASURES.values()],
    "idle.more_": [measure.name for measure in MEASURES.values()],
    "idle.times_": [measure.name for measure in MEASURES.values()],
    "idle.free_": [MONEY.name, ENERGY.name],
    "idle.less_": [measure.name for measure in MEASURES.values()],
    "idle.same_": [measure.name for measure in MEASURES.values()],
}
"""Kinds that are put together: what they begin with, and how they end."""
HANDED_ON = {"limit.step_s", "limit.usd_per_step", "limit.usd_per_hour", "check.script", "check.plan", "check.readable",
             "check.batch"}  # fmt: skip
"""Kinds that a helper next to their use makes messages of."""
PHRASE_POSITIONS = {"require": (2, 3), "fault": (1, 2), "_refuse": (0, 1), "Phrase": (0,)}
"""Arguments of calls that may be words of the catalogue's `phrases`."""
WORDS = re.compile(r"[a-z]{2,} [a-z]{2,}")
"""Two English words in a row: no name of a model, a device, a unit or an option has them."""
PARSERS = (
    "Expecting", "Illegal", "Extra data", "Unterminated", "Invalid", "JSON decode", "mapping values", "did not find",
    "could not find", "found ", "control characters", "nested too deeply", "block sequence", "mapping keys",
)  # fmt: skip
"""How faults begin that the parsers of JSON and YAML find."""


@cache
def nodes(module: Path) -> tuple[ast.AST, ...]:
    """All of a module's syntax."""
    return tuple(ast.walk(ast.parse(module.read_text("utf-8"))))


def calls(module: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a module with the name of what is called."""
    for node in nodes(module):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", "")), node


def messages() -> Iterator[tuple[str, set[str] | None]]:
    """Kinds and argument names of the messages that the code makes; None where arguments are handed on as a whole."""
    for module in MODULES:
        for name, call in calls(module):
            if name not in ("Message", "Violation", "Words") or not call.args:
                continue
            names = {keyword.arg for keyword in call.keywords}
            for kind in kinds(call.args[0]):
                yield kind, None if None in names else names


def kinds(node: ast.expr) -> list[str]:
    """The kinds that an expression stands for; none where it is a variable."""
    if isinstance(node, ast.Constant):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return kinds(node.body) + kinds(node.orelse)
    if isinstance(node, ast.JoinedStr):
        prefix = node.values[0].value
        return [prefix + end for end in FAMILIES[prefix]]
    return []


def places(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def phrases(modules: list[Path]) -> set[str]:
    """Words that modules say of bad input without a name or number in them."""
    found = set()
    for module in modules:
        for name, call in calls(module):
            for position in PHRASE_POSITIONS.get(name, ()):
                if len(call.args) > position:
                    said = call.args[position]
                    options = [said.body, said.orelse] if isinstance(said, ast.IfExp) else [said]
                    found |= {o.value for o in options if isinstance(o, ast.Constant) and isinstance(o.value, str)}
    return found


def texts(modules: list[Path]) -> set[str]:
    """Every text that stands in modules."""
    constants = (node for module in modules for node in nodes(module) if isinstance(node, ast.Constant))
    return {constant.value for constant in constants if isinstance(constant.value, str)}


def served() -> list[Path]:
    """The modules that the server loads: what only commands say is said in English."""
    script = "import json, sys, polygon.web.app\n"
    script += "own = [m.__file__ for name, m in sys.modules.items() if name.startswith('polygon.') and m.__file__]\n"
    script += "print(json.dumps(own))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return [Path(file) for file in json.loads(done.stdout)]


@pytest.mark.parametrize("kind", words()["messages"])
def test_every_message_is_said_in_both_languages_of_the_same_arguments(kind):
    """Two templates, not empty, with the same names in their places."""
    templates = words()["messages"][kind]
    assert len(templates) == len(LANGUAGES) and all(templates)
    assert len({frozenset(places(template)) for template in templates}) == 1


def test_every_message_that_the_code_makes_is_in_the_catalogue_with_its_arguments():
    """Kind by kind: the arguments at the call are those of the templates."""
    made = list(messages())
    assert len(made) > 200
    for kind, names in made:
        assert kind in words()["messages"], kind
        if names is not None:
            wanted = places(words()["messages"][kind][0])
            assert names == wanted, kind


def test_every_kind_of_the_catalogue_is_used():
    """No template is left over from a message that nobody makes."""
    made = {kind for kind, _ in messages()} | HANDED_ON
    assert set(words()["messages"]) - made == set()
    assert texts(MODULES) >= HANDED_ON


def test_words_of_the_server_without_arguments_have_chinese_ones_and_none_is_left_over():
    """`phrases`: what modules that the server loads say, what parsers find, the ledger's evidence, what data may be."""
    known = set(words()["phrases"])
    said = phrases(served())
    assert len(said) > 60
    assert {text for text in said if WORDS.search(text)} - known == set()
    told = {text for row in ledger() for text in (row.shown, row.caveat, row.source)}
    left = known - told - texts(MODULES)
    assert {text for text in left if not text.startswith(PARSERS)} == set()


def ledger() -> list[QualityRow]:
    """Rows of everything that is known to keep the loss, or not."""
    known = [row for traffic in (*TRAFFIC, "local_steps") for row in rows(traffic).values() if row.shown]
    return [*known, NOTHING_SHOWN]


def test_all_evidence_of_the_ledger_is_said_in_chinese():
    """What was shown and its caveat; papers keep their names."""
    known = words()["phrases"]
    assert len(ledger()) > 12
    for row in ledger():
        assert row.shown in known and (not row.caveat or row.caveat in known), row


def test_a_message_is_said_with_its_numbers_nouns_and_parts():
    """Memory from bytes, a noun by its number, messages within messages in the same language, tuples joined."""
    over = Message("limit.egress_bytes", region="a", value=2.5441e9, limit=2_000_000_000)
    assert str(over) == "2.544 GB a step out of a, of which 2 GB are allowed"
    assert str(Message("limit.egress_bytes", region="a", value=5.0, limit=0)).startswith(
        "5 B a step out of a, of which 0 B"
    )
    lacking = Message("reason.lacks_memory", stage=1, device="t4", region="a", lacking_bytes=3 * 2**29,
                      owner=Message("memory.weights"))  # fmt: skip
    assert say(lacking) == str(lacking) == "stage 1 on t4 in a lacks 1.5 GiB, most of it weights"
    assert say(lacking, "zh") == "第 1 级（a 的 t4）缺 1.5 GiB，主要是权重"
    for n_bytes, size in ((2902.4 * 2**30, "2.8 TiB"), (3 * 2**18, "0.8 MiB"), (2.0**30, "1.0 GiB")):
        assert f"lacks {size}," in say(Message(lacking.kind, **lacking.arguments | {"lacking_bytes": n_bytes}))
    one, two = (Message("idea.structure", stages=n, devices=n, regions=("a", "b")[:n]) for n in (1, 2))
    assert (str(one), str(two)) == ("1 stage on 1 device in a", "2 stages on 2 devices in a, b")
    over = tuple(Message(f"limit.{kind}", value=2.0, limit=1.0) for kind in ("step_s", "usd_per_step"))
    both = Message("reason.no_plan_within_limits", over=over)
    assert str(both).endswith(
        "the nearest one takes 2 s a step, of which 1 are allowed; 2 USD a step, of which 1 are allowed"
    )
    assert say(both, "zh").count("；") == 2
    assert say("as it is", "zh") == "as it is"


def test_what_stands_in_braces_in_an_argument_stays_as_it_is():
    """Names are arguments, never templates."""
    assert str(Message("idea.only_region", region="{kind} {0}")) == "use only region {kind} {0}"


def test_a_message_comes_back_from_json():
    """With messages in tuples in messages; `asdict` of what holds one leaves it whole."""
    violation = Violation("plan.limit", excess=Message("limit.egress_bytes", region="a", value=2.0, limit=1.0))
    message = Message("check.violations", broken=(violation, violation))
    data = parse_json(format_json({"reason": message}))["reason"]
    assert data["text"] == str(message) and data["arguments"]["broken"][0]["kind"] == "plan.limit"
    assert message_from(data) == message
    row = asdict(LeftOut(region="a", device="t4", devices=1, reason=violation))
    assert row["reason"] == violation and row["reason"].stage is None


def test_numbers_that_no_float_holds_are_told():
    """What a file may hold: a number of four hundred digits, and one of more than Python writes."""
    assert say(Message("found.number", value=10**400)) == "> 1e+308"
    assert say(Message("found.number", value=-(10**6000))) == "< -1e+308"
    assert say(Message("expected.at_most", most=10**5000)) == "at most > 1e+308"


def test_messages_are_equal_by_kind_and_arguments():
    """Not by their words; equal ones have one hash."""
    a, same = Message("idea.parity", level="known"), Message("idea.parity", level="known")
    assert a == same and hash(a) == hash(same) and len({a, same}) == 1
    assert a != Message("idea.parity", level="any") and a != Message("change.parity", level="known") and a != str(a)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("plan.layers", f"stage 1: layers [3, {LAYERS}), expected some from layer 2 on"),
        (
            "plan.recompute_blocks",
            "stage 0: recompute_blocks 2 with recompute 'none', expected null, or at least 1 with selective or full",
        ),
        ("plan.link_twice", "links: r0 -> r1 is given 2 times"),
        ("plan.compression", "link r0 -> r1: activations 'zip' is unknown"),
        ("plan.never_regions", "stage 1: region r0, where a stage rule allows none of r0"),
    ],
)
def test_broken_rules_name_the_place_as_the_file_does(kind, words):
    """Regions by their names, fields by their keys, and what would be right."""
    plan, asked, _ = BROKEN[kind]
    assert words in [str(violation) for violation in violations(problem_of(**asked), plan)]


def test_a_huge_factor_reads_well():
    """In times, with commas between thousands."""
    said = str(Message("idle.times_time", times=49437.46))
    assert said == "the step would take 49,437.5 times as long with them in these stages"


BEHAVIOUR = (
    "tests/planning/test_checker.py",
    "tests/planning/test_left_out.py",
    "tests/planning/test_search_engine.py::test_model_too_large_says_by_how_much",
    "tests/planning/test_objectives.py::test_limits_that_nothing_keeps_are_a_result_with_a_reason",
    "tests/planning/test_objectives.py::test_rules_that_leave_no_devices_say_so",
    "tests/planning/test_grid_plans.py::test_no_plan_has_a_reason",
    "tests/planning/test_link_compression.py::test_what_is_not_allowed_names_the_level_it_needs",
    "tests/grid3d/test_grid.py::test_nothing_fits_is_a_result",
    "tests/web/test_jobs.py",
)
"""Tests of what the planner and the server do where plans are broken or there are none."""
NONSENSE = """
import polygon.domain.message as said

templates = said.words()["messages"]
for kind, (english, _) in list(templates.items()):
    if not kind.startswith("input."):
        names = [name for _, name, _, _ in said.Formatter().parse(english) if name]
        templates[kind] = ["zu " + " ".join("{" + name + "}" for name in names)] * 2
"""


def test_no_word_of_a_message_is_read_by_a_program():
    """Everything but where a fault lies reworded into nonsense, the behaviour is the same: in a process of its own."""
    script = f"{NONSENSE}\nimport pytest, sys\nsys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "-q", "-x", "--no-header", "-p", "no:cacheprovider", *BEHAVIOUR]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_the_catalogue_is_in_the_package():
    """An installed planner finds its words: the file is named as package data."""
    assert "polygon.domain = words.json" in (ROOT / "setup.cfg").read_text("utf-8")
    raw = json.loads((ROOT / "polygon" / "domain" / "words.json").read_text("utf-8"))
    assert raw.keys() == {"messages", "phrases"}
