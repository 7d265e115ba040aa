"""Jobs and their store: what a search says is kept as a message, and said in the language of who asks."""

import sqlite3
from threading import Event

import pytest

pytest.importorskip("fastapi", reason="the web application's libraries are not installed (pip install -e '.[web]')")

from polygon.api.planner import Problem
from polygon.domain.errors import InputError
from polygon.domain.message import Message, say
from polygon.messages.report import valued
from polygon.planning import search_engine
from polygon.web import jobs as web_jobs
from polygon.web.jobs import JobProgress, Jobs, problem_of
from polygon.web.language import in_language
from polygon.web.store import Store, StoredJob
from tests.patience import eventually

TOO_LARGE = {
    "cluster": {"regions": [{"name": "a", "nodes": [{"device": "t4", "count": 1, "devices_per_node": 2}]}]},
    "model": "gpt3-175b",
    "batch": {"global_batch": 4, "seq_len": 512},
}


def ended(store: Store, job: str) -> StoredJob:
    def done() -> bool:
        found = store.get(job)
        return found is not None and found.state not in ("queued", "running")

    assert eventually(done)
    found = store.get(job)
    assert found is not None
    return found


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "jobs.sqlite")
    yield store
    store.close()


def test_why_there_is_no_plan_is_kept_as_a_message(store):
    """Not as text: the bytes are a number, and both languages are made of it."""
    jobs = Jobs(store)
    try:
        row = ended(store, jobs.start({"problem": TOO_LARGE, "effort": "quick"}))
    finally:
        jobs.close()
    assert row.state == "infeasible"
    assert row.error.kind == "reason.too_large" and row.error["lacking_bytes"] > 2**30
    for language in ("en", "zh"):
        assert in_language(row.to_dict(), language)["error"] == say(row.error, language)


@pytest.mark.parametrize("front", [False, True])
def test_a_search_has_its_share_of_the_cores(store, monkeypatch, front):
    """Of four cores two, as two searches run at a time; one that is a single search has one."""
    asked = []

    def with_jobs(original):
        def found(*args, jobs, **named):
            asked.append(jobs)
            return original(*args, jobs=1, **named)

        return found

    monkeypatch.setattr(web_jobs, "cores", lambda: 4)
    monkeypatch.setattr(web_jobs, "find_front", with_jobs(web_jobs.find_front))
    monkeypatch.setattr(Problem, "search", with_jobs(Problem.search))
    jobs = Jobs(store)
    try:
        small = {"problem": TOO_LARGE | {"model": "opt-350m"}, "front": front, "time_limit_s": 2}
        for effort in ("quick", "thorough"):
            assert ended(store, jobs.start(small | {"effort": effort})).state == "done"
    finally:
        jobs.close()
    assert asked == [1, 2]


def test_a_front_that_keeps_no_limit_says_what_the_nearest_exceeds(store):
    """As a search does; without it the page said that there is none, and not why."""
    small = TOO_LARGE | {"model": "opt-350m", "constraints": {"most_usd_per_step": 1e-9}}
    jobs = Jobs(store)
    try:
        row = ended(store, jobs.start({"problem": small, "effort": "quick", "front": True}))
    finally:
        jobs.close()
    assert row.state == "infeasible" and row.error.kind == "reason.none_found_within_limits"
    assert [over.kind for over in row.error["over"]] == ["limit.usd_per_step"]


@pytest.mark.parametrize("front", [False, True])
def test_a_plan_waits_for_no_bound_and_a_search_keeps_to_its_limit(store, monkeypatch, front):
    """Whoever looks at it asks for the bound; until then there is a plan without."""
    limits = []
    searched = search_engine.find_plan

    def find_plan(*args, **options):
        limits.append(options["effort"].time_limit_s)
        return searched(*args, **options)

    monkeypatch.setattr("polygon.planning.frontier.find_plan", find_plan)
    monkeypatch.setattr("polygon.api.planner.lower_bound", lambda *args, **options: 1 / 0)  # a job that asks has failed
    small = TOO_LARGE | {"model": "opt-350m"}
    jobs = Jobs(store)
    try:
        row = ended(store, jobs.start({"problem": small, "effort": "quick", "time_limit_s": 30.0, "front": front}))
    finally:
        jobs.close()
    assert (row.state, row.error) == ("done", "")
    assert limits and all(limit <= 30 for limit in limits)
    assert '"lower_bound_s"' not in (store.result(row.id) or "{}")


