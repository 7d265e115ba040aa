"""Strangers who made the same plan are answered by one working out."""

import pytest

pytest.importorskip("fastapi", reason="the web application's libraries are not installed (pip install -e '.[web]')")

from fastapi import HTTPException

from polygon.formats.convert_plan import plan_data
from polygon.web import same_plans
from polygon.web.same_plans import SamePlans
from tests.exported_plans import planned

FILES = {"ann": ("plan", {}), "bob": ("plan", {}), "eve": ("plan", {"overlap": 0.5}), "joe": ("another", {})}


@pytest.fixture
def files():
    return dict(FILES)


@pytest.fixture
def plans(files):
    def read(job):
        if job not in files:
            raise HTTPException(404)
        return files[job]

    return SamePlans(read)


def test_plans_are_the_same_by_file_and_changes(plans, files):
    """Ann's and Bob's are; a variant that its file cannot say is another; each is read once."""
    found = {job: plans.look(job) for job in files}
    assert found["ann"] == found["bob"]
    assert len({found[job] for job in ("ann", "eve", "joe")}) == 3
    files.clear()
    assert {job: plans.known(job) for job in FILES} == found
    assert plans.known("ida") is None


def test_who_has_a_plan_gives_it_for_all(plans, files):
    """Ann's gone, Bob's is read in its place; with both gone there is none, and nobody sees a plan that was removed."""
    plan = plans.look("ann")
    with pytest.raises(HTTPException):
        plans.look("ida")
    assert plans.look("bob") == plan
    del files["ann"]
    assert plans.read(plan) == FILES["bob"]
    plans.forget("ann")
    with pytest.raises(HTTPException):
        plans.look("ann")
    del files["bob"]
    with pytest.raises(HTTPException):
        plans.read(plan)


def test_those_asked_about_last_are_known(plans, monkeypatch):
    """So many and no more; the others are read anew."""
    monkeypatch.setattr(same_plans, "MOST_JOBS", 2)
    for job in ("ann", "joe", "ann", "eve"):
        plans.known(job) or plans.look(job)
    assert [plans.known(job) is not None for job in ("ann", "joe", "eve")] == [True, False, True]
    assert plans.read(plans.look("joe")) == FILES["joe"]


def test_a_plan_that_is_removed_is_gone_though_a_stranger_has_the_same(server):
    """What was answered of it answers nobody who asks by its address; the stranger's goes on."""
    own, other = (server.request("POST", "/api/v1/plans", plan_data(*planned()))[2]["id"] for _ in range(2))
    views = [server.request("POST", f"/api/v1/plans/{job}/view", {})[2] for job in (own, other)]
    assert views[0] == views[1]
    assert server.request("DELETE", f"/api/v1/plans/{own}")[0] == 204
    status = [server.request("POST", f"/api/v1/plans/{job}/view", {})[0] for job in (own, other)]
    assert status == [404, 200]
    assert server.request("POST", f"/api/v1/plans/{other}/view", {"latency_factor": 3.21})[0] == 200
