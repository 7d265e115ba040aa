"""Answers that come late, or not in the order in which they were asked for, in a real browser: the later choice stays,
and what is pushed twice is done once."""

import json
import re

import pytest

from polygon.formats.convert_plan import plan_data
from tests.exported_plans import planned
from tests.web.conftest import Server
from tests.web.test_page import (
    Held,
    browser,
    choose,
    expect,
    fill,
    fresh,
    kept_page,
    name_a_new_plan,
    new_page,
    page,
    slide,
    visit,
)

__all__ = ["browser", "fresh", "kept_page", "page"]


def asked_by(held):
    """What the requests kept back ask, in their order."""
    return [route.request.post_data_json for route in held.routes]


def test_what_is_asked_is_what_stood_there(fresh):
    """Pushed twice it is asked once; what is changed while the answer is under way is told as another problem."""
    choose(fresh, "gpt3-1.3b")
    expect(fresh.locator("#fold-cluster small")).to_have_text("8 devices in 2 regions")
    held = Held(fresh, "**/api/v1/jobs", "POST")
    fresh.locator("#calculate").dblclick()
    held.wait()
    fresh.locator("#main").press("Control+Enter")
    fill(fresh, "batch.global_batch", "48")
    fresh.wait_for_timeout(100)
    assert [asked["problem"]["batch"]["global_batch"] for asked in asked_by(held)] == [512]
    held.release()
    fresh.locator("[data-card=step]").wait_for()
    expect(fresh.locator("#status .soft")).to_contain_text("not what the plan was asked for")
    fresh.locator("#status .link").click()
    expect(fresh.locator("[data-path='batch.global_batch']")).to_have_value("512")


def test_back_from_a_plan_comes_to_where_it_was_asked_for(fresh):
    """Not to the search that has ended, which opens the plan again; nor, in mid-search, to one that stands still."""
    choose(fresh, "gpt3-1.3b")
    expect(fresh.locator("#fold-cluster small")).to_have_text("8 devices in 2 regions")
    fresh.locator("#tab-front").click()
    held = Held(fresh, "**/events")
    fresh.locator("#calculate").click()
    fresh.locator("#cancel").wait_for()
    fresh.go_back()
    fresh.locator("#calculate").wait_for()
    fresh.go_forward()
    fresh.locator("#cancel").wait_for()
    held.release()
    fresh.locator("[data-card=step]").wait_for()
    fresh.wait_for_function("location.hash.includes('plan=')")
    fresh.go_back()
    fresh.wait_for_function("!location.hash.includes('plan=')")
    fresh.locator("#tab-front[aria-selected=true]").wait_for()
    fresh.wait_for_timeout(300)
    assert "plan=" not in fresh.url and "job=" not in fresh.url


@pytest.mark.parametrize("later", ["by hand", "the file", "undo"])
def test_a_cluster_that_comes_late_is_not_taken_for_the_later_choice(fresh, later):
    """What is done after a cluster was chosen stays, however late that cluster is here."""
    choose(fresh, "gpt3-1.3b")
    expect(fresh.locator("#fold-cluster small")).to_have_text("8 devices in 2 regions")
    held = Held(fresh, "**/api/v1/instances/*")
    fresh.locator("[data-path=instance]").select_option("world-64")
    held.wait()
    summary = "8 devices in 2 regions"
    if later == "by hand":
        fresh.locator("#by-hand").click()
        summary = "no regions yet"
    elif later == "undo":
        fresh.locator("#undo").click()
        fresh.locator("#redo").click()
    else:
        fresh.locator("#tab-cluster").click()
        fresh.locator("#yaml").fill("name: small\nregions:\n- name: here\n  nodes:\n  - {device: t4, count: 3}\n")
        summary = "3 devices in 1 region"
    wanted = fresh.locator("#fold-cluster small")
    expect(wanted).to_have_text(re.compile(summary, re.I))
    with fresh.expect_response("**/api/v1/instances/*"):
        held.release()
    fresh.wait_for_timeout(100)
    expect(wanted).to_have_text(re.compile(summary, re.I))


