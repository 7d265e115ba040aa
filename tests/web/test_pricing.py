"""Plans are priced in a process of its own: the same answers, whatever becomes of the process."""

import asyncio
import math
import os
import signal
import threading
from multiprocessing import Pipe

import orjson
import pytest

from polygon.domain.errors import InputError
from polygon.formats.convert_plan import plan_data
from polygon.formats.serialization import format_json
from polygon.web import pricing as pricing_module
from polygon.web import questions
from polygon.web.pricing import Pricing, Question
from polygon.web.sliders import Changes
from tests.exported_plans import planned
from tests.patience import PATIENCE_S, eventually

ROWS = (("opened", ()), ("from_s", 0.0), ("to_s", None), ("messages", False))
"""What a timeline is asked for."""


def text():
    """The plan that is asked about, as a file."""
    return format_json(plan_data(*planned()))


@pytest.fixture(scope="module")
def pricing():
    # A process that shares out tests with others may come back to this module: the loop is made anew.
    own, loop = Pricing(lambda _: (text(), {})), asyncio.new_event_loop()
    own.loop = loop
    running = threading.Thread(target=loop.run_forever)
    running.start()
    yield own
    asyncio.run_coroutine_threadsafe(own.close(), loop).result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    running.join(PATIENCE_S)
    loop.close()


def asked(pricing, what="view", changes="{}", tell=None, **arguments):
    question = Question(plan="a", what=what, changes=changes, arguments=tuple(arguments.items()))
    return orjson.loads(asyncio.run_coroutine_threadsafe(pricing.ask(question, tell), pricing.loop).result(PATIENCE_S))


def test_answers_are_those_of_this_process(pricing):
    """A what-if, priced there and here."""
    changes = Changes(bandwidth_factor=2.0)
    here = questions.view(questions.load(text(), {}), changes)
    there = asked(pricing, changes=changes.model_dump_json(exclude_defaults=True))
    assert there["estimate"]["step_s"] == here["estimate"]["step_s"]


def test_what_is_asked_at_once_goes_in_one_message(pricing):
    """There and back; each gets its own answer."""
    asked(pricing)
    worker, factors = pricing._workers[0], [1.0 + i / 8 for i in range(6)]
    sent, send = [], worker._send

    async def all_of_them():
        worker._send = lambda: (sent.append(len(worker._together)), send())
        views = (
            Question(plan="a", what="view", changes=f'{{"bandwidth_factor": {f}}}', arguments=(("bound", False),))
            for f in factors
        )
        try:
            return await asyncio.gather(*map(pricing.ask, views))
        finally:
            del worker._send

    answers = asyncio.run_coroutine_threadsafe(all_of_them(), pricing.loop).result(PATIENCE_S)
    it = questions.load(text(), {})
    here = [questions.view(it, Changes(bandwidth_factor=f), bound=False) for f in factors]
    assert [orjson.loads(a)["estimate"]["step_s"] for a in answers] == [h["estimate"]["step_s"] for h in here]
    assert sent == [len(factors)]


def test_answers_to_what_was_asked_meanwhile_go_in_one_message(monkeypatch):
    """As long as they may wait; what is asked after them is answered as well."""
    monkeypatch.setattr(pricing_module, "TOGETHER_S", math.inf)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of the main thread alone
    ours, theirs = Pipe()
    with ours:
        for number in range(3):
            ours.send([(number, Question(plan="a", what="timeline", arguments=ROWS, file=(text(), {})))])
        working = threading.Thread(target=pricing_module.work, args=(theirs,))
        working.start()
        assert [(number, last) for number, _, last in ours.recv()] == [(0, True), (1, True), (2, True)]
        ours.send([(3, Question(plan="a", what="timeline", arguments=ROWS))])
        [(number, answer, _)] = ours.recv()
        assert number == 3 and orjson.loads(answer)["rows"]
    working.join(PATIENCE_S)
    assert not working.is_alive()