def test_a_search_that_is_stopped_does_not_say_that_nothing_fits(store, monkeypatch):
    """What was found so far, that is nothing, says nothing of what there is."""

    class Stopped(JobProgress):
        def tell(self, note, part):
            super().tell(note, part)
            self.stop.set()

    monkeypatch.setattr("polygon.web.jobs.JobProgress", Stopped)
    jobs = Jobs(store)
    try:
        row = ended(store, jobs.start({"problem": TOO_LARGE, "effort": "quick"}))
    finally:
        jobs.close()
    assert (row.state, row.error) == ("cancelled", "")


def test_a_search_for_little_money_tells_money(store, monkeypatch):
    """The best so far is told as what is asked for."""
    told = []

    class Telling(JobProgress):
        def tell(self, note, part):
            told.append(note)
            super().tell(note, part)

    monkeypatch.setattr("polygon.web.jobs.JobProgress", Telling)
    jobs = Jobs(store)
    try:
        small = TOO_LARGE | {"model": "opt-350m"}
        assert ended(store, jobs.start({"problem": small, "objective": "money"})).state == "done"
    finally:
        jobs.close()
    best = [note["best"] for note in told if note]
    assert all(it == "—" or it.kind == "value.money" for it in best) and float(best[-1]["usd"]) > 0


@pytest.mark.parametrize(
    ("objective", "value", "said"),
    [("time", 2.5, "2.50 s"), ("energy", 3.6e7, Message("value.energy", kwh="10")),
     ("tokens-per-usd", 1e6 / 123456.0, Message("value.tokens", tokens="123,456")),
     ("tokens-per-usd", 2e-9, Message("value.tokens", tokens="∞")),
     ("money", 2e15, Message("value.over")), ("time", float("inf"), "—")],
)  # fmt: skip
def test_what_a_search_has_found_has_a_unit(objective, value, said):
    """Of every objective; what exceeds a limit is only said to."""
    assert valued(objective, value) == said


def test_bad_input_carries_its_parts(store):
    """Where, what was found, what is expected: fields of the error, whatever the words are."""
    with pytest.raises(InputError) as fault:
        problem_of({**TOO_LARGE, "constraints": {"forbidden_regions": ["b"]}})
    message = fault.value.message
    assert (message.kind, message["where"], message["found"]) == (
        "input.expected",
        "constraints.forbidden_regions",
        "'b'",
    )
    assert message["expected"] == Message("expected.one_of", words=("a",))


def test_notes_and_errors_of_an_earlier_version_are_still_told(tmp_path):
    """A database with texts is read as one with messages."""
    old = sqlite3.connect(tmp_path / "old.sqlite")
    old.execute(
        "CREATE TABLE jobs (id TEXT PRIMARY KEY, created_s REAL NOT NULL, state TEXT NOT NULL, request TEXT NOT NULL, "
        "progress REAL NOT NULL DEFAULT 0, note TEXT NOT NULL DEFAULT '', result TEXT, error TEXT)"
    )
    rows = (("a", 1.0, "done", "{}", "1.5 s", None), ("b", 2.0, "failed", "{}", "", 'plan: "x" is none'))
    old.executemany("INSERT INTO jobs (id, created_s, state, request, note, error) VALUES (?, ?, ?, ?, ?, ?)", rows)
    old.commit()
    old.close()
    for _ in range(2):  # once turned into messages, and then found so
        store = Store(tmp_path / "old.sqlite")
        told = {job.id: (job.note, job.error) for job in store.jobs()}
        store.close()
        assert told == {"a": ("1.5 s", ""), "b": ("", 'plan: "x" is none')}


def test_progress_never_goes_back(store, monkeypatch):
    """A phase that counts its work anew does not take back what was told: from it the page says what time is left."""
    now_s = iter(range(100))
    monkeypatch.setattr("polygon.web.jobs.time.monotonic", lambda: float(next(now_s)))
    job = store.add({"name": "a"}, state="running")
    progress, told = JobProgress(store, job, Event()), []
    for part in (0.0, 0.1, 0.05, 0.2, 0.0):
        progress.tell("", part)
        told.append(store.get(job).progress)
    assert told == [0.0, 0.1, 0.1, 0.2, 0.2]