def test_a_file_that_is_read_late_does_not_replace_a_cluster_chosen_since(fresh):
    """Typed before, read after: the chosen cluster stays, and so do bounds that were set meanwhile."""
    choose(fresh, "gpt3-1.3b")
    expect(fresh.locator("#fold-cluster small")).to_have_text("8 devices in 2 regions")
    fresh.locator("#tab-cluster").click()
    expect(fresh.locator("#yaml")).to_have_value(re.compile("regions"))
    read = Held(fresh, "**/api/v1/read")
    fresh.locator("#yaml").fill("name: typed\nregions:\n- name: here\n  nodes:\n  - {device: t4, count: 3}\n")
    read.wait("typed")
    chosen = Held(fresh, "**/api/v1/instances/*")
    fresh.locator("[data-path=instance]").select_option("world-64")
    chosen.wait()
    fresh.locator("#fold-goal").click()
    fresh.locator("#goal summary, .fold.open details.more > summary").last.click()
    fill(fresh, "constraints.most_stages", "5")
    chosen.release()
    expect(fresh.locator("#fold-cluster small")).to_contain_text("64 devices")
    with fresh.expect_response("**/api/v1/read"):
        read.release()
    fresh.wait_for_timeout(100)
    expect(fresh.locator("#fold-cluster small")).to_contain_text("64 devices")
    expect(fresh.locator("[data-path='constraints.most_stages']")).to_have_value("5")


def test_a_search_waits_for_what_is_taken_over(fresh, server, plan_id):
    """What a plan was asked for, taken over late, is what is asked next; what is chosen after it is changed in it."""
    choose(fresh, "opt-350m")
    fill(fresh, "batch.global_batch", "64")
    fresh.locator("#calculate").click()
    fresh.locator("[data-card=step]").wait_for()
    fill(fresh, "batch.global_batch", "32")
    held = Held(fresh, "**/request")
    fresh.locator("#status .link").click()
    held.wait()
    asked = Held(fresh, "**/api/v1/jobs", "POST")
    fresh.locator("[data-path=instance]").select_option("world-64")
    fresh.locator("#calculate").click()
    fresh.wait_for_timeout(100)
    assert asked.routes == []
    held.release()
    asked.wait()
    [problem] = [request["problem"] for request in asked_by(asked)]
    assert problem["batch"]["global_batch"] == 64 and problem["cluster"]["name"] == "world-64"
    fresh.unroute_all(behavior="ignoreErrors")


def test_what_is_edited_while_a_plan_is_opened_is_not_lost(fresh, server, wide_plan):
    """What the plan was asked for takes the fields only of who left them alone."""
    choose(fresh, "opt-350m")
    held = Held(fresh, "**/request")
    fresh.evaluate(f"location.hash = '#plan={wide_plan}&view=overview'")
    fresh.locator("[data-card=step]").wait_for()
    held.wait()
    fill(fresh, "batch.global_batch", "48")
    with fresh.expect_response("**/request"):
        held.release()
    fresh.wait_for_timeout(100)
    expect(fresh.locator("[data-path='batch.global_batch']")).to_have_value("48")
    expect(fresh.locator("#fold-model small")).to_contain_text("opt-350m")


def test_the_list_of_plans_is_the_newest_that_was_asked_for(page, server, plan_id):
    """An older answer that comes late does not bring back what was deleted; who has gone on to another plan stays."""
    made = server.request("POST", "/api/v1/plans", plan_data(*planned()))[2]["id"]
    visit(page, server, made)
    here = page.locator("#plan-list li.here")
    gone = Held(page, f"**/api/v1/plans/{made}", "DELETE")
    here.locator(".menu > button").click()
    page.once("dialog", lambda dialog: dialog.accept())
    here.get_by_role("button", name="Delete").click()
    gone.wait()
    listed = Held(page, "**/api/v1/jobs", "GET")
    page.evaluate(f"location.hash = '#plan={plan_id}&view=overview'")
    page.locator("#language").click()  # asks for the list, in words of another language
    listed.wait()
    old = [(route, route.fetch()) for route in listed.routes]  # two where opening the plan asks, too
    listed.released = True
    with page.expect_response(lambda r: r.url.endswith("/api/v1/jobs")):
        gone.release()
    page.locator("#plan-list li").first.wait_for()
    before = page.locator("#plan-list li").count()
    for route, answer in old:
        route.fulfill(response=answer)
    page.wait_for_timeout(100)
    page.locator("#language").click()
    assert page.locator("#plan-list li").count() == before
    page.wait_for_timeout(100)
    assert f"plan={plan_id}" in page.url and page.faults == []
    page.unroute_all(behavior="ignoreErrors")


