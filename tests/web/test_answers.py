"""An answer is worked out once, whoever asks."""

import asyncio
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np
import pytest

from polygon.web.answers import Answers, compact
from tests.patience import PATIENCE_S


def test_answers_are_json_whatever_the_planner_computes():
    """Numpy values become numbers, NaN and infinities null, mappings of any kind objects."""
    data = {"a": np.float64(0.5), "b": np.arange(6).reshape(2, 3).T, "c": MappingProxyType({1: np.int64(2)}),
            "d": [math.nan, -math.inf, np.float32("nan")], "e": ("text", None, True)}  # fmt: skip
    assert json.loads(compact(data)) == {
        "a": 0.5, "b": [[0, 3], [1, 4], [2, 5]], "c": {"1": 2}, "d": [None, None, None], "e": ["text", None, True]
    }  # fmt: skip


def test_equal_questions_at_the_same_time_are_worked_out_once():
    """Eight ask while the first answer is being made: one call, one answer."""
    answers, calls, go = Answers(4), [], threading.Event()

    def work():
        calls.append(1)
        assert go.wait(PATIENCE_S)
        return "answer"

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(answers.get, "question", work) for _ in range(8)]
        go.set()
        assert [future.result(timeout=PATIENCE_S) for future in asked] == ["answer"] * 8
    assert len(calls) == 1


def test_who_waits_in_an_event_loop_gets_the_same_answer():
    """Eight wait for what one works out; one of them gives up, and an error is told to all and not kept."""
    answers, calls = Answers(4), []

    async def work():
        calls.append(1)
        await asyncio.sleep(0)
        if len(calls) > 1:
            raise ValueError("no")
        return "answer"

    async def ask(question):
        asked = [asyncio.ensure_future(answers.later(question, work)) for _ in range(8)]
        await asyncio.sleep(0)
        asked[3].cancel()
        return await asyncio.gather(*asked[:3], *asked[4:], return_exceptions=True)

    assert asyncio.run(ask("question")) == ["answer"] * 7
    assert asyncio.run(ask("question")) == ["answer"] * 7 and len(calls) == 1
    assert [str(error) for error in asyncio.run(ask("other"))] == ["no"] * 7
    assert len(calls) == 2


def test_only_the_latest_are_kept():
    """Beyond the limit the one that was asked for longest ago is worked out again."""
    answers, calls = Answers(2), []
    for question in ("a", "b", "a", "c", "a", "b"):
        assert answers.get(question, lambda q=question: calls.append(q) or q) == question
    assert calls == ["a", "b", "c", "b"]


def test_errors_are_told_and_not_kept():
    """Whoever asks again gets a new try."""
    answers = Answers(2)

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        answers.get("question", fail)
    assert answers.get("question", lambda: 1) == 1
