"""What the page's controls can ask next is answered before, and never before what somebody waits for."""

import asyncio
import itertools
import json
import re
from pathlib import Path

from fastapi import HTTPException

from polygon.web import ahead, questions
from polygon.web.ahead import Ahead
from polygon.web.plan_routes import moved
from polygon.web.pricing import Question
from polygon.web.sliders import Changes, positions
from tests.exported_plans import planned, wide
from tests.web.test_pricing import text

PAGE = Path(__file__).resolve().parents[2] / "web" / "src" / "whatif.tsx"


def question(job, k=0):
    return Question(plan=job, what="view", changes=json.dumps({"latency_factor": 2.0 + k}))


def answered(work, *, busy=0, plans=(("a", 3),)):
    """Questions in the order in which they are answered, where all is quiet after so many looks."""
    found, looks = [], itertools.count()

    async def answer(asked):
        found.append((asked.plan, json.loads(asked.changes)["latency_factor"] - 2.0))
        await work(asked)

    async def go():
        own = Ahead(answer, lambda: next(looks) >= busy)
        for job, count in plans:
            own.ask(job, map(question, [job] * count, range(count)))
        await own._working
        return found

    return asyncio.run(go())


async def nothing(_):
    """An answer that takes no time."""


def test_questions_are_answered_once_all_is_quiet(monkeypatch):
    """In their order, however long that takes; of several plans those opened last come first, and the oldest go."""
    monkeypatch.setattr(ahead, "PAUSE_S", 0.0)
    assert answered(nothing, busy=20) == [("a", 0), ("a", 1), ("a", 2)]
    many = [(str(i), 1) for i in range(ahead.MOST_PLANS + 2)]
    assert [job for job, _ in answered(nothing, plans=many)] == [job for job, _ in many[:1:-1]]


def test_somebody_who_asks_goes_first(monkeypatch):
    """While somebody waits nothing is begun."""
    monkeypatch.setattr(ahead, "PAUSE_S", 0.0)
    found, waits = [], [False]

    async def answer(asked):
        assert not waits[0]
        found.append(asked)
        waits[0] = len(found) == 2

    async def go():
        own = Ahead(answer, lambda: not waits[0])
        own.ask("a", (question("a", k) for k in range(4)))
        while len(found) < 2:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(found) == 2
        waits[0] = False
        await own._working
        assert len(found) == 4

    asyncio.run(go())


def test_plans_whose_answers_take_long_get_no_more_than_their_time(monkeypatch):
    """The clock is looked at after every answer."""
    now_s = [0.0]
    monkeypatch.setattr(ahead.time, "monotonic", lambda: now_s[0])

    async def slow(_):
        now_s[0] += 0.4

    assert [k for _, k in answered(slow, plans=[("a", 9)])] == [0, 1, 2]


def test_a_question_that_fails_ends_its_plan_alone():
    """Others are answered."""

    async def fails(asked):
        if asked.plan == "b":
            raise HTTPException(404)

    assert answered(fails, plans=[("a", 2), ("b", 2)]) == [("b", 0), ("a", 0), ("a", 1)]


def test_every_position_of_the_page_is_asked_for_as_the_page_does():
    """Each control of its source has positions, and each position is priced and is no plan without a change."""
    source = PAGE.read_text("utf-8")
    sliders = set(re.findall(r'slide\("\w+", "(\w+)"', source)) | set(re.findall(r"controls\.(\w+)\.values", source))
    for problem, plan in (planned(), wide()):
        devices = {pool.device.name for pool in problem.cluster.pools}
        assert set(positions(devices, plan.local_steps)) == sliders
        it = questions.load(text(), {})
        view = {"regions": [{"devices": dict.fromkeys(devices, 1)}], "local_steps": plan.local_steps}
        asked = list(moved(question("a"), view))
        assert len({q.changes for q in asked}) == len(asked) > 60
        assert not any(json.loads(q.changes) in ({}, {"local_steps": plan.local_steps}) for q in asked)
    for q in asked[::7]:
        if "device_factors" not in q.changes:
            assert questions.view(it, Changes.model_validate_json(q.changes), bound=False)["estimate"]["step_s"] > 0