def test_a_name_is_kept_until_the_server_has_it(page, server):
    """What was typed stays where it is refused; pushed twice it is sent once."""
    made, _ = name_a_new_plan(page, server, "a name", "x" * 41)
    page.locator("#trouble").wait_for()
    expect(page.locator(".naming [name=name]")).to_have_value("a name")
    page.faults.clear()
    page.locator(".naming [name=tags]").fill("x")
    held = Held(page, f"**/api/v1/jobs/{made}", "PATCH")
    page.locator(".naming .main").dblclick()
    held.wait()
    page.wait_for_timeout(50)
    assert len(held.routes) == 1
    held.release()
    page.locator("#what", has_text="a name").wait_for()
    page.locator(".naming").wait_for(state="detached")
    page.unroute_all(behavior="ignoreErrors")
    server.request("DELETE", f"/api/v1/plans/{made}")


def test_who_has_gone_elsewhere_is_not_called_to_a_variant(page, server, plan_id, wide_plan):
    """A variant is kept once, however often its button is pushed, and opened only for who waits for it."""
    visit(page, server, plan_id)
    page.locator("#drawer-whatif").click()
    slide(page, "bandwidth_factor", 0)
    page.locator("#keep").wait_for()
    held = Held(page, "**/variants", "POST")
    page.locator("#keep").dblclick()
    held.wait()
    page.wait_for_timeout(50)
    assert len(held.routes) == 1
    page.evaluate(f"location.hash = '#plan={wide_plan}&view=strategy'")
    page.locator("#tab-strategy[aria-selected=true]").wait_for()
    held.release()
    page.locator(".notice.on", has_text="in the list").wait_for()
    assert f"plan={wide_plan}&view=strategy" in page.url
    page.unroute_all(behavior="ignoreErrors")


def test_figures_are_of_the_plan_that_is_open(page, server, plan_id, wide_plan):
    """While a plan is opened no pane shows the one before as its own; what is tried on it is held against itself."""
    visit(page, server, plan_id, "strategy")
    table = page.locator("#view table").first
    opened = Held(page, re.compile(f"{wide_plan}/view"))
    page.evaluate(f"location.hash = '#plan={wide_plan}&view=strategy'")
    opened.wait()
    assert table.count() == 0
    opened.release()
    table.wait_for()
    visit(page, server, plan_id)
    priced = Held(page, re.compile(f"{wide_plan}/view"))
    page.evaluate("location.hash = '#plan=" + wide_plan + '&view=overview&what={"bandwidth_factor":4}\'')
    priced.wait()
    [plain] = priced.routes
    plain.fallback()
    priced.routes.clear()
    priced.wait("bandwidth_factor")
    assert page.locator(".banner").count() == 0
    priced.release()
    page.locator(".banner", has_text="tokens").wait_for()


def test_a_target_s_files_are_shown_under_its_own_name(page, server, plan_id, wide_plan):
    """While another target's files, or another plan, are under way, nothing of those before is offered as theirs."""
    visit(page, server, plan_id, "deploy")
    page.locator("#file-text", has_text="train_batch_size").wait_for()
    held = Held(page, "**/exports/megatron")
    page.locator("#target-megatron").click()
    held.wait()
    page.wait_for_timeout(50)
    assert page.locator("#file-text").count() == 0
    held.release()
    page.locator("#file-text", has_text="--pipeline-model-parallel-size").wait_for()
    opened = Held(page, re.compile(f"{wide_plan}/view"))
    page.evaluate(f"location.hash = '#plan={wide_plan}&view=deploy'")
    opened.wait()
    page.wait_for_timeout(50)
    opened.release()
    model = server.request("POST", f"/api/v1/plans/{wide_plan}/view", {})[2]["model"]
    wanted = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:24]
    expect(page.locator("[data-path='deploy-name']")).to_have_value(f"{wanted}-megatron")
    written = Held(page, "**/deploy", "POST")
    page.locator("#deploy").dblclick()
    written.wait()
    page.wait_for_timeout(50)
    assert len(written.routes) == 1
    page.unroute_all(behavior="ignoreErrors")