def test_who_asks_for_what_takes_long_keeps_others_not_waiting(monkeypatch):
    """Another plan's limits and this plan's advice are answered meanwhile; what takes long of this plan comes after."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of the main thread alone
    gate = threading.Event()
    monkeypatch.setitem(questions.QUESTIONS, "assumed", lambda it, changes: gate.wait(PATIENCE_S))
    ours, theirs = Pipe()
    with ours:
        whats = {0: ("a", "assumed"), 1: ("a", "limit"), 2: ("a", "advice"), 3: ("b", "limit")}
        for number, (plan, what) in whats.items():
            index = (("index", 1000),) if what == "limit" else ()
            ours.send([(number, Question(plan=plan, what=what, arguments=index, file=(text(), {})))])
        working = threading.Thread(target=pricing_module.work, args=(theirs,))
        working.start()
        told = lambda: [ours.recv()[0] for _ in range(2) if ours.poll(PATIENCE_S)]  # noqa: E731
        assert {number for number, _, _ in told()} == {2, 3} and not gate.is_set()
        gate.set()
        assert told() == [(0, b"true", True), (1, b"null", True)]
    working.join(PATIENCE_S)


def test_parts_come_before_the_whole(pricing):
    """Limits are told as they are found."""
    parts = []
    whole = asked(pricing, "limits", tell=lambda part: parts.append(orjson.loads(part)))
    assert [len(part["limits"]) for part in parts[:-1]] == list(range(1, len(whole["limits"]) + 1))
    assert parts[-1] == whole
    assert asked(pricing, "limit", index=1000) is None


def test_errors_of_a_question_are_told_and_end_nothing(pricing):
    """Bad input as such; a fault of ours without the process being lost."""
    with pytest.raises(InputError, match="nowhere"):
        asked(pricing, changes='{"links": [{"source": "nowhere", "target": "north"}]}')
    with pytest.raises(RuntimeError, match="KeyError"):
        asked(pricing, "no such question")
    assert asked(pricing)["estimate"]["step_s"] > 0


def test_a_lost_process_is_started_anew(pricing):
    """Killed between two questions and in the middle of one, it answers the next."""
    step_s = asked(pricing)["estimate"]["step_s"]
    for signal_sent in (signal.SIGKILL, signal.SIGSTOP):
        process = pricing._workers[0].process
        os.kill(process.pid, signal_sent)
        if signal_sent == signal.SIGSTOP:  # it cannot answer until it is killed
            threading.Timer(0.1, process.kill).start()
        assert asked(pricing)["estimate"]["step_s"] == step_s
        process.join(PATIENCE_S)
        assert pricing._workers[0].process.pid != process.pid


def test_more_processes_share_what_is_quick(pricing):
    """Where many wait another starts; it is asked once it is ready, and what takes long stays with the first, the bound
    of a plan too."""
    pricing._most = 2
    step_s = asked(pricing, bound=False)["estimate"]["step_s"]
    for _ in range(3):
        pricing.loop.call_soon_threadsafe(pricing.grow)
    assert eventually(lambda: pricing.processes == 2)
    pricing.loop.call_soon_threadsafe(pricing.grow)
    assert asked(pricing, bound=False)["estimate"]["step_s"] == step_s and pricing.processes == 2
    first, other = pricing._workers
    os.kill(first.process.pid, signal.SIGSTOP)
    of_view = ("{}", '{"overlap": 0.5}', '{"price_factor": 2}', '{"device_factors": {"t4": 2}}')
    long = [("assumed", "{}"), *(("view", changes) for changes in of_view)]
    waits = [threading.Thread(target=asked, args=(pricing, *question)) for question in long]
    for waiting in waits:
        waiting.start()
    assert eventually(lambda: first.waiting() == len(long))
    assert asked(pricing, bound=False)["estimate"]["step_s"] == step_s and other.waiting() == 0
    assert asked(pricing, changes='{"bandwidth_factor": 2}')["estimate"]["step_s"] > 0 and other.waiting() == 0
    os.kill(first.process.pid, signal.SIGCONT)
    for waiting in waits:
        waiting.join(PATIENCE_S)
    other.process.kill()
    other.process.join(PATIENCE_S)
    assert all(asked(pricing, bound=False)["estimate"]["step_s"] == step_s for _ in range(3))