def test_points_of_a_front_that_come_late_do_not_replace_its_end(browser, server):
    """A look into a running front that is answered after its end knows fewer points."""
    page = new_page(browser, server)
    looks, streams = [], []
    ended = {
        "id": "f",
        "state": "done",
        "progress": 1,
        "note": "",
        "error": "",
        "name": "f",
        "kind": "front",
        "tags": [],
    }
    point = {"step_s": 1.0, "usd": 2.0, "devices": 3, "stages": 4}

    def front(route):
        looks.append(route)
        if len(looks) == 1:
            route.fulfill(json=ended | {"state": "running", "progress": 0.1, "points": []})
        elif len(streams) == 2:
            route.fulfill(json=ended | {"points": [point, point | {"step_s": 2.0, "usd": 1.0}]})

    def events(route):
        """Its end comes once the page has asked again: a look that has not left the page is not asked for after it."""
        streams.append(route)
        told = ended | {"state": "running", "progress": 0.5} if len(streams) == 1 else ended
        route.fulfill(body=f"data: {json.dumps(told)}\n\n", content_type="text/event-stream")

    page.route("**/api/v1/fronts/f", front)
    page.route("**/api/v1/jobs/f/events", events)
    page.add_init_script("sessionStorage.setItem('polygon-front', 'f')")
    page.goto(f"{server.url}/#view=front")
    rows = page.locator("#view tbody tr")
    expect(rows).to_have_count(2)
    looks[1].fulfill(json=ended | {"points": [point]})
    page.wait_for_timeout(100)
    expect(rows).to_have_count(2)
    page.context.close()


def test_a_search_goes_on_in_the_language_that_is_chosen(fresh):
    """What a running search says of itself is asked for again in the other language."""
    choose(fresh, "gpt3-1.3b")
    expect(fresh.locator("#fold-cluster small")).to_have_text("8 devices in 2 regions")
    held = Held(fresh, "**/events")
    fresh.locator("#calculate").click()
    fresh.locator("#cancel").wait_for()
    held.wait()
    fresh.locator("#language").click()
    held.wait(count=2)
    assert [r.request.headers["accept-language"] for r in held.routes] == ["en", "zh-CN"]
    fresh.unroute_all(behavior="ignoreErrors")
    fresh.reload()
    fresh.locator("[data-card=step]").wait_for()


def test_a_token_is_asked_for_once(browser, tmp_path):
    """However many requests are refused at once; a late refusal of a request without it asks for no other."""
    server = Server(tmp_path, "--token", "secret")
    page = new_page(browser, server)
    held = Held(page, "**/api/v1/jobs", "GET")
    page.goto(server.url)
    field = page.locator("dialog input[type=password]")
    field.first.wait_for()
    page.wait_for_timeout(100)
    expect(field).to_have_count(1)
    field.fill("secret")
    field.press("Enter")
    page.locator("#calculate:enabled").wait_for()
    held.release()
    page.locator("#plan-list, .plans .empty").first.wait_for()
    assert field.count() == 0
    page.context.close()
    server.stop()


def test_what_is_wrong_again_is_said_whatever_is_answered_of_what_was_right(fresh):
    """By undo in the moment in which the server finds the cluster right as it was before that."""
    path = "cluster.regions[0].nodes[0].count"
    choose(fresh, "gpt3-1.3b")
    expect(fresh.locator("#fold-cluster small")).to_have_text("8 devices in 2 regions")
    fresh.locator("#tab-cluster").click()
    fill(fresh, path, "0")
    fresh.locator("#calculate").click()
    trouble = fresh.locator("#trouble")
    expect(trouble).to_contain_text(path)
    fill(fresh, "batch.seq_len", "1024")
    fresh.evaluate("""() => {
        const ask = window.fetch;
        window.fetch = async (...asked) => {
            const answer = await ask(...asked);
            if (!String(asked[0]).endsWith("/clusters") || !answer.ok) return answer;
            const text = await answer.text();
            window.fetch = ask;
            document.getElementById("undo").click();
            return new Response(text, answer);
        };
    }""")
    with fresh.expect_response(lambda answer: answer.url.endswith("/clusters") and answer.status == 422):
        fill(fresh, path, "1")
    expect(fresh.locator(f"[data-path='{path}']")).to_have_value("0")
    expect(fresh.locator(f"[data-path='{path}'][aria-invalid=true]")).to_have_count(1)
    expect(trouble).to_contain_text(path)
