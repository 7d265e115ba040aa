"""The page in a real Chromium: every view, each control changing its numbers, accessibility, nothing from outside."""

import json
import os
import re
import shutil
import zipfile
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import yaml

from polygon.__main__ import main
from polygon.domain.model import Batch
from polygon.domain.optimizer import OPTIMIZERS
from polygon.domain.plan import LinkUse, Problem
from polygon.formats import catalogue
from polygon.formats.convert_plan import plan_data
from polygon.formats.files import read_cluster, write_plan
from polygon.formats.serialization import format_json
from polygon.messages.report import seconds, three
from polygon.planning.decode import Allocation, Decoder
from tests.exported_plans import planned, wide
from tests.free_ports import free_port
from tests.patience import PATIENCE_S, eventually
from tests.web.conftest import ROOT, Server, run_lines

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
if CHROMIUM is None:
    pytest.skip("no Chromium found (apt-get install chromium): the page is not tested", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install -e '.[test]')")
expect = playwright.expect
expect.set_options(timeout=1000 * PATIENCE_S)

VIEWS = ["overview", "cluster", "strategy", "communication", "compare", "front", "deploy", "runs"]
SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1366, 900)}
AXE = (Path(__file__).parent / "axe.min.js").read_text("utf-8")
SHOTS = Path(os.environ["POLYGON_SCREENSHOTS"]) if "POLYGON_SCREENSHOTS" in os.environ else None


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        yield p.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=1000 * PATIENCE_S
        )


def new_page(browser, server, size="desktop", **options):
    width, height = SIZES[size]
    options = {"viewport": {"width": width, "height": height}, "reduced_motion": "reduce", "locale": "en-US"} | options
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    page.outside = []
    page.faults = []
    page.on("request", lambda r: r.url.startswith((server.url, "data:", "blob:")) or page.outside.append(r.url))
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda m: page.faults.append(m.text) if m.type == "error" else None)
    return page


@pytest.fixture(scope="module")
def kept_page(browser, server):
    return new_page(browser, server)


@pytest.fixture(scope="module")
def kept_chinese_page(browser, server):
    return new_page(browser, server, locale="zh-CN")


def leave(page, server):
    """Open next to nothing: what comes next is loaded anew. A page of the same server, as another, about:blank too, has
    the browser start a process and compile all scripts again."""
    page.goto(f"{server.url}/api/v1/deployments")


def forget(page, server):
    """Leave what is open; nothing is kept, answered otherwise or said of what came before."""
    page.unroute_all(behavior="ignoreErrors")
    leave(page, server)
    page.evaluate("sessionStorage.clear(); localStorage.clear()")
    width, height = SIZES["desktop"]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.faults.clear()
    page.outside.clear()


@pytest.fixture
def page(kept_page, server):
    """The page of all tests, with nothing open."""
    forget(kept_page, server)
    return kept_page


@pytest.fixture
def chinese_page(kept_chinese_page, server):
    """The same in a browser whose language is Chinese."""
    forget(kept_chinese_page, server)
    return kept_chinese_page


@pytest.fixture
def fresh(page, server):
    """A page as somebody sees it who comes for the first time."""
    page.goto(server.url)
    page.locator("#calculate:enabled").wait_for()
    return page


def visit(page, server, plan, view="overview", more=""):
    if page.url.startswith(server.url):
        leave(page, server)
    page.goto(f"{server.url}/#plan={plan}&view={view}{more}")
    page.locator(f"#tab-{view}[aria-selected=true]").wait_for()
    page.locator("#what").filter(has_text=re.compile(".")).wait_for(state="attached")
    page.wait_for_load_state("networkidle")
    expect(page.locator("#view .skeleton")).to_have_count(0)


COLORS = ["color-contrast", "link-in-text-block"]
"""Rules of axe that look at colors, which alone are others in the dark."""


def violations(page: Any, *rules: str) -> list[Any]:
    """What axe finds, by all of its rules or by these; the page has `AXE`."""
    asked = {"resultTypes": ["violations"]} | ({"runOnly": {"type": "rule", "values": rules}} if rules else {})
    found = page.evaluate("asked => axe.run(document, asked)", asked)["violations"]
    return [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in found]


def chart_data(page, name):
    page.wait_for_function(f"() => window.polygonCharts?.has('{name}')")
    return page.evaluate(f"window.polygonCharts.get('{name}').getOption().series.map(s => s.data)")


def card(page, key):
    return page.locator(f"[data-card={key}] b").inner_text()


class Held:
    """What a page asks of addresses like `pattern`, kept back until `release`; what it asks later passes."""

    def __init__(self, page: Any, pattern: Any, method: str = ""):
        self.page, self.method, self.routes, self.released = page, method, [], False
        page.route(pattern, self._ask)

    def _ask(self, route: Any) -> None:
        if self.released or self.method not in ("", route.request.method):
            route.fallback()
        else:
            self.routes.append(route)

    def wait(self, part: str = "", *, count: int = 1) -> None:
        """Until so many requests are kept back that have `part` in what they send."""
        wanted = lambda: sum(part in (route.request.post_data or "") for route in self.routes)  # noqa: E731
        assert eventually(lambda: self.page.wait_for_timeout(1) or wanted() >= count)

    def release(self) -> None:
        self.released = True
        for route in self.routes:
            route.fallback()


def listen(page, region):
    """Keep what a live region says, in the order in which it says it."""
    page.evaluate(
        """(region) => {
      const spoken = document.getElementById(region);
      window.heard = [];
      new MutationObserver(() => spoken.textContent && window.heard.push(spoken.textContent))
        .observe(spoken, { childList: true, characterData: true, subtree: true });
    }""",
        region,
    )


def heard(page, words):
    """Whether that was said since `listen`, waited for; all that was."""
    page.wait_for_function("words => window.heard.some((said) => said.includes(words))", arg=words)
    return page.evaluate("window.heard")


def fill(page, path, text):
    page.locator(f"[data-path='{path}']").fill(text)


def choose(page, model, instance="two-campus"):
    """A shipped cluster and a model of the catalogue, on the rail."""
    page.locator("#fold-cluster").click()
    page.locator("[data-path=instance]").select_option(instance)
    page.locator("#fold-model").click()
    page.locator("[data-path=model]").select_option(model)


def ask_little(page):
    """A model and a batch for which any search is short; the fold stays open."""
    page.locator("#fold-model").click()
    page.locator("[data-path=model]").select_option("opt-350m")
    fill(page, "batch.global_batch", "8")
    fill(page, "batch.seq_len", "128")


def slide(page, name, position):
    page.locator(f"[data-change={name}]").evaluate(
        "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})) }", position
    )


def test_every_view_is_accessible_and_asks_nobody_outside(page, server, wide_plan):
    """axe finds nothing in any view, light and dark; every button is called by words; no error on the console; no
    request to another host."""
    other, run = variant(server, wide_plan), opened_run(server, wide_plan)
    for view in VIEWS:
        visit(page, server, wide_plan, view, f"&with={other}&run={run}")
        page.evaluate(AXE)
        for scheme, rules in (("light", []), ("dark", COLORS)):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            assert (view, scheme, violations(page, *rules)) == (view, scheme, [])
        said = page.locator("button:visible").evaluate_all("all => all.map((b) => b.ariaLabel ?? b.textContent)")
        assert [(view, name) for name in said if not any(letter.isalnum() for letter in name)] == []
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    assert page.outside == [] and page.faults == []


def test_what_opens_over_the_page_is_accessible(page, server, wide_plan):
    """axe finds nothing in the palette, menus, a plan that is named, the drawer's tabs, and what says that a file or a
    field is wrong."""
    visit(page, server, wide_plan)
    page.evaluate(AXE)
    for words in ("", "nothing is called so"):
        page.keyboard.press("Control+k")
        page.locator(".palette input[type=text]").fill(words)
        assert violations(page) == []
        page.keyboard.press("Escape")
    for menu in ("#plans-menu", "#timeline-menu", "#plan-list li.here .menu > button"):
        page.locator(menu).click()
        assert violations(page) == []
    page.get_by_role("button", name="Name and tags").click()
    assert violations(page) == []
    page.locator(".naming").get_by_role("button", name="Close").click()
    for name in ("whatif", "whynot", "assumed"):
        page.locator(f"#drawer-{name}").click()
        assert violations(page) == []
    for fold in ("cluster", "model", "goal"):
        page.locator(f"#fold-{fold}").click()
    page.locator("summary", has_text="Constraints").click()
    assert violations(page) == []
    page.locator("#tab-cluster").click()
    expect(page.locator("#yaml")).to_have_value(re.compile("regions:"))
    page.locator("#yaml").fill("regions: [")
    page.locator("#yaml-error").wait_for()
    fill(page, "cluster.regions[0].nodes[0].count", "0")
    page.locator("#cluster-error").wait_for()
    page.locator("#calculate").click()
    page.locator("#trouble").wait_for()
    assert violations(page) == []
    page.locator("#yaml-back").click()


IN_ITS_LIST = """id => {
  const tab = document.getElementById(id), [a, b] = [tab, tab.parentElement].map((e) => e.getBoundingClientRect());
  return a.left >= b.left - 1 && a.right <= b.right + 1;
}"""


@pytest.mark.parametrize(("scheme", "language", "kept"), [("light", "en", "page"), ("dark", "zh", "chinese_page")])
def test_every_view_fits_the_screen(request, server, wide_plan, scheme, language, kept):
    """No view is wider than the window, in either language, when it is opened on a phone and when that grows; on a
    desktop none is longer, parts scroll by themselves.

    Screenshots are kept where POLYGON_SCREENSHOTS says.
    """
    page = request.getfixturevalue(kept)
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    other, run = variant(server, wide_plan), opened_run(server, wide_plan)
    for view in VIEWS:
        for size, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            if size == "phone":
                visit(page, server, wide_plan, view, f"&with={other}&run={run}")
            page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
            if size == "desktop":
                page.wait_for_function("() => document.documentElement.scrollHeight <= innerHeight")
            page.wait_for_function(IN_ITS_LIST, arg=f"tab-{view}")
            if SHOTS:
                SHOTS.mkdir(parents=True, exist_ok=True)
                page.screenshot(path=SHOTS / f"{size}-{scheme}-{language}-{view}.png")
    assert page.faults == []


def opened_run(server, plan):
    """A run with its losses and a traced step, opened beside a plan."""
    trace = server.request("GET", f"/api/v1/plans/{plan}/trace")[2]
    files = {"trace.json": json.dumps(trace), "rank-0.jsonl": run_lines(30)}
    return server.request("POST", "/api/v1/runs", {"name": "run", "plan": plan, "files": files})[2]["name"]


def variant(server, plan, **changes):
    """A plan with twice the bandwidth, kept beside the first."""
    asked = {"name": "wider", "changes": changes or {"bandwidth_factor": 2.0}}
    return server.request("POST", f"/api/v1/plans/{plan}/variants", asked)[2]["id"]


def test_a_plan_from_the_form_and_the_command_line_are_the_same(fresh, server, tmp_path):
    """A cluster built in the browser alone, saved: the command line's plan of the file is this one, to the digit."""
    page = fresh
    page.locator("#fold-cluster").click()
    page.locator("#by-hand").click()
    page.locator("#tab-cluster[aria-selected=true]").wait_for()
    for name, device, count, each in (("Frankfurt", "h100-sxm", 2, 8), ("Tokyo", "t4", 2, 4)):
        page.locator("[data-path=place]").select_option(name)
        page.locator("[role=tab][aria-selected=true]", has_text=name.lower()).wait_for()
        at = "cluster.regions[0]" if name == "Frankfurt" else "cluster.regions[1]"
        page.locator(f"[data-path='{at}.nodes[0].device']").select_option(device)
        fill(page, f"{at}.nodes[0].count", str(count))
        fill(page, f"{at}.nodes[0].devices_per_node", str(each))
    page.locator("#region-tab-0").click()
    expect(page.locator(".link-fields", has_text="Network inside the region").locator(".mark")).to_have_text("default")
    fill(page, "cluster.regions[0].intra_region.bandwidth_gbps", "1600")
    expect(page.locator(".link-fields", has_text="Network inside the region").locator(".mark")).to_have_text("given")
    fill(page, "cluster.bandwidth_gbps[0][1]", "5")
    page.locator("#fold-model").click()
    page.locator("[data-path=model]").select_option("gpt3-1.3b")
    fill(page, "batch.global_batch", "64")
    fill(page, "batch.seq_len", "1024")
    page.locator("#fold-goal").click()
    page.get_by_label("Effort").select_option("quick")
    expect(page.locator("#yaml")).to_have_value(re.compile("1600"))
    page.locator("#cluster-menu").click()
    with page.expect_download() as saved:
        page.locator("#export-yaml").click()
    saved.value.save_as(tmp_path / "mine.yaml")
    page.locator("#calculate").click()
    page.locator("#tab-overview[aria-selected=true]").wait_for()
    plan = re.search("plan=([^&]+)", page.url)[1]
    shown = server.request("GET", f"/api/v1/plans/{plan}")[2]
    command = ["search", "--cluster", str(tmp_path / "mine.yaml"), "--model", "gpt3-1.3b", "--global-batch", "64",
               "--seq-len", "1024", "--effort", "quick", "-o", str(tmp_path / "plan.json")]  # fmt: skip
    assert main(command) == 0
    said = json.loads((tmp_path / "plan.json").read_text())
    assert {k: v for k, v in said.items() if k != "problem"} == {k: v for k, v in shown.items() if k != "problem"}


def test_nothing_of_a_draft_is_lost(fresh, server):
    """What was typed is there after a reload; undo and redo walk through it; Back goes through the views."""
    fresh.locator("#fold-model").click()
    fill(fresh, "batch.global_batch", "48")
    fresh.locator("#tab-cluster").click()
    fill(fresh, "cluster.regions[0].egress_usd_per_gb", "0.25")
    fresh.reload()
    fresh.locator("#tab-cluster[aria-selected=true]").wait_for()
    expect(fresh.locator("[data-path='cluster.regions[0].egress_usd_per_gb']")).to_have_value("0.25")
    expect(fresh.locator("[data-path='batch.global_batch']")).to_have_value("48")
    fresh.locator("#undo").click()
    expect(fresh.locator("[data-path='cluster.regions[0].egress_usd_per_gb']")).to_have_value("0.02")
    fresh.locator("#undo").click()
    expect(fresh.locator("[data-path='batch.global_batch']")).to_have_value("512")
    fresh.locator("#redo").click()
    expect(fresh.locator("[data-path='batch.global_batch']")).to_have_value("48")
    fresh.go_back()
    fresh.locator("#tab-overview[aria-selected=true]").wait_for()
    fresh.go_forward()
    fresh.locator("#tab-cluster[aria-selected=true]").wait_for()


MOST_ROUNDS = 100
"""Looks at a page, five a second at most, after which a request without an end is taken for one of a page before."""
FIELDS = """() => {
  const held = (e) => (e.type === "checkbox" ? e.checked : e.value);
  const fields = [...document.querySelectorAll("input:not([type=file]), select, textarea:not(#yaml)")];
  const chosen = document.querySelectorAll("[aria-selected=true], [aria-pressed=true], [aria-expanded=true]");
  const seen = [...chosen].filter((e) => e.checkVisibility()).map((e) => e.textContent);
  return [location.hash, fields.map((e) => [e.dataset.path ?? e.dataset.change ?? e.id, held(e)]), seen];
}"""


def test_a_reload_at_every_step_of_a_session_loses_nothing(fresh, server):
    """A cluster by hand, work and limits, a plan, what-ifs, a variant with a name half-typed, a comparison, hosts:
    after each step a reload shows every field as it was, in the same pane with the same folds, tabs and choices."""
    page = fresh
    under_way = dict[Any, int]()

    def begins(request: Any) -> None:
        """What a page that is left had asked for may end without a word."""
        if request.is_navigation_request():
            under_way.clear()
        under_way[request] = 0

    def ends(request: Any) -> None:
        """Heard, or given up."""
        under_way.pop(request, None)

    heard_of = {"request": begins, "requestfinished": ends, "requestfailed": ends}
    for event, hear in heard_of.items():
        page.on(event, hear)

    def settled() -> Any:
        """What all fields say once nothing is asked or waited for, and a moment changes nothing."""
        while True:
            page.wait_for_timeout(100)
            expect(page.locator("#view .skeleton, .waiting, [aria-busy=true]")).to_have_count(0)
            before = page.evaluate(FIELDS)
            page.wait_for_timeout(100)
            if not under_way and page.evaluate(FIELDS) == before:
                return before
            # A page that is being left may ask for something once more, of which nobody hears how it ended.
            for request, rounds in list(under_way.items()):
                under_way[request] = rounds + 1
                if rounds == MOST_ROUNDS:
                    ends(request)

    def step(do: Any) -> None:
        """Do one thing, and find everything again after a reload."""
        do()
        before = settled()
        page.reload()
        page.wait_for_function(
            f"before => JSON.stringify(({FIELDS})()) === before",
            arg=json.dumps(before, separators=(",", ":"), ensure_ascii=False),
        )

    def by_hand() -> None:
        """Begin with nothing."""
        page.locator("#fold-cluster").click()
        page.locator("#by-hand").click()

    def region(name: str) -> None:
        """Add one of the known places."""
        page.locator("[data-path=place]").select_option(name)
        page.locator("[role=tab][aria-selected=true]", has_text=name.lower()).wait_for()

    def planned_anew() -> None:
        """Have the plan made, and wait for all that is said of it."""
        page.locator("#calculate").click()
        page.locator("[data-card=step]").wait_for()

    def named() -> None:
        """Begin to give the plan a name."""
        page.locator("#plan-list li.here .menu > button").click()
        page.get_by_role("button", name="Name and tags").click()
        page.locator(".naming [name=name]").fill("half a na")

    for do in (
        by_hand,
        lambda: region("Frankfurt"),
        lambda: page.locator("[data-path='cluster.regions[0].nodes[0].device']").select_option("h100-sxm"),
        lambda: region("Tokyo"),
        lambda: fill(page, "cluster.regions[1].intra_region.bandwidth_gbps", "200"),
        lambda: fill(page, "cluster.latency_ms[1][0]", "130"),
        lambda: page.get_by_label("both ways: tokyo").click(),
        lambda: fill(page, "cluster.bandwidth_gbps[0][1]", "4"),
        lambda: fill(page, "cluster.name", "by my hand"),
        lambda: page.locator("#fold-model").click(),
        lambda: page.locator("[data-path=model]").select_option("opt-350m"),
        lambda: fill(page, "batch.global_batch", "16"),
        lambda: page.locator("[data-path='batch.optimizer']").select_option("muon"),
        lambda: page.locator("#fold-goal").click(),
        lambda: page.get_by_label("Objective").select_option("money"),
        lambda: page.locator("summary", has_text="Constraints").click(),
        lambda: fill(page, "constraints.most_stages", "2"),
        lambda: fill(page, "seed", "7"),
        planned_anew,
        lambda: page.locator("#drawer-whatif").click(),
        lambda: slide(page, "bandwidth_factor", "4"),
        lambda: page.locator("[data-change=algorithm]").select_option("ring"),
        lambda: page.locator("[data-change=device]").select_option("h100-sxm"),
        lambda: page.locator("#keep").click(),
        named,
        lambda: page.locator(".naming .main").click(),
        lambda: page.locator("#tab-compare").click(),
        lambda: page.get_by_label("Add a plan").select_option(index=1),
        lambda: page.locator("#tab-deploy").click(),
        lambda: page.locator("#target-torchrun").click(),
        lambda: fill(page, "deploy-name", "mine"),
        lambda: page.locator("#deploy-hosts").fill("gpu-1\ngpu-2"),
        lambda: page.locator("#drawer-assumed").click(),
    ):
        step(do)
    for event, hear in heard_of.items():
        page.remove_listener(event, hear)
    # A target that cannot say the plan is an answer.
    assert [fault for fault in page.faults if "422" not in fault] == []


def test_back_goes_through_all_views(page, server, wide_plan):
    """One after another, and forward again; what was opened in between, too."""
    visit(page, server, wide_plan)
    for view in VIEWS[1:]:
        page.locator(f"#tab-{view}").click()
        page.locator(f"#tab-{view}[aria-selected=true]").wait_for()
    for way, views in ((page.go_back, VIEWS[-2::-1]), (page.go_forward, VIEWS[1:])):
        for view in views:
            way()
            expect(page.locator(f"#tab-{view}")).to_have_attribute("aria-selected", "true")
            assert f"plan={wide_plan}" in page.url and f"view={view}" in page.url


def test_two_tabs_go_their_own_ways(fresh, server):
    """Each has a draft, a history and a plan of its own, after a reload, too; a new one begins with what was edited
    last."""
    one = fresh
    one.locator("#fold-model").click()
    batch = "[data-path='batch.global_batch']"
    one.locator(batch).fill("48")
    one.wait_for_function("() => localStorage.getItem('polygon-draft')?.includes('48')")
    two = one.context.new_page()
    two.goto(server.url)
    two.locator("#fold-model").click()
    expect(two.locator(batch)).to_have_value("48")
    expect(two.locator("#undo")).to_have_attribute("aria-disabled", "true")
    two.locator(batch).fill("96")
    one.locator("#tab-cluster").click()
    for page, own in ((one, "48"), (two, "96")):
        page.reload()
        expect(page.locator(batch)).to_have_value(own)
    expect(two.locator("#tab-overview")).to_have_attribute("aria-selected", "true")
    one.locator("#undo").click()
    expect(one.locator(batch)).to_have_value("512")
    expect(two.locator(batch)).to_have_value("96")
    two.close()


def test_the_file_beside_the_fields_works_both_ways(fresh, server):
    """A value in the file appears in its field and the other way; a fault is said and changes nothing."""
    fresh.locator("#tab-cluster").click()
    expect(fresh.locator("#yaml")).to_have_value(re.compile("regions:"))
    text = fresh.locator("#yaml").input_value()
    first = re.search(r"count: (\d+)", text)[0]
    fresh.locator("#yaml").fill(text.replace(first, "count: 7", 1))
    count = fresh.locator("[data-path='cluster.regions[0].nodes[0].count']")
    expect(count).to_have_value("7")
    fresh.locator("#yaml").fill(text.replace(first, "count: -1", 1))
    fresh.locator("#yaml-error", has_text="count: found -1").wait_for()
    expect(count).to_have_value("7")
    fresh.locator("#yaml").fill(text.replace(first, "count: 7", 1))
    fresh.locator("#yaml-error").wait_for(state="detached")
    fresh.locator("#yaml").blur()
    count.fill("9")
    expect(fresh.locator("#yaml")).to_have_value(re.compile("count: 9"))
    count.fill("0")
    fresh.locator("[data-path='cluster.regions[0].nodes[0].count'][aria-invalid=true]").wait_for()
    expect(fresh.locator("#cluster-error")).to_contain_text("count: found 0")


def test_what_network_cards_do_is_asked_of_own_links(fresh):
    """Beside a link's own numbers, where the file has it too; a new rate leaves it as it is."""
    fresh.locator("#tab-cluster").click()
    inside = "cluster.regions[0].intra_region"
    cards = fresh.locator(f"[data-path='{inside}.rdma']")
    fill(fresh, f"{inside}.latency_ms", "0.03")
    cards.select_option(label="RDMA (InfiniBand, RoCE, EFA)")
    fill(fresh, f"{inside}.bandwidth_gbps", "400")
    expect(fresh.locator("#yaml")).to_have_value(re.compile("rdma: true"))
    cards.select_option(index=0)
    expect(fresh.locator("#yaml")).not_to_have_value(re.compile("rdma"))
    expect(fresh.locator("#yaml")).to_have_value(re.compile("bandwidth_gbps: 400"))


def test_the_link_of_an_own_device_stays_in_the_file(fresh):
    """What is written below `devices` joins its nodes' devices, is marked as given, and is asked."""
    fresh.locator("#tab-cluster").click()
    file = fresh.locator("#yaml")
    expect(file).to_have_value(re.compile("regions:"))
    device = (
        "{memory_gib: 80, tflops: {fp32: 30, bf16: 300}, memory_bandwidth_gb_per_s: 900, power_w: 300, link: nvlink4}"
    )
    nodes = "[{device: mine, count: 2, devices_per_node: 8}]"
    file.fill(f"name: own\ndescription: bought\ndevices:\n  mine: {device}\nregions:\n- {{name: a, nodes: {nodes}}}\n")
    file.press("Tab")
    link = catalogue.link("nvlink4")
    expect(file).to_have_value(re.compile(r"link: \{latency_ms: [\d.]+, bandwidth_gbps: 3600\}"))
    expect(file).to_have_value(re.compile("description: bought"))
    assert link.bytes_per_s == 3600e9 / 8
    fresh.locator("summary", has_text="Links of these nodes").click()
    expect(fresh.locator(".link-fields", has_text="Inside a node").locator(".mark")).to_have_text("given")
    with fresh.expect_request(re.compile("/jobs$")) as asked:
        fresh.locator("#calculate").click()
    asked_cluster = asked.value.post_data_json["problem"]["cluster"]
    assert asked_cluster["devices"]["mine"]["link"]["bandwidth_gbps"] == 3600
    fresh.locator("#cancel, [data-card=step]").first.wait_for()


def test_what_is_typed_into_the_file_is_asked_or_said_to_be_wrong(fresh):
    """Half-typed it is kept over a look at another pane and a reload, and no search goes without it; a search at once
    after the last letter has it."""
    ask_little(fresh)
    fresh.locator("#tab-cluster").click()
    file = fresh.locator("#yaml")
    expect(file).to_have_value(re.compile("regions:"))
    whole = file.input_value()
    first = re.search(r"count: (\d+)", whole)[0]
    file.fill(whole.replace(first, "count: [", 1))
    fault = fresh.locator("#yaml-error")
    fault.wait_for()
    expect(file).to_have_attribute("aria-invalid", "true")
    half = file.input_value()
    fresh.locator("#tab-overview").click()
    fresh.locator("#tab-cluster").click()
    expect(file).to_have_value(half)
    fresh.reload()
    expect(file).to_have_value(half)
    expect(fault).to_be_visible()
    fresh.locator("#tab-overview").click()
    fresh.locator("#calculate").click()
    fresh.locator("#trouble", has_text="was not taken over").wait_for()
    expect(file).to_be_focused()
    expect(fresh.locator("#cancel")).to_have_count(0)
    count = fresh.locator("[data-path='cluster.regions[0].nodes[0].count']")
    count.fill("3")
    expect(file).to_have_value(half)
    fresh.locator("#yaml-back").click()
    expect(fault).to_have_count(0)
    expect(file).to_be_focused()
    expect(file).to_have_value(re.compile("count: 3"))
    now = file.input_value()
    with fresh.expect_request(re.compile("/jobs$")) as asked:
        file.fill(now.replace("count: 3", "count: 4", 1))
        file.press("Control+Enter")
    assert asked.value.post_data_json["problem"]["cluster"]["regions"][0]["nodes"][0]["count"] == 4
    expect(count).to_have_value("4")
    fresh.locator("#undo").click()
    expect(count).to_have_value("3")


def test_the_file_is_there_before_the_server_answers(fresh, server):
    """A server that searches may take its time: after a reload the file beside the fields is the one of before."""
    fresh.locator("#tab-cluster").click()
    file = fresh.locator("#yaml")
    expect(file).to_have_value(re.compile("frankfurt"))
    before = file.input_value()
    fresh.route("**/api/v1/clusters", lambda _: None)  # never answered
    fresh.reload()
    expect(file).to_have_value(before)
    assert fresh.faults == []


def test_an_opened_file_is_shown_as_it_was_written(fresh):
    """Letters of every language stay letters; one is not counted as many; a fault is said with the file's name."""
    text = "name: 東京 only\nregions:\n- {name: Zürich, nodes: [{device: t4, count: 1, devices_per_node: 1}]}\n"
    fresh.locator("#fold-cluster").click()
    for name, what in (("mine.yaml", text.replace("count: 1", "count: -1")), ("mine.yaml", text)):
        fresh.locator("#upload-cluster").set_input_files({"name": name, "mimeType": "", "buffer": what.encode()})
        if what != text:
            expect(fresh.locator("#trouble")).to_contain_text("mine.yaml: regions[0].nodes[0].count: found -1")
    expect(fresh.locator("#fold-cluster")).to_contain_text("1 device in 1 region")
    assert "1 regions" not in fresh.locator("#fold-cluster").inner_text()
    fresh.locator("#edit-cluster").click()
    expect(fresh.locator("#yaml")).to_have_value(re.compile("name: 東京 only\n.*- name: Zürich", re.DOTALL))


@pytest.mark.parametrize("kept", ["page", "chinese_page"])
def test_a_file_of_another_kind_is_told_by_its_name_and_what_it_should_be(request, server, kept):
    """Not by the first key that is unknown, nor by all that there are; the page stays where it is."""
    page, language = request.getfixturevalue(kept), {"page": "en-US", "chinese_page": "zh-CN"}[kept]
    page.goto(server.url)
    for fold in ("cluster", "model"):
        page.locator(f"#fold-{fold}").click()
    page.locator("#plans-menu").click()
    cluster = {"en-US": "a cluster: YAML or JSON with the key regions", "zh-CN": "集群：含 regions 键的 YAML 或 JSON"}
    found = {
        ("#upload-cluster", b""): ("an empty file", "空文件", cluster),
        ("#upload-cluster", b"\x89PNG\r\n\x1a\n\0\0"): ("a binary file", "二进制文件", cluster),
        ("#upload-cluster", b"kind: Pod\nmetadata: {}\n"): ("the keys kind, metadata", "键 kind, metadata", cluster),
        ("#upload-cluster", b'{"hidden_size": 64}'): ("a model", "模型", cluster),
        ("#upload-model", b"regions: []"): (
            "a cluster", "集群", {"en-US": "a model: Hugging Face's config.json", "zh-CN": "模型：Hugging Face"},
        ),
        ("#upload-plan", b"stages: 3"): (
            "no plan", "其中没有方案", {"en-US": "expected a plan.json", "zh-CN": "plan.json"}
        ),
        ("#upload-plan", b"[1]"): ("no plan", "其中没有方案", {"en-US": "expected a plan.json", "zh-CN": "plan.json"}),
        ("#upload-plan", b"{\"kind\": 3}"): (
            "the keys kind", "键 kind", {"en-US": "a plan: JSON with the format", "zh-CN": "方案：format 为"},
        ),
    }  # fmt: skip
    said = page.locator("#trouble")
    for (place, text), (english, chinese, wanted) in found.items():
        if place == "#upload-plan" and not page.locator(place).count():
            page.locator("#plans-menu").click()
        page.locator(place).set_input_files({"name": "cluster.yaml", "mimeType": "", "buffer": text})
        expect(said).to_contain_text("cluster.yaml: found " if language == "en-US" else "cluster.yaml：")
        expect(said).to_contain_text(english if language == "en-US" else chinese)
        expect(said).to_contain_text(wanted[language])
        said.get_by_role("button").click()
    page.locator("#tab-overview[aria-selected=true]").wait_for()
    page.locator("#tab-cluster").click()
    page.locator("#cluster-menu").click()
    page.locator("#import-measured").set_input_files({"name": "pod.yaml", "mimeType": "", "buffer": b"kind: Pod"})
    expect(said).to_contain_text("pod.yaml: found no JSON object" if language == "en-US" else "得到 非 JSON 对象")
    expect(said).to_contain_text("a report of polygon-probe" if language == "en-US" else "测量结果：polygon-probe")


def test_what_nobody_named_is_called_in_the_language_of_the_page(page, server, plan_id):
    """A variant by what differs, a search for many plans by what it asks; a name that somebody gave stays."""
    visit(page, server, plan_id)
    page.locator("#drawer-whatif").click()
    slide(page, "bandwidth_factor", 0)
    page.locator("#keep").click()
    here = page.locator("#plan-list li.here")
    # Below its plan in the list what differs is all there is room for.
    expect(here.locator(".plan-name")).to_have_text(re.compile("^↳ Bandwidth between regions ×"))
    expect(page.locator("#what")).to_contain_text(": Bandwidth between regions ×")
    page.locator("#language").click()
    expect(page.locator("#what")).to_contain_text("区域间带宽")
    expect(here.locator(".plan-name")).to_contain_text("区域间带宽")
    here.locator(".menu > button").click()
    here.get_by_role("button", name="名称与标签").click()
    page.locator(".naming [name=name]").fill("narrow")
    page.locator(".naming .main").click()
    expect(page.locator("#what")).to_have_text("narrow")
    page.locator("#tab-front").click()
    held = Held(page, "**/fronts", "POST")
    page.locator("#start-front").click()
    held.wait()
    assert "name" not in held.routes[0].request.post_data_json  # the server finds one that is unlike the others


def test_amounts_have_prefixes_and_figures_say_what_they_count(page, server, plan_id):
    """Memory of thousands of GiB is told in TiB; what of the communication is exposed counts for one device."""
    first = {
        "kind": "memory", "quality": "", "region": "", "other": "", "device": "t4", "group": 0, "now": 2902.4,
        "default": False, "saves": 0.2, "suggested": 4096.0, "would_save": 0.3,
    }  # fmt: skip
    found = {"step_s": 1.0, "limits": [first], "together": [], "together_saves": 0.0, "whole": True}
    page.route(
        "**/limits/events", lambda r: r.fulfill(body=f"data: {json.dumps(found)}\n\n", content_type="text/event-stream")
    )
    visit(page, server, plan_id)
    expect(page.locator("#limits .limit-head")).to_contain_text("2.8\u00a0TiB")
    expect(page.locator("#limits .savings").first).to_contain_text("4.0\u00a0TiB")
    expect(page.locator("[data-card=exposedTime] small")).to_contain_text("of the step")
    page.unroute_all(behavior="ignoreErrors")


def test_money_has_three_digits_and_time_left_none_behind_the_point(fresh, server, plan_id):
    """1.4 dollars are $ 1.40 beside $ 1.42, what comes to a thousand has its comma as on the command line; what is
    said to take about so long, in whole seconds."""

    def dearer(route):
        answer = route.fetch()
        data = answer.json()
        data["estimate"] |= {"cost_usd": 1.4, "step_s": 0.9996}
        route.fulfill(response=answer, json=data)

    fresh.route(re.compile(r"/view\b"), dearer)
    visit(fresh, server, plan_id)
    expect(fresh.locator("[data-card=perBillion] small")).to_have_text("$\u20091.40 a step")
    expect(fresh.locator("[data-card=step] b")).to_have_text(seconds(0.9996).replace(" ", "\u00a0"))
    fresh.unroute_all(behavior="ignoreErrors")
    fresh.goto(server.url)
    choose(fresh, "gpt3-1.3b")
    fresh.locator("#fold-goal").click()
    fresh.get_by_label("Effort").select_option("thorough")
    expect(fresh.locator("#fold-cluster small")).to_contain_text("8 devices")
    fresh.evaluate("() => { let now = 0; performance.now = () => (now += 200); }")
    fresh.locator("#calculate").click()
    said = fresh.locator(".rail-foot", has_text=re.compile("about .* left"))
    said.wait_for()
    assert re.search(r"about [\d,]+\u00a0s left", said.inner_text())
    fresh.locator("#cancel").click()
    fresh.locator("[data-card=step]").wait_for()


def test_what_is_saved_is_what_the_fields_say(fresh, tmp_path):
    """Not what the server read before the last change, however late it answers; a draft that is wrong is not saved."""
    fresh.locator("#tab-cluster").click()
    expect(fresh.locator("#yaml")).to_have_value(re.compile("frankfurt"))
    asked = []
    # What the editor asks by itself is never answered, what is asked for the file is.
    fresh.route("**/api/v1/clusters", lambda route: asked.append(1) if not asked else route.continue_())
    with fresh.expect_request("**/api/v1/clusters"):
        fill(fresh, "cluster.regions[0].nodes[0].count", "7")
    fresh.locator("#cluster-menu").click()
    with fresh.expect_download() as saved:
        fresh.locator("#export-yaml").click()
    saved.value.save_as(tmp_path / "mine.yaml")
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["regions"][0]["nodes"][0]["count"] == 7
    fill(fresh, "cluster.regions[0].nodes[0].count", "0")
    fresh.locator("#cluster-menu").click()
    fresh.locator("#export-yaml").click()
    expect(fresh.locator("#trouble")).to_contain_text("count: found 0")


def test_a_region_is_chosen_by_a_click_and_moved_by_a_drag(fresh, server):
    """Neither adds one; the dragged region has another place and everything else stays."""
    fresh.locator("#tab-cluster").click()
    tabs = fresh.locator("[id^=region-tab-]")
    spot = fresh.locator(".region[data-region=sydney] circle").first
    tabs.first.wait_for()
    count = tabs.count()
    spot.click()
    fresh.locator("[role=tab][aria-selected=true]", has_text="sydney").wait_for()
    before = fresh.locator("[data-path$='.longitude']").input_value()
    box = spot.bounding_box()
    fresh.mouse.move(box["x"] + 5, box["y"] + 5)
    fresh.mouse.down()
    fresh.mouse.move(box["x"] + 60, box["y"] - 20, steps=4)
    fresh.mouse.up()
    expect(fresh.locator("[data-path$='.longitude']")).not_to_have_value(before)
    expect(tabs).to_have_count(count)


def import_measured(page, folder, links):
    """Open a probe's report of such links; the mark of the network inside the region that is shown, now measured."""
    report = folder / "probe.json"
    report.write_text(json.dumps({"format": "polygon-probe", "version": 1, "links": links}))
    page.locator("#cluster-menu").click()
    page.locator("#import-measured").set_input_files(report)
    inside = page.locator(".link-fields", has_text="Network inside the region").locator(".mark")
    expect(inside).to_have_text("measured")
    return inside


def test_a_measured_value_is_marked_until_it_is_edited(fresh, tmp_path):
    """A probe's report sets fields and their marks; they outlive a reload, and an edit makes the value a given one."""
    fresh.locator("#tab-cluster").click()
    fresh.locator("#region-tab-0").wait_for()
    name = fresh.locator("#region-tab-0").inner_text()
    other = fresh.locator("#region-tab-1").inner_text()
    rows = [{"source_region": name, "target_region": x, "rtt_s": 0.05, "link_bytes_per_s": 5e8} for x in (name, other)]
    inside = import_measured(fresh, tmp_path, rows)
    rate = fresh.locator("[data-path='cluster.bandwidth_gbps[0][1]']")
    expect(rate).to_have_value("4")
    fresh.reload()
    expect(inside).to_have_text("measured")
    rate.fill("7")
    cell = fresh.locator("td", has=rate)
    expect(cell.locator(".mark")).to_have_count(0)
    rate.fill("4")
    expect(cell.locator(".mark")).to_have_text("measured")
    fill(fresh, "cluster.regions[0].intra_region.bandwidth_gbps", "100")
    expect(inside).to_have_text("given")


def test_a_search_can_be_left_and_found_again(page, tmp_path):
    """It is in the address: after a reload its progress is there with Stop, which says that it was heard, and it
    outlives the server."""
    first = Server(tmp_path, "--port", str(free_port()))
    page.goto(first.url)
    page.locator("#fold-goal").click()
    page.get_by_label("Effort").select_option("long")
    page.locator("#calculate").click()
    page.locator("#cancel").wait_for()
    page.reload()
    page.locator("#cancel").wait_for()
    first.stop()
    page.locator("#status", has_text="cannot be reached").wait_for()
    second = Server(tmp_path, "--port", first.url.rpartition(":")[2])
    page.locator("#status", has_text="simulation").or_(page.locator("#status", has_text="search:")).wait_for()
    held = Held(page, "**/api/v1/jobs/*", "DELETE")
    page.locator("#cancel").click()
    expect(page.locator("#cancel")).to_have_text("Stopping …")
    page.locator("#cancel").click(force=True)  # asked once is enough
    held.wait()
    assert len(held.routes) == 1
    held.release()
    page.locator("[data-card=step]").wait_for()
    assert "plan=" in page.url and "job=" not in page.url
    second.stop()


def test_a_server_that_was_away_is_waited_for(page, tmp_path):
    """What is looked at meanwhile, a pane that was not loaded yet and the file too, is there once the server is back;
    it is said while it is away, and no longer; what somebody asked it to do is said not to have been done."""
    port = free_port()
    first = Server(tmp_path, "--port", str(port))
    page.goto(first.url)
    page.locator("#calculate:enabled").wait_for()
    first.stop()
    page.locator("#tab-cluster").click()
    expect(page.locator("#trouble")).to_have_text("The server cannot be reached; trying again.")
    second = Server(tmp_path, "--port", str(port))
    page.locator("#region").wait_for()  # asked for in vain, it would never come
    expect(page.locator("#trouble")).to_have_count(0)
    second.stop()
    page.locator("#yaml").fill("regions: [{name: alone, nodes: [{device: t4, count: 2}]}]")
    expect(page.locator("#trouble")).to_have_text("The server cannot be reached; trying again.")
    expect(page.locator("#yaml-error")).to_have_count(0)
    page.locator("#calculate").click()
    expect(page.locator("#trouble span")).to_have_text("The server could not be reached; ask again once it is back.")
    page.locator("#tab-front").click()
    third = Server(tmp_path, "--port", str(port))
    page.locator("#start-front").wait_for()
    page.locator("#tab-cluster").click()
    expect(page.locator("[data-path='cluster.regions[0].name']")).to_have_value("alone")
    third.stop()


def test_a_running_search_opens_in_another_browser(browser, fresh, server):
    """Its address shows what is asked there, how far it is and Stop, not what lies in that browser; what was changed
    there stays until somebody takes over the search's."""
    mine, theirs = fresh, new_page(browser, server)
    choose(mine, "gpt3-1.3b", "world-64")
    fill(mine, "batch.global_batch", "48")
    mine.locator("#fold-goal").click()
    mine.get_by_label("Effort").select_option("long")
    mine.locator("#calculate").click()
    mine.locator("#cancel").wait_for()
    theirs.goto(mine.url)
    theirs.locator("#cancel").wait_for()
    for fold in ("cluster", "model", "goal"):
        expect(theirs.locator(f"#fold-{fold} small")).to_have_text(mine.locator(f"#fold-{fold} small").inner_text())
    expect(theirs.locator("#what")).to_contain_text("gpt3-1.3b")
    expect(theirs.locator("#status progress")).to_be_visible()
    theirs.locator("#fold-model").click()
    fill(theirs, "batch.global_batch", "96")
    theirs.reload()
    theirs.locator("#cancel").wait_for()
    expect(theirs.locator("[data-path='batch.global_batch']")).to_have_value("96")
    theirs.locator("#status").get_by_role("button", name="Take over").click()
    expect(theirs.locator("[data-path='batch.global_batch']")).to_have_value("48")
    theirs.locator("#undo").click()
    expect(theirs.locator("[data-path='batch.global_batch']")).to_have_value("96")
    theirs.locator("#cancel").click()
    for page in (mine, theirs):
        page.locator("[data-card=step]").wait_for()
        assert "job=" not in page.url and page.faults == []
    theirs.context.close()


def test_what_a_running_search_is_asked_stays_beside_another_plan(browser, page, server, plan_id):
    """After a reload in the middle of a search, and by its address elsewhere, what it is asked is shown, and not what
    the plan was that is still open."""
    visit(page, server, plan_id)
    page.locator("#fold-goal").click()
    page.get_by_label("Effort").select_option("long")
    fill(page, "seed", "5")
    page.locator("#calculate").click()
    page.locator("#cancel").wait_for()
    assert f"plan={plan_id}" in page.url and "job=" in page.url
    theirs = new_page(browser, server)
    theirs.goto(page.url)
    theirs.locator("#fold-goal").click()
    page.reload()
    for each in (page, theirs):
        each.locator("#cancel").wait_for()
        expect(each.locator("#fold-goal small")).to_contain_text("long")
        expect(each.locator("[data-path=seed]")).to_have_value("5")
        expect(each.locator("#status")).not_to_contain_text("not what")
    page.locator("#cancel").click()
    for each in (page, theirs):
        each.wait_for_url(lambda url: "job=" not in url)
        expect(each.locator("[data-path=seed]")).to_have_value("5")
    theirs.context.close()


def test_a_search_waits_for_the_cluster_that_was_chosen(fresh):
    """Of two that are chosen the later is asked for, and not what stood there before, however late it is here."""
    held = Held(fresh, "**/api/v1/instances/*")
    choose(fresh, "gpt3-1.3b", "world-64")
    fresh.locator("[data-path=instance]").select_option("two-campus")
    held.wait(count=2)
    asked = Held(fresh, "**/api/v1/jobs", "POST")
    fresh.locator("#calculate").click()
    held.released = True
    for route in reversed(held.routes):
        with fresh.expect_response(route.request.url):
            route.fallback()
    asked.wait()
    assert asked.routes[0].request.post_data_json["problem"]["cluster"]["name"] == "two-campus"
    asked.release()
    fresh.locator("[data-card=step]").wait_for()
    expect(fresh.locator("#fold-cluster small")).to_have_text("8 devices in 2 regions")


def test_the_question_is_of_what_is_best(fresh):
    """While there is no plan the page asks for the one of the chosen objective."""
    asked = fresh.locator("h1.sentence")
    expect(asked).to_contain_text("trains this model fastest")
    fresh.locator("#fold-goal").click()
    fresh.locator("[data-path=objective]").select_option("money")
    expect(asked).to_contain_text("for least money")


def test_constraints_and_objective_reach_the_planner(fresh, server):
    """What the rail says is what is asked; a fault is told; the plan remembers it for another browser."""
    choose(fresh, "gpt3-1.3b")
    fresh.locator("[data-path=runtime]").select_option("megatron-core")
    names = fresh.locator("[data-path='batch.optimizer'] option").evaluate_all("all => all.map(o => o.value)")
    assert names == list(OPTIMIZERS)
    fresh.locator("[data-path='batch.optimizer']").select_option("muon")
    fill(fresh, "batch.global_batch", "32")
    fresh.locator("#fold-goal").click()
    fresh.get_by_label("Objective").select_option("money")
    fresh.locator("summary", has_text="Constraints").click()
    fresh.locator("[data-path='constraints.forbidden_regions'] label", has_text="south").click()
    fresh.locator("#add-rule").click()
    fresh.locator("[data-path='constraints.stage_rules[0].only_regions'] label", has_text="north").click()
    fill(fresh, "constraints.egress_bytes_per_step.*", "-5")
    fresh.locator("#calculate").click()
    fresh.locator("#trouble", has_text="egress_bytes_per_step").wait_for()
    fresh.locator("[data-path='constraints.egress_bytes_per_step.*'][aria-invalid=true]:focus").wait_for()
    fill(fresh, "constraints.egress_bytes_per_step.*", "5")
    fill(fresh, "seed", "4")
    with fresh.expect_request(re.compile("/jobs$")) as asked:
        fresh.locator("#calculate").click()
    sent = asked.value.post_data_json
    assert (sent["objective"], sent["seed"], sent["problem"]["runtime"]) == ("money", 4, "megatron-core")
    assert sent["problem"]["batch"]["optimizer"] == "muon"
    assert sent["problem"]["constraints"] == {
        "forbidden_regions": ["south"], "stage_rules": [{"stage": 0, "only_regions": ["north"]}],
        "egress_bytes_per_step": {"*": 5e9},
    }  # fmt: skip
    fresh.locator("[data-card=step]").wait_for()
    kept = server.request("GET", f"/api/v1/jobs/{re.search('plan=([^&]+)', fresh.url)[1]}/request")[2]
    assert kept["problem"]["constraints"] == sent["problem"]["constraints"]
    assert (kept["objective"], kept["seed"]) == ("money", 4)


def test_a_search_without_a_plan_says_why_and_gives_back_what_was_asked(fresh, server):
    """Its row in the list is no dead end: limits that nothing keeps are there again, to be asked otherwise."""
    choose(fresh, "opt-350m")
    fill(fresh, "batch.global_batch", "32")
    fresh.locator("#fold-goal").click()
    fresh.locator("summary", has_text="Constraints").click()
    fill(fresh, "constraints.most_step_s", "0.0001")
    fresh.locator("#calculate").click()
    fresh.locator("#trouble", has_text="of which 0.0001 are allowed").wait_for()
    fill(fresh, "constraints.most_step_s", "9")
    fresh.locator("#plan-list .plan[title*='of which 0.0001']", has_text="no plan fits").click()  # others' may be there
    fresh.locator("#trouble", has_text="of which 0.0001 are allowed").wait_for()
    expect(fresh.locator("[data-path='constraints.most_step_s']")).to_have_value("0.0001")
    [none, *_] = [row["id"] for row in server.request("GET", "/api/v1/jobs")[2] if "of which 0.0001" in row["error"]]
    leave(fresh, server)
    fresh.goto(f"{server.url}/#plan={none}&view=strategy")  # and at its address, which is no plan's that was deleted
    fresh.locator("#trouble", has_text="of which 0.0001 are allowed").wait_for()
    expect(fresh).to_have_url(re.compile("#view=strategy$"))


def test_a_fault_is_shown_until_it_is_mended(fresh):
    """A cluster that is right takes back what was said of the cluster, and nothing of another field."""
    fresh.locator("#tab-cluster").click()
    fresh.locator("#fold-model").click()
    count, batch = "cluster.regions[0].nodes[0].count", "batch.global_batch"
    for number, wrong in (("3", batch), ("0", count)):
        fill(fresh, count, number)
        fill(fresh, batch, "many" if wrong == batch else "512")
        expect(fresh.locator("#yaml")).to_have_value(re.compile("count: 3"))  # the server's answer is there
        fresh.locator("#calculate").click()
        expect(fresh.locator("#trouble")).to_contain_text(wrong)
        expect(fresh.locator(f"[data-path='{wrong}']")).to_be_focused()  # else what is typed next goes there
        fill(fresh, count, "4")
        expect(fresh.locator("#yaml")).to_have_value(re.compile("count: 4"))
        expect(fresh.locator(f"[data-path='{wrong}'][aria-invalid=true]")).to_have_count(int(wrong == batch))
        expect(fresh.locator("#trouble")).to_have_count(int(wrong == batch))
        fill(fresh, count, "3")
        expect(fresh.locator("#yaml")).to_have_value(re.compile("count: 3"))


def test_who_types_what_is_wrong_goes_on_in_that_field(fresh):
    """What the server says of a cluster comes beside the field, which stays where it was."""
    fresh.locator("#tab-cluster").click()
    field = fresh.locator("[data-path='cluster.regions[0].nodes[0].count']")
    field.click()
    fresh.keyboard.press("Control+a")
    fresh.keyboard.type("0")
    expect(fresh.locator("#cluster-error")).to_contain_text("count")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_be_focused()
    fresh.keyboard.press("Backspace")
    fresh.keyboard.type("16")
    expect(fresh.locator("#cluster-error")).to_have_count(0)
    expect(field).to_have_value("16")
    expect(field).to_be_focused()


def test_a_number_that_is_none_is_told_where_it_is_typed(fresh):
    """Before anything is asked of the server: what is allowed stands at the field, which is marked, until it is right,
    and what the server says of another field takes the mark from none."""
    for part in ("model", "goal"):
        fresh.locator(f"#fold-{part}").click()
    fresh.locator("summary", has_text="Constraints").click()
    for path, wrong, right, allowed in (
        ("constraints.memory_headroom", "1", "", "a number ≥ 0, < 1"),
        ("constraints.most_usd_per_step", "0", "0.5", "a number > 0"),
        ("constraints.egress_bytes_per_step.*", "-5", "", "a number ≥ 0"),
        ("seed", "1.5", "0", "a whole number ≥ 0, ≤ 2,147,483,648"),
        ("batch.seq_len", "", "512", "a whole number ≥ 1"),
        ("batch.global_batch", "0", "64", "a whole number ≥ 1, ≤ 10,000,000"),
        ("batch.global_batch", "abc", "64", "a whole number ≥ 1, ≤ 10,000,000"),
    ):
        field = fresh.locator(f"[data-path='{path}']")
        field.fill(wrong)
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_have_accessible_description(
            re.compile(f"^expected {re.escape(allowed)}$".replace("\\ ", r"\s"))
        )
        expect(fresh.locator("#trouble")).to_have_count(0)
        field.fill(right)
        expect(fresh.locator("[aria-invalid=true]")).to_have_count(0)
    both = [fresh.locator(f"[data-path='batch.{key}']") for key in ("seq_len", "global_batch")]
    for field in both:
        field.fill("0")
    fresh.locator("#calculate").click()
    expect(fresh.locator("#trouble")).to_contain_text("batch.")
    for field in both:
        expect(field).to_have_attribute("aria-invalid", "true")
    both[1].fill("64")
    expect(both[0]).to_have_attribute("aria-invalid", "true")
    expect(both[1]).not_to_have_attribute("aria-invalid", "true")


def test_a_fault_goes_with_the_value_that_had_it(fresh):
    """Another value in the field takes back what was said of the one before; another field does not."""
    fresh.locator("#fold-model").click()
    fill(fresh, "batch.global_batch", "many")
    fresh.locator("#calculate").click()
    expect(fresh.locator("#trouble")).to_contain_text("batch.global_batch")
    expect(fresh.locator("[data-path='batch.global_batch']")).to_be_focused()
    fill(fresh, "batch.seq_len", "1024")
    fresh.wait_for_timeout(100)
    expect(fresh.locator("#trouble")).to_contain_text("batch.global_batch")
    fill(fresh, "batch.global_batch", "512")
    expect(fresh.locator("#trouble")).to_have_count(0)
    expect(fresh.locator("[aria-invalid=true]")).to_have_count(0)


def test_what_is_wrong_is_seen_where_the_rail_is_open_above_it(fresh):
    """On a phone the button that plans is always there; what it answers is above or below."""
    fresh.set_viewport_size({"width": 390, "height": 844})
    for part in ("cluster", "model", "goal"):
        fresh.locator(f"#fold-{part}").click()
    fresh.locator("summary", has_text="Constraints").click()
    busy = lambda route: route.fulfill(status=429, json={"detail": "too many searches"})  # noqa: E731
    fresh.route("**/api/v1/jobs", lambda route: busy(route) if route.request.method == "POST" else route.fallback())
    fresh.locator("#calculate").click()
    expect(fresh.locator("#trouble")).to_contain_text("too many searches")
    expect(fresh.locator("#trouble")).to_be_in_viewport(ratio=1)


def test_links_say_how_what_goes_back_is_packed(page, server):
    """Gradients of activations, where they alone go that way."""
    problem, plan = wide()
    packed = tuple(LinkUse(source=use.source, target=use.target, activation_gradients="int8") for use in plan.links)
    status, _, row = server.request("POST", "/api/v1/plans", plan_data(problem, replace(plan, links=packed)))
    assert status == 201
    visit(page, server, row["id"], "communication")
    sent = page.locator("[aria-label='Links in use'] tbody tr td:nth-of-type(4)")
    sent.first.wait_for()
    said = [text for text in sent.all_inner_texts() if not text.startswith("0\xa0")]
    assert said and all(text.endswith(" (int8)") for text in said)


def test_what_was_wrong_elsewhere_is_not_said_here(page, server):
    """A plan that is no more is said once, and not of what is looked at after it."""
    page.goto(f"{server.url}/#plan=AAAAAAAAAAAA&view=overview")
    expect(page.locator("#trouble")).to_contain_text("AAAAAAAAAAAA")
    page.evaluate("location.hash = '#view=cluster'")
    page.locator("#tab-cluster[aria-selected=true]").wait_for()
    expect(page.locator("#trouble")).to_have_count(0)


def test_a_place_off_the_earth_is_none(fresh):
    """While it is typed, or where it is wrong, the region stands where those without a place do; a pole is one."""
    fresh.locator("#tab-cluster").click()
    for latitude in ("-100", "90", "1e9"):
        fill(fresh, "cluster.regions[0].latitude", latitude)
        at = fresh.locator("[data-region=virginia] circle").first
        expect(at).to_have_attribute("cy", re.compile(r"^-?[\d.]+$"))
    assert not [fault for fault in fresh.faults if "NaN" in fault or "Infinity" in fault]


def test_a_count_that_is_no_number_leaves_the_region_where_it_is(fresh):
    """Of a number beyond all, and of a text, no devices are counted on the map and in the rail."""
    fresh.locator("#tab-cluster").click()
    for count in ("1e999", "many"):
        fill(fresh, "cluster.regions[0].nodes[0].count", count)
        circle = fresh.locator("[data-region=virginia] circle").first
        expect(circle).to_have_attribute("r", re.compile(r"^[\d.]+$"))
        expect(fresh.locator("#fold-cluster small")).to_have_text("72 devices in 10 regions")
    assert not [fault for fault in fresh.faults if "NaN" in fault or "Infinity" in fault]


def test_an_own_type_of_devices_is_named_used_and_taken_out(fresh):
    """Its name follows into the regions and the limits, is never another's, and stays where it is in use."""
    choose(fresh, "opt-350m")
    fresh.locator("#tab-cluster").click()
    fresh.get_by_role("button", name="Add a device type").click()
    name = fresh.locator("[data-path='cluster.devices.my-device']")
    expect(name).to_be_visible()
    fresh.locator("[data-path='cluster.devices.my-device.architecture']").select_option("x86")
    fresh.locator("[data-path='cluster.regions[0].nodes[0].device']").select_option("my-device")
    fresh.locator("#fold-goal").click()
    fresh.locator("summary", has_text="Constraints").click()
    fresh.locator("[data-path='constraints.forbidden_devices']").get_by_label("my-device").check()
    name.press("Control+a")
    fresh.keyboard.type("rack-cpu")
    fresh.keyboard.press("Tab")
    expect(fresh.locator("[data-path='cluster.regions[0].nodes[0].device']")).to_have_value("rack-cpu")
    expect(fresh.locator("[data-path='constraints.forbidden_devices']").get_by_label("rack-cpu")).to_be_checked()
    expect(fresh.locator("[data-path='cluster.devices.rack-cpu.architecture']")).to_be_focused()
    expect(fresh.locator("#yaml")).to_have_value(re.compile("rack-cpu:\\s.*architecture: x86", re.S))
    fresh.get_by_role("button", name="Add a device type").click()
    other = fresh.locator("[data-path='cluster.devices.my-device']")
    other.fill("rack-cpu")
    expect(fresh.locator("#trouble")).to_contain_text("rack-cpu is no name for it")
    expect(other).to_have_value("my-device")
    expect(fresh.get_by_role("button", name="Remove: rack-cpu")).to_have_count(0)
    fresh.get_by_role("button", name="Remove: my-device").click()
    expect(other).to_have_count(0)
    expect(fresh.locator("#cluster-error")).to_have_count(0)


def test_a_model_of_one_s_own_may_be_called_as_one_of_the_catalogue(fresh, server):
    """Its plan, opened elsewhere, was asked for it and not for the catalogue's; a config.json has a name that tells."""
    choose(fresh, "opt-350m")
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
              "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512}  # fmt: skip
    batch = "[data-path='batch.global_batch']"
    for called, shown in (({}, "llama-3.14m"), ({"_name_or_path": "gpt2"}, "gpt2")):
        text = json.dumps(config | called).encode()
        fresh.locator("#upload-model").set_input_files({"name": "config.json", "mimeType": "", "buffer": text})
        expect(fresh.locator("#fold-model small")).to_contain_text(f"{shown}, ")
    fresh.locator(batch).fill("16")
    fill(fresh, "batch.seq_len", "128")
    fresh.locator("#calculate").click()
    fresh.locator("[data-card=step]").wait_for()
    with fresh.expect_request(lambda r: r.method == "POST" and r.url.endswith("/jobs")) as asked:
        elsewhere = fresh.context.browser.new_context().new_page()
        elsewhere.goto(fresh.url)
        elsewhere.locator("[data-card=step]").wait_for()
        expect(elsewhere.locator("#fold-model small")).to_contain_text("gpt2, 16 sequences of 128")
        fresh.locator("#calculate").click()
    own = asked.value.post_data_json["problem"]["model"]
    assert own["blocks"] == 4
    with elsewhere.expect_request(lambda r: r.method == "POST" and r.url.endswith("/jobs")) as again:
        elsewhere.locator("#calculate").click()
    assert again.value.post_data_json["problem"]["model"] == own
    elsewhere.context.close()


def add_places(page, *places):
    """Regions of a cluster built by hand."""
    page.locator("#fold-cluster").click()
    page.locator("#by-hand").click()
    for place in places:
        page.locator("[data-path=place]").select_option(place)
    expect(page.locator("#yaml")).to_have_value(re.compile(f"name: {places[-1].lower()}"))


def test_a_number_of_a_link_that_is_none_is_told_at_its_field(fresh, server):
    """Seen from either region; by the names of the regions; and the file beside the fields says that it is older."""
    add_places(fresh, "Tokyo", "Seoul", "London")
    fresh.locator("#region-tab-1").click()
    fill(fresh, "cluster.bandwidth_gbps[1][0]", "1,600")
    field = fresh.locator("[data-path='cluster.bandwidth_gbps[1][0]']")
    expect(fresh.locator("#cluster-error")).to_have_text(
        "Bandwidth, tokyo → seoul: found '1,600', expected a number >= 0"
    )
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(fresh.locator("table.edit small.error")).to_have_text("expected a number ≥ 0")
    expect(fresh.locator("#yaml-old")).to_be_visible()
    expect(fresh.locator("#region-tab-1")).to_have_attribute("aria-selected", "true")
    fill(fresh, "cluster.bandwidth_gbps[1][0]", "1600")
    expect(fresh.locator("#cluster-error")).to_have_count(0)
    expect(fresh.locator("[data-path][aria-invalid]")).to_have_count(0)
    expect(fresh.locator("#yaml-old")).to_have_count(0)


def test_a_link_with_a_fault_is_brought_up_from_any_region(fresh, server):
    """As a region with a fault is: a file typed or undone may have it anywhere."""
    add_places(fresh, "Tokyo", "Seoul", "London")
    fresh.locator("#region-tab-0").click()
    fill(fresh, "cluster.latency_ms[0][1]", "x")
    expect(fresh.locator("#cluster-error")).to_contain_text("tokyo → seoul")
    fresh.locator("#undo").click()
    expect(fresh.locator("#cluster-error")).to_have_count(0)
    fresh.locator("#region-tab-2").click()
    fresh.locator("#redo").click()
    expect(fresh.locator("#region-tab-0")).to_have_attribute("aria-selected", "true")
    expect(fresh.locator("[data-path='cluster.latency_ms[0][1]']")).to_have_attribute("aria-invalid", "true")


def test_what_is_tried_has_no_figures_before_it_is_priced(page, server, plan_id):
    """While the server takes its time nothing is said to come out of it."""
    visit(page, server, plan_id)
    page.locator("#drawer-whatif").click()
    held = Held(page, re.compile("/view"), "POST")
    slide(page, "price_factor", 0)
    held.wait()
    expect(page.locator(".banner span").first).to_contain_text("Working it out")
    expect(page.locator(".comes-out")).to_contain_text("Working it out")
    held.release()
    expect(page.locator(".banner span").first).to_contain_text("0 % tokens/s")
    expect(page.locator(".comes-out")).to_contain_text("tokens/s")


def test_a_plan_that_was_deleted_elsewhere_is_open_no_more(page, server, wide_plan):
    """Found out by trying something on it: it is said, and neither its figures nor its row stay."""
    made = variant(server, wide_plan, price_factor=2.0)
    visit(page, server, made)
    page.locator("#drawer-whatif").click()
    page.wait_for_load_state("networkidle")
    server.request("DELETE", f"/api/v1/plans/{made}")
    slide(page, "bandwidth_factor", 0)
    expect(page.locator("#trouble")).to_contain_text(f"Plan {made} is not here: it was deleted")
    expect(page.locator(".banner")).to_have_count(0)
    expect(page.locator("[data-card=step]")).to_have_count(0)
    expect(page.locator("#plan-list li.here")).to_have_count(0)
    assert "what=" not in page.url and made not in page.url


def test_a_plan_that_takes_long_to_be_opened_is_named_above_the_one_before(page, server, plan_id, wide_plan):
    """Until it is here the figures are those of the plan before, and the page says what it does."""
    visit(page, server, plan_id)
    expect(page.locator("#opening")).to_have_count(0)
    held = Held(page, re.compile(f"{wide_plan}/view"), "POST")
    page.evaluate("plan => { location.hash = `#plan=${plan}&view=overview`; }", wide_plan)
    held.wait()
    name = server.request("GET", f"/api/v1/jobs/{wide_plan}")[2]["name"]
    expect(page.locator("#opening")).to_have_text(f"Opening {name}…")
    held.release()
    expect(page.locator("#what")).to_have_text(name)
    expect(page.locator("#opening")).to_have_count(0)


def test_plans_of_other_work_are_not_praised_for_shorter_steps(page, server, plan_id, wide_plan):
    """Their model and batch stand there, and dollars per token; of plans of the same work nothing of it."""
    visit(page, server, wide_plan, "compare", f"&with={plan_id}")
    expect(page.locator("#other-work")).to_be_visible()
    work = page.locator("tr", has_text="Model and batch").locator("td")
    expect(work).to_have_text(["gpt3-6.7b, 16 sequences of 1024", "gpt3-1.3b, 32 sequences of 1024"])
    expect(page.locator("#terms .good")).to_have_count(0)
    expect(page.locator("tr", has_text="Tokens/s").locator(".good")).to_have_count(1)
    visit(page, server, wide_plan, "compare", f"&with={variant(server, wide_plan, bandwidth_factor=2.0)}")
    expect(page.locator("#terms .good").first).to_be_visible()
    expect(page.locator("#other-work")).to_have_count(0)
    expect(page.locator("tr", has_text="Model and batch")).to_have_count(0)


def test_a_bound_that_is_not_known_yet_is_not_infinite(page, server, plan_id, wide_plan):
    """Plans are compared while the bounds of the open one and of the others are worked out; they come to stand
    there."""
    bound, other = (Held(page, re.compile(f"{plan}/view$"), "POST") for plan in (plan_id, wide_plan))
    page.goto(f"{server.url}/#plan={plan_id}&view=compare&with={wide_plan}")
    gaps = page.locator("tr", has_text="Gap to the bound").locator("td")
    expect(gaps).to_have_text(["…", "…"])
    other.wait()
    other.release()
    expect(gaps.nth(1)).to_contain_text("%")
    expect(gaps.nth(0)).to_have_text("…")
    bound.wait()
    bound.release()
    expect(gaps.nth(0)).to_contain_text("%")


def searched(server, device, objective="time", **node):
    """A plan for one node of two devices, searched for."""
    nodes = [{"device": device, "count": 1, "devices_per_node": 2, **node}]
    problem = {"cluster": {"name": "pair", "regions": [{"name": "a", "nodes": nodes}]}, "model": "opt-350m",
               "batch": {"global_batch": 4, "seq_len": 128}}  # fmt: skip
    return ended(server, problem, objective)


def ended(server, problem, objective="time"):
    """The plan of a quick search."""
    row = server.request("POST", "/api/v1/jobs", {"problem": problem, "objective": objective, "effort": "quick"})[2]
    path = f"/api/v1/jobs/{row['id']}"
    assert eventually(lambda: server.request("GET", path)[2]["state"] not in ("queued", "running"))
    assert server.request("GET", path)[2]["state"] == "done"
    return row["id"]


def test_what_is_tried_that_the_program_does_not_run_is_said_and_so_what_is_without_it(page, server):
    """Compression that Megatron-LM has not, on every pane and beside the controls; limits, ideas and assumed links are
    of the plan without it and say so, and deploying begins with the program that the plan is for."""
    nodes = [{"device": "t4", "count": 1, "devices_per_node": 1}]
    cluster = {"name": "two", "regions": [{"name": name, "nodes": nodes} for name in "ab"],
               "latency_ms": [[0, 5], [5, 0]], "bandwidth_gbps": [[0, 10], [10, 0]]}  # fmt: skip
    problem = {"cluster": cluster, "model": "opt-350m", "batch": {"global_batch": 256, "seq_len": 128},
               "runtime": "megatron-core"}  # fmt: skip
    plan = ended(server, problem)
    visit(page, server, plan)
    page.locator("#drawer-whatif").click()
    expect(page.locator("#not-run")).to_have_count(0)
    page.locator("[data-change=weight_gradients]").select_option("int8")
    expect(page.locator("#not-run")).to_contain_text("cannot be run by megatron-core")
    expect(page.locator("#controls [role=alert]").last).to_contain_text("cannot be run by megatron-core")
    without = page.locator("#drawer-panel [role=status]", has_text="without what you try")
    expect(without).to_have_count(0)
    for pane in ("limits", "whynot", "assumed"):
        page.locator(f"#drawer-{pane}").click()
        expect(without).to_have_count(1)
    expect(page.locator("#assumed")).to_contain_text("int8")
    page.locator("#tab-deploy").click()
    expect(page.locator("#target-megatron")).to_have_attribute("aria-pressed", "true")
    page.locator("#reset").click()
    expect(page.locator("#not-run")).to_have_count(0)
    expect(without).to_have_count(0)
    server.request("DELETE", f"/api/v1/plans/{plan}")


def test_a_plan_that_its_program_does_not_run_says_so(page, chinese_page, server, wide_plan):
    """Of a file whose program was changed, in both languages; of the same plan by our own engine nothing is said."""
    data = server.request("GET", f"/api/v1/plans/{wide_plan}")[2]
    plain = [{key: value for key, value in stage.items() if key != "trees"} for stage in data["stages"]]
    other = data | {"problem": data["problem"] | {"runtime": "torchtitan"}, "stages": plain}
    made = server.request("POST", "/api/v1/plans", other)[2]["id"]
    for here, said in ((page, "cannot be run by torchtitan"), (chinese_page, "torchtitan 无法按原样运行此方案")):
        visit(here, server, made, "strategy")
        expect(here.locator("#not-run")).to_contain_text(said)
    visit(page, server, wide_plan, "strategy")
    expect(page.locator("#not-run")).to_have_count(0)
    server.request("DELETE", f"/api/v1/plans/{made}")


@pytest.mark.parametrize(
    ("objective", "value", "least"),
    [
        ("money", "cost_usd", "least_usd"),
        ("tokens-per-usd", "cost_usd", "least_usd"),
        ("energy", "energy_j", "least_energy_j"),
    ],
)
def test_a_plan_is_held_against_the_bound_of_what_it_was_made_for(page, server, objective, value, least):
    """Not against that of its time, which it was not to keep; so are its variants."""
    plan = searched(server, "t4", objective)
    told = server.request("POST", f"/api/v1/plans/{plan}/view", {})[2]["estimate"]
    assert 0 < told[least] <= told[value]
    dearer = 2.0

    def with_faster(route):
        told = route.fetch().json()
        own = told["alternatives"][0]
        other = own | {"key": "naive", "step_s": own["step_s"] / 2}
        other |= {key: own[key] * dearer for key in ("usd_per_step", "energy_j")}
        route.fulfill(json=told | {"alternatives": [own, other]})

    page.route("**/alternatives", with_faster)
    visit(page, server, plan, "strategy")
    expect(page.locator("[aria-label='Alternatives'] tbody tr")).to_have_count(2)
    expect(page.locator("#better-met")).to_have_count(0)
    heads = page.locator("[aria-label=Alternatives] th", has_text="Energy per step")
    expect(heads).to_have_count(1 if objective == "energy" else 0)
    [at] = [point["value"] for point in chart_data(page, "pareto")[0] if point["key"] == "plan"]
    joules = 3600 if objective == "energy" else 1  # drawn in watt-hours
    assert at == [pytest.approx(told["step_s"]), pytest.approx(told[value] / joules)]
    dearer = 0.5
    visit(page, server, plan, "strategy")
    said = "a step, less than this plan" if objective == "energy" else "cheaper than this plan"
    expect(page.locator("#better-met")).to_contain_text(said)
    expect(page.locator("[data-card=gap] b")).to_have_text(re.compile(r"%$"))
    shown = float(card(page, "gap").rstrip(" %\u202f\u00a0").replace(",", ""))
    assert shown == pytest.approx(100 * (told[value] / told[least] - 1), abs=0.06)
    expect(page.locator("[data-card=gap] small")).to_contain_text("Wh" if objective == "energy" else "$")
    expect(page.locator("#reasons")).to_contain_text("No plan can do a step for less than")
    expect(page.locator("#reasons")).not_to_contain_text("faster")
    made = variant(server, plan, accumulation=2)
    visit(page, server, plan, "compare", f"&with={made}")
    gaps = page.locator("tr", has_text="Gap to the bound").locator("td")
    expect(gaps.nth(0)).to_contain_text(f"{card(page, 'gap')} bound")
    expect(gaps.nth(1)).to_contain_text("Wh" if objective == "energy" else "$")
    assert server.request("GET", f"/api/v1/jobs/{made}")[2]["objective"] == objective
    for name in (made, plan):
        server.request("DELETE", f"/api/v1/plans/{name}")


def test_devices_without_a_known_price_are_not_said_to_be_free(page, server):
    """Nobody said what they cost; where somebody says that it is nothing, a step costs nothing."""
    unknown, free = searched(server, "ascend-910b"), searched(server, "ascend-910b", price_usd_per_hour=0)
    visit(page, server, unknown)
    expect(page.locator("[data-card=perBillion] b")).to_have_text("—")
    expect(page.locator("[data-card=perBillion] small")).to_have_text("no price known of ascend-910b: counts as 0")
    page.locator("#tab-strategy").click()
    own = page.locator("[aria-label=Alternatives] tbody tr", has_text="This plan")
    expect(own.locator("td").nth(2)).to_have_text("—")
    expect(page.locator("#unpriced")).to_contain_text("No price is known of ascend-910b")
    expect(page.locator("[data-chart=pareto]")).to_have_count(0)
    visit(page, server, free)
    expect(page.locator("[data-card=perBillion] b")).to_have_text(re.compile(r"^\$\s*0$"))
    visit(page, server, free, "compare", f"&with={unknown}")
    costs = page.locator("tr", has_text=re.compile("^USD per")).locator("td")
    expect(costs).to_have_text([re.compile(r"^\$\s*0$"), "—"] * 2)
    expect(page.locator("#view")).to_contain_text("no price known of ascend-910b: counts as 0")
    told = server.request("GET", f"/api/v1/plans/{unknown}/alternatives")[2]["alternatives"]
    assert told[0]["unpriced"] == ["ascend-910b"]
    undrawn = searched(server, "trainium2", "energy")  # nobody says what it draws: no energy, none less
    visit(page, server, free, "compare", f"&with={undrawn}")
    expect(page.locator("tr", has_text="Energy per step").locator("td").last).to_have_text("—")
    expect(page.locator("#view")).to_contain_text("no power known of trainium2: counts as 0")
    visit(page, server, undrawn, "strategy")
    expect(page.locator("[data-card=gap] small")).to_contain_text("no power known of trainium2: counts as 0")
    expect(page.locator("#unpowered")).to_contain_text("Nobody says what trainium2 draws")
    idea = {"idea": "less", "possible": True, "slower_by": 0.1, "step_s": 1.0, "usd": 0.0, "reason": "so"}
    answers = {
        "different_plans": [idea],
        "alternatives": [],
        "sensitivities": [],
        "left_out": [],
        "searched_step_s": 1.0,
    }
    page.route("**/explanation", lambda route: route.fulfill(json={"state": "done", "answers": answers}))
    visit(page, server, unknown)
    page.locator("#drawer-whynot").click()
    expect(page.locator("#why-not .ideas small")).to_have_text("1.00 s. so")
    for plan in (unknown, free, undrawn):
        server.request("DELETE", f"/api/v1/plans/{plan}")


def test_why_not_speaks_of_what_the_plan_was_made_for(page, chinese_page, server):
    """Parts of its energy, or money, and no plan of devices of unknown power is one that takes less; what is found by
    short searches is at least so much. Answers of before are of time."""
    idea = {"idea": "twice", "naive": True, "possible": True, "slower_by": -0.5, "worse_by": 1.0, "step_s": 1.0,
            "usd": 0.5, "energy_j": 7200.0, "reason": ""}  # fmt: skip
    silent = idea | {"idea": "silent", "worse_by": None, "energy_j": 0.0}
    change = {"text": "more", "same_plan": -0.1, "replanned": -0.25, "usd_per_hour": 1.0, "step_s": 1.0}
    none = change | {"text": "much", "replanned": 0.0}
    answers = {"objective": "energy", "unsaid": ["mine"], "different_plans": [], "alternatives": [idea, silent],
               "usd": 0.0,
               "sensitivities": [change, none], "left_out": [], "searched_step_s": 1.0, "searched": 3600.0}  # fmt: skip
    plan = searched(server, "t4", "energy")
    for here in (page, chinese_page):
        here.route("**/explanation", lambda route: route.fulfill(json={"state": "done", "answers": answers}))
        visit(here, server, plan)
        here.locator("#drawer-whynot").click()
        heads = here.locator("#why-not .limit-head > span")
        expect(heads.nth(0)).to_have_text(re.compile(r"^\+100\s%$"))
        expect(heads.nth(1)).to_have_text("—")
        expect(here.locator("#why-not .ideas small").first).to_contain_text(re.compile(r"^2\.00\sWh · 1\.00\ss"))
    why = page.locator("#why-not")
    expect(why.locator("#ideas-of")).to_contain_text("Parts of the energy of a step. All by short searches")
    expect(why.locator("#ideas-unsaid")).to_have_text("no power known of mine: counts as 0")
    expect(why).to_contain_text(re.compile(r"held against 1\.00\sWh"))
    expect(why.locator(".limit-head > span").nth(2)).to_have_text(re.compile(r"^−25\.0\s% or more$"))
    expect(why.locator(".limit-head > span").nth(3)).to_have_text("nothing found")
    expect(why.locator(".ideas small").last).to_have_text(re.compile(r"^same plan −10\.0\s%$"))
    kept = server.request("POST", f"/api/v1/plans/{plan}/explanation", {"time_limit_s": 60})[2]["id"]
    assert eventually(lambda: server.request("GET", f"/api/v1/jobs/{kept}")[2]["state"] not in ("queued", "running"))
    found = server.request("GET", f"/api/v1/plans/{plan}/explanation")[2]["answers"]
    assert found["objective"] == "energy"
    for row in (row for row in found["alternatives"] if row["possible"]):
        assert row["worse_by"] == pytest.approx(row["energy_j"] / found["energy_j"] - 1)
    server.request("DELETE", f"/api/v1/plans/{plan}")


def test_of_plans_for_money_that_cost_nothing_no_bound_is_waited_for(page, server):
    """No plan costs less than nothing, as where nobody said what devices cost: that is said, and what is still
    worked out is told apart from it."""
    plan = searched(server, "ascend-910b", "money")
    visit(page, server, plan)
    expect(page.locator("[data-card=gap] small")).to_have_text(re.compile(r"^bound \$\s*0$"))
    expect(page.locator("[data-card=gap] b")).to_have_text("—")
    server.request("DELETE", f"/api/v1/plans/{plan}")


def test_a_front_of_devices_without_a_known_price_is_not_free(fresh, server):
    """Its points say so, and who hears of the button that opens one does not hear of no dollars."""
    page = fresh
    page.route("**/fronts/*", lambda route: route.fulfill(json=route.fetch().json() | {"points": [
        {"step_s": 1.0, "usd": 0.0, "energy_j": 1.0, "devices": 2, "stages": 1, "unpriced": ["mine"]},
        {"step_s": 2.0, "usd": 0.0, "energy_j": 1.0, "devices": 1, "stages": 1}]}))  # fmt: skip
    page.locator("#tab-front").click()
    page.locator("#start-front").click()
    rows = page.locator("#view tbody tr")
    expect(rows.nth(0).locator("td").nth(1)).to_have_text("—")
    expect(rows.nth(0).get_by_role("button")).to_have_accessible_name("Open: 1.00 s, —")
    expect(rows.nth(1).locator("td").nth(1)).to_have_text(re.compile(r"^\$\s*0$"))
    assert chart_data(page, "front") == [[[2.0, 0.0]]]
    expect(page.locator("#unpriced")).to_contain_text("No price is known of mine")
    page.get_by_text("Stop, keep the best").first.click()
    page.locator("#start-front", has_text="again").wait_for()


def test_limits_for_what_another_cluster_had_are_shown_until_they_are_taken_out(fresh, tmp_path):
    """They are asked as all others are: what is not in the cluster stands beside what is, and says so."""
    fresh.locator("#fold-goal").click()
    fresh.locator("summary", has_text="Constraints").click()
    chips = {
        kind: fresh.locator(f"[data-path='constraints.{kind}']") for kind in ("forbidden_regions", "forbidden_devices")
    }
    region, device = [chip.locator("label").first.inner_text() for chip in chips.values()]
    for chip in chips.values():
        chip.locator("label").first.click()
    fresh.locator(f"[data-path='constraints.egress_bytes_per_step.{region}']").fill("2")
    (tmp_path / "one.yaml").write_text("regions: [{name: here, nodes: [{device: t4, count: 2}]}]")
    fresh.locator("#fold-cluster").click()
    fresh.locator("#upload-cluster").set_input_files(tmp_path / "one.yaml")
    expect(chips["forbidden_regions"].locator("label")).to_have_text(["here", f"{region} (not in this cluster)"])
    expect(chips["forbidden_devices"].locator("label")).to_have_text(["t4", f"{device} (not in this cluster)"])
    for chip in chips.values():
        chip.locator("label").last.click()
    fresh.locator(f"[data-path='constraints.egress_bytes_per_step.{region}']").fill("")
    expect(chips["forbidden_regions"].locator("label")).to_have_text(["here"])
    expect(fresh.locator("#fold-goal small")).to_have_text("least step time · quick")


@pytest.mark.parametrize("name", ["上海 一区", "us east [new]", "a.b > c"])
def test_a_fault_of_a_region_is_marked_whatever_it_is_called(fresh, tmp_path, name):
    """The field that a message names is marked and has the focus."""
    (tmp_path / "one.json").write_text(
        json.dumps({"regions": [{"name": name, "nodes": [{"device": "t4", "count": 2}]}]}), "utf-8"
    )
    fresh.locator("#fold-cluster").click()
    fresh.locator("#upload-cluster").set_input_files(tmp_path / "one.json")
    fresh.locator("#fold-goal").click()
    fresh.locator("summary", has_text="Constraints").click()
    cap = fresh.locator(f"[data-path='constraints.egress_bytes_per_step.{name}']")
    cap.fill("-3")
    fresh.locator("#calculate").click()
    expect(cap).to_have_attribute("aria-invalid", "true")
    expect(cap).to_be_focused()


INSIDE = """() => [...document.querySelectorAll("td, th, p, li, .chips label, .pills button, h2")].filter((e) => {
  const [own, around] = [e, e.parentElement].map((it) => it.getBoundingClientRect());
  return e.checkVisibility() && !e.matches(".hidden") && e.clientWidth > 0
    && (e.scrollWidth > e.clientWidth + 1 || (!e.matches("td, th") && own.right > around.right + 1));
}).map((e) => `${e.tagName} ${e.innerText.slice(0, 30)}`)"""


def test_long_names_stay_where_they_belong(page, server):
    """Nothing of a name of 80 letters lies over what is beside it, in the fields and in a plan's tables."""
    text = format_json(plan_data(*wide()))
    names = json.loads(text)["problem"]["cluster"]["regions"]
    for i, region in enumerate(names[:3]):
        text = text.replace(json.dumps(region["name"]), json.dumps(f"{i}{'N' * 79}"))
    status, _, row = server.request("POST", "/api/v1/plans", text.encode())
    assert status == 201
    for view in VIEWS:
        visit(page, server, row["id"], view)
        if not page.locator("[data-path='constraints.forbidden_regions']").count():
            page.locator("#fold-goal").click()
            page.locator("summary", has_text="Constraints").click()
        page.locator("#view").locator("table, .runs, form, p, li").first.wait_for()
        assert eventually(lambda: page.evaluate(INSIDE) == []), (view, page.evaluate(INSIDE))


def test_undo_brings_a_fault_back(fresh):
    """With the value that had it, once and again; redo takes both away. A fault of the cluster, too."""
    fresh.locator("#fold-model").click()
    fresh.locator("#tab-cluster").click()
    for path, wrong, right in (("batch.global_batch", "many", "512"), ("cluster.regions[0].nodes[0].count", "0", "4")):
        fill(fresh, path, wrong)
        fresh.locator("#calculate").click()
        trouble, field = fresh.locator("#trouble"), fresh.locator(f"[data-path='{path}'][aria-invalid=true]")
        expect(trouble).to_contain_text(path)
        expect(field).to_be_focused()
        fill(fresh, "batch.seq_len", "1024")
        fill(fresh, path, right)
        for _ in range(2):
            expect(trouble).to_have_count(0)
            expect(fresh.locator("[aria-invalid=true]")).to_have_count(0)
            fresh.locator("#undo").click()
            expect(fresh.locator(f"[data-path='{path}']")).to_have_value(wrong)
            expect(trouble).to_contain_text(path)
            expect(field).to_have_count(1)
            fresh.locator("#redo").click()
        fill(fresh, "batch.seq_len", "2048")


def test_marks_and_limits_follow_the_region_that_is_renamed(fresh, tmp_path):
    """Through a name that is another region's, which keeps its own; limits, too, and those of one that is gone go."""
    choose(fresh, "opt-350m")
    fresh.locator("#tab-cluster").click()
    expect(fresh.locator(".tabs, [role=tablist].pills [role=tab]")).to_have_count(2)
    names = [fresh.locator(f"#region-tab-{r}").inner_text() for r in (0, 1)]
    rows = [{"source_region": names[0], "target_region": names[0], "rtt_s": 0.001, "link_bytes_per_s": 5e8}]
    inside = import_measured(fresh, tmp_path, rows)
    # The other gets the same link, but nobody measured it there.
    link = {key: fresh.locator(f"[data-path='cluster.regions[0].intra_region.{key}']").input_value()
            for key in ("latency_ms", "bandwidth_gbps")}  # fmt: skip
    fresh.locator("#region-tab-1").click()
    for key, value in link.items():
        fill(fresh, f"cluster.regions[1].intra_region.{key}", value)
    expect(inside).to_have_text("given")
    fresh.locator("#fold-goal").click()
    fresh.locator("summary", has_text="Constraints").click()
    forbidden = fresh.locator("[data-path='constraints.forbidden_regions']")
    forbidden.get_by_label(names[1]).check()
    fill(fresh, f"constraints.egress_bytes_per_step.{names[1]}", "5")
    for text in (names[0], f"{names[0]}2"):
        fill(fresh, "cluster.regions[1].name", text)
        fresh.locator("#region-tab-0").click()
        expect(inside).to_have_text("measured")
        fresh.locator("#region-tab-1").click()
        expect(inside).to_have_text("given")
    expect(forbidden.get_by_label(names[0], exact=True)).not_to_be_checked()
    expect(forbidden.get_by_label(f"{names[0]}2")).to_be_checked()
    expect(fresh.locator(f"[data-path='constraints.egress_bytes_per_step.{names[0]}2']")).to_have_value("5")
    expect(fresh.locator(f"[data-path='constraints.egress_bytes_per_step.{names[0]}']")).to_have_value("")
    fresh.locator("#region-tab-0").click()
    fill(fresh, "cluster.regions[0].name", "pole")
    expect(fresh.locator("#yaml")).to_have_value(re.compile("pole"))
    fresh.reload()
    expect(inside).to_have_text("measured")
    # The file beside the fields is another way to say the same cluster.
    text = fresh.locator("#yaml").input_value()
    fresh.locator("#yaml").fill(text.replace("count: 1", "count: 2", 1))
    expect(fresh.locator("[data-path='cluster.regions[0].nodes[0].count']")).to_have_value("2")
    expect(inside).to_have_text("measured")
    fresh.locator("#region-tab-1").click()
    fresh.locator(".danger", has_text="Remove the region").click()
    expect(fresh.locator("#fold-goal small")).not_to_contain_text("limit")


def test_a_region_may_have_another_s_name_while_one_is_typed(fresh):
    """ "north" on the way to "north2": the region that is named stays open, and both can be chosen."""
    choose(fresh, "opt-350m")
    expect(fresh.locator("#fold-cluster small")).to_have_text("8 devices in 2 regions")
    fresh.locator("#tab-cluster").click()
    fresh.locator("#region-tab-1").click()
    for region in (1, 0):
        fresh.locator(f"#region-tab-{region}").click()
        mine = f"cluster.regions[{region}].name"
        other = fresh.locator(f"#region-tab-{1 - region}").inner_text()
        fill(fresh, mine, other)
        expect(fresh.locator("#cluster-error")).to_contain_text("expected another name")
        expect(fresh.locator(f"#region-tab-{region}")).to_have_attribute("aria-selected", "true")
        fresh.locator(f"#region-tab-{1 - region}").click()
        expect(fresh.locator(f"[data-path='cluster.regions[{1 - region}].name']")).to_have_value(other)
        fresh.locator(f"#region-tab-{region}").click()
        fresh.locator(f"[data-path='{mine}']").press("End")
        fresh.keyboard.type("2")
        expect(fresh.locator(f"#region-tab-{region}")).to_have_text(f"{other}2")
        expect(fresh.locator("#cluster-error")).to_have_count(0)


def test_map_stages_and_timeline_point_at_one_another(page, server, wide_plan):
    """The pointer on a region lights its stages, on a stage its row; a plan that is not there is said."""
    visit(page, server, wide_plan)
    view = server.request("POST", f"/api/v1/plans/{wide_plan}/view", {})[2]
    name, stages = next((r["name"], r["stages"]) for r in view["regions"] if r["stages"])
    page.locator(f".region[data-region={name}]").focus()
    lit = page.locator(".strip > li.lit")
    assert [int(x) for x in lit.evaluate_all("e => e.map(x => x.dataset.stage)")] == stages
    page.locator(f".region[data-region={name}]").blur()
    page.locator("[data-stage='1']").focus()
    page.locator("[data-chart=gantt] li.lit", has_text="1").wait_for()
    there = {worker["region"] for worker in view["stages"][1]["workers"]}
    assert set(page.locator(".region.lit").evaluate_all("e => e.map(x => x.dataset.region)")) == there
    expect(page.locator("[data-chart=gantt] li.lit")).to_have_count(1)
    page.locator("[data-stage='1']").blur()
    page.locator(f".region[data-region={name}]").focus()
    expect(page.locator("[data-chart=gantt] li.lit")).to_have_count(len(stages))
    leave(page, server)
    page.goto(f"{server.url}/#plan=nowhere")
    page.locator("#trouble", has_text="Plan nowhere is not here").wait_for()


def test_a_screen_reader_is_told_once(page, server, wide_plan):
    """Of a plan how long its step takes while its limit is looked for, then the limit: the sentence in two
    parts; of a what-if what comes out of it; nothing else speaks by itself (`outcome` of what a pane began)."""
    leave(page, server)
    page.goto(server.url)
    page.locator("#calculate:enabled").wait_for()
    listen(page, "spoken")
    held = Held(page, "**/limits/events")
    page.evaluate(f"location.hash = '#plan={wide_plan}'")
    heard(page, "a step on")
    held.release()
    assert ", ".join(heard(page, "limited")) == page.locator(".sentence").text_content().strip()
    page.locator("#drawer-whatif").click()
    slide(page, "bandwidth_factor", "1")
    assert card(page, "step") in heard(page, "tokens/s")[-1]
    speaking = page.locator("[aria-live], [role=status], [role=alert], output")
    names = speaking.evaluate_all("all => all.map((e) => e.id || e.className)")
    assert sorted(names) == ["notice", "outcome", "spoken"]
    expect(page.locator("#outcome")).to_be_empty()


def test_what_was_told_is_not_met_again(browser, server, plan_id):
    """Live regions are empty some seconds after they spoke: who reads on to the end of the page finds nothing there."""
    page = new_page(browser, server)
    page.clock.install()
    visit(page, server, plan_id)
    listen(page, "outcome")
    run = {"name": "rank-0.jsonl", "mimeType": "text/plain", "buffer": run_lines(9).encode()}
    page.locator("#tab-runs").click()
    page.locator("#open-run").set_input_files(run)
    heard(page, "measured")
    page.clock.fast_forward(10_000)
    expect(page.locator("#outcome")).to_be_empty()
    expect(page.locator("#spoken")).to_be_empty()
    page.context.close()


@pytest.mark.parametrize("pane", ["front", "whynot"])
def test_the_end_of_a_pane_s_work_is_told_with_what_came_out(page, server, pane):
    """Until its answer is here it goes on: no form stands there for a moment, whose button would take the focus and be
    gone before a reader has said its name. Then one line says how many were found; of ideas, different plans and what a
    better cluster would bring all stand there."""
    plan = server.request("POST", "/api/v1/plans", plan_data(*planned()))[2]["id"]
    visit(page, server, plan)
    listen(page, "outcome")
    kept = []

    def ask(route):
        answer = route.fetch()
        ended = route.request.method == "GET" and answer.json()["state"] == "done"
        kept.append((route, answer)) if ended else route.fulfill(response=answer)

    page.route(re.compile("/fronts/|/explanation$"), ask)
    begin = page.locator({"front": "#start-front", "whynot": "#explain"}[pane])
    page.locator({"front": "#tab-front", "whynot": "#drawer-whynot"}[pane]).click()
    begin.focus()
    page.keyboard.press("Enter")
    assert eventually(lambda: page.wait_for_timeout(1) or kept)
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert begin.count() == 0
    expect(page.get_by_role("button", name="Stop, keep the best")).to_be_focused()
    for route, answer in kept:
        route.fulfill(response=answer)
    said = heard(page, {"front": " plans found", "whynot": " ideas worked out"}[pane])
    if pane == "whynot":  # its first heading is read now, not passed over by the next arrow
        expect(page.locator("#why-not h3").first).to_be_focused()
        kept = server.request("GET", f"/api/v1/plans/{plan}/explanation")[2]["answers"]
        felt = [s for s in kept["sensitivities"] if min(s["same_plan"], s["replanned"]) < -1e-4]
        wanted = len(kept["alternatives"]) + len(kept["different_plans"]) + len(felt)
        expect(page.locator("#why-not .ideas > li")).to_have_count(wanted)
        assert said[-1] == f"{wanted} ideas worked out"


def test_a_screen_reader_hears_each_thing_once_by_its_name(page, server, wide_plan):
    """Regions, stages, rows of the step and sliders say what they are and nothing below them says it again, nor
    anything new when they get the focus (a reader would lose its place); heads of a comparison are names alone; a row
    of a stage says which; parts of the rail and the drawer are headings."""
    visit(page, server, wide_plan)
    view = server.request("POST", f"/api/v1/plans/{wide_plan}/view", {})[2]
    tokyo = next(r for r in view["regions"] if r["name"] == "tokyo")
    said = f"tokyo {tokyo['used']}/{sum(tokyo['devices'].values())} devices used"
    spot = page.locator(".region[data-region=tokyo]")
    for _ in range(2):
        assert yaml.safe_load(spot.aria_snapshot()) == [f'button "{said}"']
        spot.focus()
    [strip] = yaml.safe_load(page.locator(".strip").aria_snapshot())
    assert [str(stage).split(":")[0] for stage in strip["list"]] == [
        f'listitem "Stage {i}' for i in range(len(view["stages"]))
    ]
    row = page.locator("[data-chart=gantt] li").first
    width, device = view["stages"][0]["width"], view["stages"][0]["workers"][0]["device"]
    assert re.search(f"Stage 0, worker \\d+ of {width}: {device} · .*; Busy [\\d.]+", row.aria_snapshot())
    for part in ("Cluster", "Model and batch", "Goal and limits", "Plans", "Where it runs", "Stages", "Predicted step",
                 "Why and what if"):  # fmt: skip
        expect(page.get_by_role("heading", level=2, name=re.compile(f"^{part}"))).to_have_count(1)
    assert page.get_by_role("button", name="Edit: Cluster", exact=True).count() == 1
    page.locator("#drawer-whatif").click()
    slider = page.get_by_role("slider", name="Latency between regions", exact=True)
    expect(slider).to_have_attribute("aria-valuetext", "×\u00a01")
    visit(page, server, wide_plan, "strategy")
    table = page.get_by_role("table").first
    heads = table.get_by_role("rowheader").all_text_contents()
    assert heads == [str(i) for i, stage in enumerate(view["stages"]) for _ in stage["workers"]]
    visit(page, server, wide_plan, "compare", f"&with={variant(server, wide_plan)}")
    assert page.locator("#terms thead").get_by_role("button").count() == 0


def test_the_commands_field_is_heard_before_a_command(page, server, plan_id):
    """None is active until something is typed or an arrow pressed; then it is what Enter does."""
    visit(page, server, plan_id)
    page.keyboard.press("Control+k")
    field = page.get_by_role("combobox", name="Type what you want to do", exact=True)
    expect(field).to_be_focused()
    assert field.get_attribute("aria-activedescendant") is None
    page.keyboard.type("strategy")
    expect(field).to_have_attribute("aria-activedescendant", "command-0")
    page.keyboard.press("Enter")
    page.locator("#tab-strategy[aria-selected=true]").wait_for()


def test_the_map_shows_what_a_plan_uses_and_all_on_demand(page, server):
    """Of ten regions of the world a plan uses two close ones: their link is seen; the others come back."""
    cluster = read_cluster(ROOT / "instances" / "aws-regions.yaml")
    problem = Problem(cluster=cluster, model=catalogue.model("opt-350m"), batch=Batch(global_batch=8, seq_len=128))
    stages = ["ireland", "frankfurt"]
    devices = np.array(
        [[4 * (cluster.regions[pool.region].name == stage) for pool in cluster.pools] for stage in stages]
    )
    plan = Decoder(problem, tensor_limit=1).decode(Allocation(workers=devices, micro_batch_size=1))
    job = server.request("POST", "/api/v1/plans", plan_data(problem, plan))[2]["id"]
    visit(page, server, job)
    used = [page.locator(f".region[data-region={name}] circle").first for name in ("ireland", "frankfurt")]

    def apart():
        (a, b) = (spot.bounding_box() for spot in used)
        return abs(a["x"] - b["x"])

    near = apart()
    assert near > 100
    expect(page.locator(".region[data-region=sydney]")).to_have_attribute("tabindex", "-1")
    page.get_by_role("button", name="Show all", exact=True).click()
    expect(page.locator(".region[data-region=sydney]")).to_have_attribute("tabindex", "0")
    assert apart() < near / 4
    page.get_by_role("button", name="Show what the plan uses").click()
    assert apart() == pytest.approx(near)
    page.locator(".region[data-region=london]").focus()
    assert page.evaluate("document.activeElement.dataset.region") == "london"


def test_a_window_of_the_timeline_is_told_as_finely_as_it_is(page, server, wide_plan):
    """Of a thousandth of a step both ends are named, which three digits would give one name."""
    visit(page, server, wide_plan)
    canvas = page.locator("[data-chart=gantt] canvas")
    ends = lambda: re.search(r": (.*) – (.*)$", canvas.get_attribute("aria-label")).groups()  # noqa: E731
    assert ends()[0] == "0\u00a0s"
    step_s = server.request("POST", f"/api/v1/plans/{wide_plan}/view", {})[2]["estimate"]["step_s"]
    for _ in range(10):
        before = ends()
        canvas.press("+")
        expect(canvas).not_to_have_attribute("aria-label", re.compile(re.escape(" – ".join(before)) + "$"))
    low, high = (float(text.removesuffix("\u00a0s")) for text in ends())
    assert high - low == pytest.approx(step_s / 2**10, rel=0.05)


def test_timeline_opens_stages_zooms_and_shows_a_measured_trace(page, server, wide_plan, tmp_path):
    """A row a stage, or a worker; the keys zoom; a trace opens beside the prediction; what is none is said."""
    visit(page, server, wide_plan)
    view = server.request("POST", f"/api/v1/plans/{wide_plan}/view", {})[2]
    rows = page.locator("[data-chart=gantt] .gantt-labels li")
    expect(rows).to_have_count(len(view["stages"]))
    page.locator("[data-chart=gantt] .twist").first.click()
    expect(rows).to_have_count(len(view["stages"]) + view["stages"][0]["width"] - 1)
    with page.expect_request(re.compile("from_s=")):
        page.locator("[data-chart=gantt] canvas").press("+")
    page.locator("button", has_text="Whole step").click()
    page.locator("#timeline-menu").click()
    page.locator("#measured-file").set_input_files({"name": "x.json", "mimeType": "x", "buffer": b"{}"})
    page.locator("#trouble", has_text="x.json: traceEvents").wait_for()
    trace = tmp_path / "wide.json"
    trace.write_text(json.dumps(server.request("GET", f"/api/v1/plans/{wide_plan}/trace")[2]))
    page.locator("#measured-file").set_input_files(trace)
    page.locator("#tab-runs[aria-selected=true]").wait_for()
    for which in ("predicted", "measured"):
        expect(page.locator(f"[data-chart={which}] .gantt-labels li")).to_have_count(len(view["stages"]))
    expect(page.locator("#beside > li")).to_have_count(len(view["stages"]))
    page.go_back()
    page.locator("#tab-overview[aria-selected=true]").wait_for()


def test_a_wrong_token_is_said_to_be_wrong(browser, tmp_path):
    """Asked for the first time nothing is; the right one opens the page."""
    server = Server(tmp_path, "--token", "ann=SECRETSECRETSECRET")
    page = new_page(browser, server)
    try:
        page.goto(server.url)
        field = page.locator("dialog input")
        expect(field).to_be_focused()
        expect(page.locator("dialog .error")).to_have_count(0)
        field.fill("SECRETSECRETSECRE")
        field.press("Enter")
        expect(page.locator("dialog .error")).to_have_text("That token is wrong.")
        field.fill("SECRETSECRETSECRET")
        field.press("Enter")
        page.locator("#calculate:enabled").wait_for()
    finally:
        page.context.close()
        server.stop()


def test_who_comes_by_a_link_without_a_token_sees_the_whole_plan(browser, tmp_path):
    """The token is asked for once, and all that asked without it asks again: what limits the plan and how far it is
    from its bound come, too."""
    server = Server(tmp_path, "--token", "ann=SECRETSECRETSECRET")
    headers = {"Authorization": "Bearer SECRETSECRETSECRET"}
    page = new_page(browser, server)
    try:
        plan = server.request("POST", "/api/v1/plans", plan_data(*planned()), headers)[2]["id"]
        page.goto(f"{server.url}/#plan={plan}&view=overview")
        page.locator("dialog input").fill("SECRETSECRETSECRET")
        page.locator("dialog input").press("Enter")
        expect(page.locator("#main .sentence")).to_contain_text("limited")
        expect(page.locator("[data-card=gap] b")).to_contain_text("%")
        expect(page.locator("#trouble")).to_have_count(0)
    finally:
        page.context.close()
        server.stop()


def test_searches_that_leave_no_room_are_in_the_list(fresh, server):
    """They may have been begun elsewhere: who is told to stop one sees them."""
    waiting = {"id": "elsewhere", "created_s": 1.0, "state": "queued", "progress": 0.0, "note": "", "error": "",
               "name": "begun elsewhere", "has_plan": False, "kind": "search", "tags": [], "archived": False,
               "parent": "", "changes": {}, "objective": "time", "effort": "quick", "seed": 0}  # fmt: skip

    def answer(route):
        if route.request.method == "POST":
            route.fulfill(status=429, json={"detail": "1 search is waiting already"})
        else:
            route.fulfill(json=[waiting])

    expect(fresh.locator("#plan-list li", has_text="begun elsewhere")).to_have_count(0)
    fresh.route("**/api/v1/jobs", answer)
    fresh.locator("#calculate").click()
    expect(fresh.locator("#trouble")).to_contain_text("1 search is waiting already")
    expect(fresh.locator("#plan-list li", has_text="begun elsewhere")).to_have_count(1)


def test_chinese_has_no_gap_before_chinese_words(chinese_page, server, wide_plan):
    """Names in other letters are set apart in a sentence; what is Chinese itself is not."""
    visit(chinese_page, server, wide_plan)
    sentence = chinese_page.locator(".sentence")
    expect(sentence).to_contain_text(re.compile("受限于"))
    assert re.search(r"[\u4e00-\u9fff] [\u4e00-\u9fff]", sentence.inner_text()) is None


def test_a_run_is_followed_while_its_ranks_write(page, tmp_path):
    """Loss and step time appear as they are written, without a reload, and are those of the log."""
    folder = tmp_path / "lab"
    folder.mkdir()
    write_plan(folder / "plan.json", *planned())
    log = folder / "rank-0.jsonl"
    log.write_text(run_lines(3, end=False))
    server = Server(tmp_path, "--logs", str(folder))
    page.goto(f"{server.url}/#view=runs")
    page.locator("#runs button", has_text="lab").click()
    expect(page.locator("#run")).to_contain_text("3 steps")
    expect(page.locator("#not-traced")).to_have_text("No step was traced yet: stages and timeline follow.")
    for count, end in ((5, False), (9, True)):
        log.write_text(run_lines(count, end=end))
        expect(page.locator("#run")).to_contain_text(f"{count} steps")
        said = server.request("GET", "/api/v1/runs/lab")[2]
        wanted = [[[p[0], p[column]] for p in said["points"]] for column in (2, 1)]
        assert len(wanted[0]) == count
        for name, data in zip(("run-loss", "run-step"), wanted, strict=True):
            page.wait_for_function(
                "([name, data]) => JSON.stringify(window.polygonCharts?.get(name)?.getOption().series[0].data)"
                " === JSON.stringify(data)",
                arg=[name, data],
            )
    expect(page.locator("#run .state")).to_have_text("ended")
    assert page.faults == []
    server.stop()


def test_a_chart_whose_library_comes_late_shows_what_came_meanwhile(page, tmp_path):
    """Steps that are written while the library of charts is on its way are in the first chart."""
    folder = tmp_path / "lab"
    folder.mkdir()
    write_plan(folder / "plan.json", *planned())
    log = folder / "rank-0.jsonl"
    log.write_text(run_lines(3, end=False))
    server = Server(tmp_path, "--logs", str(folder))
    held = Held(page, re.compile("/echarts"))
    page.goto(f"{server.url}/#view=runs&run=lab")
    expect(page.locator("#run")).to_contain_text("3 steps")
    held.wait()
    log.write_text(run_lines(5, end=False))
    expect(page.locator("#run")).to_contain_text("5 steps")
    held.release()
    assert len(chart_data(page, "run-loss")[0]) == 5
    server.stop()


def test_a_rehearsal_is_started_shown_and_stopped(page, tmp_path):
    """What was started is shown with its state, its log and Stop; then beside its prediction."""
    pytest.importorskip("torch", reason="torch is not installed: nothing is rehearsed")
    server = Server(tmp_path, "--allow-rehearsals")
    plan = server.request("POST", "/api/v1/plans", plan_data(*planned()))[2]["id"]
    visit(page, server, plan, "deploy")
    fill(page, "steps", "400")
    fill(page, "ranks", "2")
    page.locator("#rehearse").click()
    expect(page.locator("#started .state")).to_have_text("running")
    expect(page.locator("#started .tail")).to_contain_text("loss")
    expect(page.locator("#started .stop-run")).to_have_text("Stop")  # nothing is best of a rehearsal
    page.locator("#beside-it").click()
    expect(page.locator("#beside > li").first).to_be_visible()
    expect(page.locator("[data-chart=measured] .gantt-labels li").first).to_be_visible()
    page.locator("#run .stop-run").click()
    expect(page.locator("#run .state")).to_have_text("stopped")
    expect(page.locator("#run-sentence")).to_contain_text("a step measured")
    assert page.faults == []
    server.stop()


CONTROLS = {
    "accumulation": ("2", "perBillion"), "activations": ("none", "step"), "weight_gradients": ("none", "step"),
    "algorithm": ("central-server", "step"), "prefetch": ("1", "step"), "local_steps": ("3", "step"),
    "device_factors": ("0", "step"), "bandwidth_factor": ("1", "step"), "latency_factor": ("6", "step"),
    "price_factor": ("4", "perBillion"), "chunk_mb": ("1", "step"), "streams": ("1", "step"),
}  # fmt: skip


def test_each_control_changes_the_figure_to_what_the_server_says(page, server, wide_plan):
    """Moved, it changes its figure to the API's number and says so; 'As planned' brings the old one back."""
    visit(page, server, wide_plan)
    page.locator("#drawer-whatif").click()
    for name, (position, key) in CONTROLS.items():
        before = card(page, key)
        control = page.locator(f"[data-change={name}]")
        with page.expect_response(re.compile("/view$")) as answer:
            if control.evaluate("e => e.tagName") == "SELECT":
                control.select_option(position)
            else:
                slide(page, name, position)
        page.locator(f"[data-card={key}] small", has_text=f"planned {before}").wait_for()
        estimate = answer.value.json()["estimate"]
        billion = estimate["cost_usd"] / (estimate["tokens_per_s"] * estimate["step_s"]) * 1e9
        wanted = {"step": estimate["step_s"], "perBillion": billion}[key]
        number = float(re.search(r"[\d.,]+", card(page, key))[0].replace(",", ""))
        scale = 1e-3 if card(page, key).endswith("ms") else 1.0
        assert number * scale == pytest.approx(wanted, rel=0.01), name
        page.locator("#reset").click()
        expect(page.locator(f"[data-card={key}] b")).to_have_text(before)


def test_a_what_if_is_kept_shared_and_told_apart(browser, page, server, plan_id):
    """What is tried is in the address; kept, it is a plan of its own that another browser opens with the same step."""
    visit(page, server, plan_id, more='&what={"bandwidth_factor":4}')
    page.locator(".banner", has_text="Bandwidth between regions × 4").wait_for()
    # Of better links the bound is a weaker one: no gap to another is beside it.
    expect(page.locator("[data-card=gap] small")).to_have_text(re.compile("^bound"))
    step = card(page, "step")
    page.locator("#keep").click()
    page.locator("#keep").wait_for(state="detached")
    assert plan_id not in page.url
    other = new_page(browser, server)
    other.goto(page.url)
    other.locator(".banner", has_text="Bandwidth between regions × 4").wait_for()
    expect(other.locator("[data-card=step] b")).to_have_text(step)
    other.locator("button", has_text="Open the original").click()
    other.locator(".banner").wait_for(state="detached")
    assert plan_id in other.url
    other.go_back()
    other.locator(".banner").wait_for()
    other.context.close()


@pytest.mark.parametrize("address", ["plan=../jobs", "plan=x%2F..%2F..%2Fruns", "job=../plans", "with=%00"])
def test_an_address_asks_for_plans_alone(page, server, plan_id, address):
    """What no plan can be called is said not to be here, and nothing else of the API is asked in its place."""
    asked = set()

    def note(request):
        asked.add(request.method + request.url.removeprefix(f"{server.url}/api/v1"))

    page.on("request", note)
    page.goto(f"{server.url}/#{address}")
    expect(page.locator("#trouble")).to_contain_text("is not here")
    page.locator("#calculate:enabled").wait_for()
    page.wait_for_load_state("networkidle")
    page.remove_listener("request", note)
    assert not page.faults
    assert "GET/jobs" in asked and not {path for path in asked if "/view" in path or path.startswith("GET/jobs/")}


def test_who_opens_a_plan_that_is_gone_stays_at_theirs(page, server, plan_id):
    """A variant whose original was deleted by then is still there when that cannot be opened."""
    gone = variant(server, plan_id)
    mine = variant(server, gone, latency_factor=2.0)
    visit(page, server, mine)
    assert server.request("DELETE", f"/api/v1/plans/{gone}")[0] == 204
    page.locator("button", has_text="Open the original").click()
    expect(page.locator("#trouble")).to_contain_text(f"Plan {gone} is not here")
    expect(page.locator("[data-card=step] b")).to_have_text(re.compile(r"\d"))
    page.wait_for_function("id => location.hash.includes(`plan=${id}`)", arg=mine)
    page.locator(".banner", has_text="Variant").wait_for()
    page.faults.clear()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("[1]", ""), ("null", ""), ('{"nosuch": 2}', ""), ('{"constructor": 2}', ""), ('{"links": 5}', ""),
        ('{"bandwidth_factor": -2}', "bandwidth_factor: found -2, expected a number >= 0.01 and <= 100"),
        ('{"links": [{"source": "x", "target": "y", "activations": "int4"}]}', "region: found 'x', expected one of"),
    ],
)  # fmt: skip
def test_what_nobody_can_try_leaves_the_plan_as_it_is(page, server, plan_id, what, said):
    """An address that was cut short or written by hand opens the plan; what the server refuses is said beside it."""
    visit(page, server, plan_id, more=f"&what={quote(what)}")
    page.locator("[data-card=step]").wait_for()
    expect(page.locator("#what")).to_be_visible()
    assert "what=" not in page.url and page.locator("#reset").count() == 0
    expect(page.locator("#trouble")).to_have_count(1 if said else 0)
    if said:
        expect(page.locator("#trouble")).to_contain_text(said)
    assert [fault for fault in page.faults if "422" not in fault] == []


def test_of_plans_side_by_side_one_that_is_gone_leaves_the_others(page, server, plan_id, wide_plan):
    """It is said to be gone, and is no longer in the address."""
    visit(page, server, plan_id, "compare", f"&with=nosuch12345,{wide_plan}")
    expect(page.locator("#trouble")).to_contain_text("Plan nosuch12345 is not here")
    expect(page.locator(".stacks li")).to_have_count(2)
    assert "nosuch" not in page.url


def test_a_variant_is_deployed_as_it_is_priced(page, server, wide_plan):
    """While something is only tried, files are of the plan and the page says so; of the variant they hold what was
    changed."""
    visit(page, server, wide_plan, "deploy", '&what={"activations":"bf16"}')
    page.locator("#target-torchrun").click()
    page.locator("#view", has_text="without what you try").wait_for()
    page.locator("#keep").click()
    page.locator("#keep").wait_for(state="detached")
    fill(page, "deploy-name", "of-a-variant")
    page.locator("#deploy").click()
    page.locator("#deploy-result .good").wait_for()
    written = json.loads((server.folder / "deployments" / "of-a-variant" / "plan.json").read_text("utf-8"))
    kept = server.request("GET", f"/api/v1/plans/{re.search('plan=([^&]+)', page.url)[1]}")[2]
    before = server.request("GET", f"/api/v1/plans/{wide_plan}")[2]
    assert written["stages"] == kept["stages"] and written["links"] == kept["links"] != before["links"]
    assert {link["activations"] for link in written["links"]} == {"bf16"}


def test_what_is_of_the_plan_without_what_is_tried_says_so(page, server, plan_id, wide_plan):
    """A comparison, other plans and files: the figures above them are with it."""
    visit(page, server, wide_plan, "compare", f'&with={plan_id}&what={{"activations":"bf16"}}')
    said = page.locator("#view").get_by_text(re.compile("without what you try"))
    expect(said).to_have_count(1)
    page.locator("#tab-strategy").click()
    expect(said).to_have_count(2)
    page.locator("#tab-overview").click()
    page.locator("#timeline-menu").click()
    expect(said).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#reset").click()
    page.locator("#tab-strategy").click()
    page.locator("#reasons").wait_for()
    expect(said).to_have_count(0)


def test_the_limit_is_named_and_the_rest_follows(page, server, plan_id):
    """Sentence and drawer say what the API says: the first limit, worst first; planning anew follows."""
    visit(page, server, plan_id)
    said = server.request("GET", f"/api/v1/plans/{plan_id}/limits")[2]["limits"]
    page.locator("#limits li").first.wait_for()
    shown = page.locator("#limits li").evaluate_all("e => e.map(x => [x.dataset.kind, x.dataset.region])")
    assert shown == [[row["kind"], row["region"]] for row in said[:8]]
    expect(page.locator(".sentence")).to_contain_text(page.locator("#limits li b").first.inner_text())
    page.locator("#limits li", has_text="planned anew").first.wait_for()
    again = server.request("GET", f"/api/v1/plans/{plan_id}/limits/0")[2]
    parts = page.locator("#limits li").first.locator("dd").all_inner_texts()
    told = [float(re.search(r"[\d.]+", part)[0]) / 100 for part in parts if part[0] == "−"]
    assert told[0] == pytest.approx(said[0]["saves"], abs=6e-4)
    assert told[-1] == pytest.approx(again["would_save"], abs=6e-4) or again["would_save"] < 0.001


def test_compared_plans_differ_by_terms_that_sum_up(page, server, wide_plan):
    """Two plans side by side; the differences of the terms add to that of the step."""
    other = variant(server, wide_plan, bandwidth_factor=2.0, algorithm="ring")
    visit(page, server, wide_plan, "compare", f"&with={other}")
    cells = page.locator("#terms tbody tr").evaluate_all(
        "rows => rows.map(r => r.cells[2].querySelector('small').textContent || '+0 s')"
    )
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}

    def seconds(text):
        number, unit = re.fullmatch(r"\s*([+−][\d.,]+)\s*(\S+)", text).groups()
        return float(number.replace("−", "-").replace(",", "")) * scale[unit]

    *terms, whole = map(seconds, cells)
    assert len(terms) == 5 and whole != 0
    assert sum(terms) == pytest.approx(whole, rel=0.02)


def test_compared_plans_have_their_steps_on_one_scale(page, server, wide_plan):
    """A timeline for each; a key in one zooms all of them, from the same moment on."""
    other = variant(server, wide_plan, bandwidth_factor=0.25)
    visit(page, server, wide_plan, "compare", f"&with={other}")
    first, second = (page.locator(f"[data-chart=gantt-{i}] canvas") for i in (0, 1))
    second.wait_for()
    asked = []
    page.on("request", lambda r: asked.append(r.url) if "/timeline?" in r.url else None)
    with (
        page.expect_response(re.compile(f"{wide_plan}/timeline")),
        page.expect_response(re.compile(f"{other}/timeline")),
    ):
        first.press("+")
    windows = {(re.search("plans/([^/]+)", url)[1], re.search("from_s=[^&]+", url)[0]) for url in asked}
    assert {plan for plan, _ in windows} == {wide_plan, other} and len({window for _, window in windows}) == 1
    page.locator("#timelines").get_by_role("button", name="Whole step").click()
    expect(second).to_be_visible()


def test_links_that_nobody_gave_are_marked_until_somebody_does(fresh, server):
    """Between regions that are added the page fills in a rate and a latency, says so, and forgets it with an edit; a
    latency by distance follows the region and its name."""
    fresh.locator("#fold-cluster").click()
    fresh.locator("#by-hand").click()
    for name in ("Frankfurt", "Tokyo"):
        fresh.locator("[data-path=place]").select_option(name)
        fresh.locator("[role=tab][aria-selected=true]", has_text=name.lower()).wait_for()
    rate, latency = (f"cluster.{key}[1][0]" for key in ("bandwidth_gbps", "latency_ms"))
    marks = fresh.locator("table.edit .mark")
    expect(marks).to_have_text(["default", "default"])
    far = float(fresh.locator(f"[data-path='{latency}']").input_value())
    fill(fresh, "cluster.regions[1].name", "somewhere")
    fill(fresh, "cluster.regions[1].longitude", "10")
    expect(marks).to_have_text(["default", "default"])
    assert float(fresh.locator(f"[data-path='{latency}']").input_value()) < far
    fill(fresh, rate, "5")
    expect(marks).to_have_text(["default"])
    fresh.reload()
    expect(marks).to_have_text(["default"])
    ask_little(fresh)
    fresh.locator("#calculate").click()
    fresh.locator("[data-card=step]").wait_for()
    assert fresh.locator("#assumed-between").count() == 0
    fresh.locator("#drawer-assumed").click()
    fresh.locator("#assumed").or_(fresh.locator("#drawer-panel .empty")).first.wait_for()


UNLINKED = """
regions:
  - {name: virginia, latitude: 39, longitude: -77, nodes: [{device: t4, count: 1, devices_per_node: 4}]}
  - {name: frankfurt, latitude: 50, longitude: 9, nodes: [{device: t4, count: 1, devices_per_node: 4}]}
  - {name: tokyo, latitude: 36, longitude: 140, nodes: [{device: t4, count: 1, devices_per_node: 4}]}
links: [{between: [virginia, frankfurt], latency_ms: 44, bandwidth_gbps: 5}]
"""


def test_links_that_a_file_leaves_out_are_filled_in_and_marked(fresh):
    """Of regions with places that nothing joins, when a file is opened and when it is typed. What the file gives stays
    given, what it calls a default is one, and without places the fault says what would help."""
    fresh.locator("#fold-cluster").click()
    opened = {"name": "c.yaml", "mimeType": "", "buffer": UNLINKED.encode()}
    fresh.locator("#upload-cluster").set_input_files(opened)
    expect(fresh.locator(".notice")).to_contain_text("2 links between regions that nobody gave")
    fresh.locator("#tab-cluster").click()
    fresh.get_by_role("tab", name="virginia").click()
    rows = fresh.locator("table.edit tbody tr")
    expect(rows.filter(has_text="frankfurt").locator(".mark")).to_have_count(0)
    expect(rows.filter(has_text="tokyo").locator(".mark")).to_have_text(["default", "default"])
    yaml = fresh.locator("#yaml")
    yaml.fill(UNLINKED.replace("virginia, frankfurt", "virginia, tokyo"))
    expect(rows.filter(has_text="tokyo").locator(".mark")).to_have_count(0)
    expect(rows.filter(has_text="frankfurt").locator(".mark")).to_have_text(["default", "default"])
    fresh.locator("#upload-cluster").set_input_files(
        opened | {"buffer": UNLINKED.replace("longitude: 140, ", "").encode()}
    )
    expect(fresh.get_by_role("alert")).to_contain_text("between those with latitude and longitude")
    expect(fresh.locator(".notice.on")).to_have_count(0)  # once it was there long enough to be read


def test_links_that_nobody_gave_are_ordered_by_what_goes_both_ways(fresh):
    """What goes one way alone counts, whichever way that is."""
    add_places(fresh, "Tokyo", "London", "Seoul")
    ask_little(fresh)
    fresh.locator("#calculate").click()
    fresh.locator("[data-card=step]").wait_for()

    def one_way(route):
        told = route.fetch().json()
        sent = {("tokyo", "seoul"): 9, ("seoul", "tokyo"): 0}
        shown = {"distance_km": 1.0, "latency_ms": 1.0, "bandwidth_gbps": 1.0, "busy": 0.1, "streams": 1}
        shown |= dict.fromkeys(("activations", "activation_gradients", "weight_gradients"), "none")
        links = [
            shown | {"source": a, "target": b, "activation_bytes": sent.get((a, b), 1), "gradient_bytes": 0}
            for a, b in permutations(("tokyo", "london", "seoul"), 2)
        ]  # whatever the plan uses
        route.fulfill(json=told | {"links": links})

    fresh.route(re.compile("/view"), one_way)
    fresh.route("**/assumed", lambda route: route.fulfill(json=[]))
    fresh.reload()
    fresh.locator("#drawer-assumed").click()
    told = fresh.locator("#assumed-between b")
    expect(told).to_have_count(3)
    expect(told.first).to_have_text("tokyo – seoul")


def test_a_region_has_links_once_it_has_a_place(fresh, server):
    """Without one nothing is made up, here as in files; what is filled in is a default in the file, in what a search is
    asked for and beside the plan, until somebody gives it."""
    fresh.locator("#fold-cluster").click()
    fresh.locator("#by-hand").click()
    fresh.locator("[data-path=place]").select_option("Tokyo")
    fresh.locator("#add-region").click()
    expect(fresh.locator("#cluster-error")).to_contain_text("no links between tokyo and region-2")
    fill(fresh, "cluster.regions[1].latitude", "39")
    fill(fresh, "cluster.regions[1].longitude", "-77")
    expect(fresh.locator("#cluster-error")).to_have_count(0)
    expect(fresh.locator("table.edit .mark")).to_have_text(["default", "default"])
    expect(fresh.locator("#yaml")).to_have_value(re.compile(re.escape("defaults: [tokyo - region-2]")))
    fresh.reload()
    expect(fresh.locator("table.edit .mark")).to_have_text(["default", "default"])
    ask_little(fresh)
    fresh.locator("#calculate").click()
    fresh.locator("[data-card=step]").wait_for()
    asked = server.request("GET", f"/api/v1/jobs/{re.search('plan=([^&]+)', fresh.url)[1]}/request")[2]
    assert asked["problem"]["cluster"]["defaults"] == ["tokyo - region-2"]
    fresh.locator("#drawer-assumed").click()
    told = fresh.locator("#assumed-links li, #assumed-between li").filter(has_text="tokyo").filter(has_text="region-2")
    expect(told.locator(".mark")).to_have_text(["default"])
    fresh.locator("#tab-cluster").click()
    fill(fresh, "cluster.latency_ms[1][0]", "70")
    expect(fresh.locator("#yaml")).not_to_have_value(re.compile("defaults"))
    expect(fresh.locator("table.edit .mark")).to_have_text(["default"])


def test_a_front_opens_its_plans(fresh, server):
    """A search of its own with progress; a row opens its plan, as fast as the front says, and so does a click on the
    chart above it."""
    choose(fresh, "opt-350m")
    fill(fresh, "batch.global_batch", "16")
    fresh.locator("#tab-front").click()
    fresh.locator("#start-front").click()
    fresh.locator("#start-front", has_text="again").wait_for()
    row = fresh.locator("#view tbody tr").first
    step = row.locator("td").first.inner_text()
    row.get_by_role("button").click()
    fresh.locator("[data-card=step]").wait_for()
    expect(fresh.locator("[data-card=step] b")).to_have_text(step)
    fresh.locator("#tab-front").click()
    row.wait_for()
    last = fresh.locator("#view tbody tr").last.locator("td").first.inner_text()
    assert last != step
    chart_data(fresh, "front")
    at = fresh.evaluate(
        """() => {
      const chart = window.polygonCharts.get("front");
      return chart.convertToPixel("grid", chart.getOption().series[0].data.at(-1));
    }"""
    )
    fresh.locator("[data-chart=front]").click(position={"x": at[0], "y": at[1]})
    expect(fresh.locator("[data-card=step] b")).to_have_text(last)
    assert "plan=" in fresh.url


def test_logs_that_are_opened_stand_beside_the_plan(page, server, plan_id, tmp_path):
    """JSON lines of a rank, chosen in the page: median step beside the prediction, loss and step time as charts."""
    log = tmp_path / "rank-0.jsonl"
    log.write_text(run_lines(9))
    visit(page, server, plan_id, "runs")
    page.locator("#open-run").set_input_files(log)
    page.locator("#run-sentence").wait_for()
    name = re.search("run=([^&]+)", page.url)[1]
    said = server.request("GET", f"/api/v1/runs/{name}")[2]
    assert said["plan"] == plan_id and said["step_s"] > 0
    numbers = [float(x) for x in re.findall(r"[\d.]+", page.locator("#run-sentence").inner_text())]
    assert any(x == pytest.approx(said["step_s"], rel=0.01) for x in numbers)
    assert [point[1] for point in chart_data(page, "run-loss")[0]] == [point[2] for point in said["points"]]
    assert len(said["points"]) == 9
    expect(page.locator("#outcome")).to_have_text(page.locator("#run-sentence").inner_text())


def test_a_run_that_went_on_from_a_checkpoint_has_reached_its_end(page, server, plan_id, tmp_path):
    """Its log begins at step 10 of 30 and ends with the last: that is not 20 of 30."""
    log = tmp_path / "rank-0.jsonl"
    log.write_text(run_lines(30, first=10))
    visit(page, server, plan_id, "runs")
    page.locator("#open-run").set_input_files(log)
    page.locator("#run-sentence").wait_for()
    expect(page.locator("#view")).to_contain_text("30 of 30 steps")
    name = re.search("run=([^&]+)", page.url)[1]
    told = server.request("GET", f"/api/v1/runs/{name}")[2]
    assert (told["steps"], told["reached"], told["wanted"]) == (20, 30, 30)


def test_a_traced_run_names_its_stages_once(page, server, wide_plan):
    """A line of bars is read as what it is of, and whether it was predicted or measured is said once."""
    visit(page, server, wide_plan, "runs", f"&run={opened_run(server, wide_plan)}")
    first = page.locator("#beside > li").first
    first.wait_for()
    said = first.aria_snapshot()
    assert re.search(r"Stage 0\b", said) and said.count("Predicted") == said.count("Measured") == 1


def name_a_new_plan(page, server, name, tags):
    """Give a plan of its own a name and tags by its menu; its identifier, and its entry in the list."""
    made = server.request("POST", "/api/v1/plans", plan_data(*planned()))[2]["id"]
    visit(page, server, made)
    here = page.locator("#plan-list li.here")
    here.locator(".menu > button").click()
    here.get_by_role("button", name="Name and tags").click()
    page.locator(".naming [name=name]").fill(name)
    page.locator(".naming [name=tags]").fill(tags)
    page.locator(".naming .main").click()
    return made, here


def test_plans_are_named_put_away_and_deleted(page, server):
    """The menu of a plan; the list follows; the archive keeps what is put away."""
    made, here = name_a_new_plan(page, server, "the good one", "paper, march")
    page.locator("#what", has_text="the good one").wait_for()
    assert server.request("GET", f"/api/v1/jobs/{made}")[2]["tags"] == ["paper", "march"]
    here.locator(".menu > button").click()
    here.get_by_role("button", name="Archive").click()
    here.wait_for(state="detached")
    page.locator("#plans-menu").click()
    page.get_by_role("button", name="Show the archive").click()
    here.locator(".menu > button").click()
    page.once("dialog", lambda dialog: dialog.accept())
    here.get_by_role("button", name="Delete").click()
    here.wait_for(state="detached")
    assert server.request("GET", f"/api/v1/jobs/{made}")[0] == 404


def test_strategy_and_communication_show_what_they_compute(page, server, wide_plan):
    """As many rows as groups of workers; a radar within 0 and 1; heat-map, formulas and advice with its gain."""
    visit(page, server, wide_plan, "strategy")
    view = server.request("POST", f"/api/v1/plans/{wide_plan}/view", {})[2]
    workers = sum(len(stage["workers"]) for stage in view["stages"])
    expect(page.locator("table").first.locator("tbody tr")).to_have_count(workers)
    values = [value for entry in chart_data(page, "radar")[0] for value in entry["value"]]
    assert len(values) >= 10 and all(0 <= value <= 1 for value in values)
    assert "plan" in {point["key"] for point in chart_data(page, "pareto")[0]}
    page.locator("#tab-communication").click()
    page.locator("#advice details").nth(2).wait_for()
    assert len(chart_data(page, "heat")[0]) > 0
    expect(page.locator("#formulas tbody tr")).to_have_count(10)
    before = card(page, "step")
    # The case that applies is open; the advice with a button may be another's.
    page.locator("#advice details").evaluate_all("all => all.forEach((part) => { part.open = true; })")
    measured = server.request("POST", f"/api/v1/plans/{wide_plan}/advice", {})[2]["cases"]["communication"]
    [more] = [m for m in measured if m["key"] == "accumulate"]
    row = page.locator("#advice details").nth(2).locator("tr", has_text="Accumulate")
    batch = view["batch"]["global_batch"]
    expect(row).to_contain_text(f"becomes 4 times as large: {4 * batch} sequences in {three(more['step_s'])} s")
    expect(row.locator("td").nth(1)).to_have_text(f"{three(more['step_s'] / 4)} s")
    page.locator("#advice button").first.click()
    page.locator("[data-card=step] small", has_text=f"planned {before}").wait_for()
    page.locator("#reset").click()


def test_what_breaks_a_limit_is_said_wherever_it_is_tried_kept_or_opened(page, server, wide_plan):
    """A packing that the level of parity does not allow: beside the advice that names it, of the what-if, of the
    variant that is kept and of its file when that is opened; nothing of the plan itself."""
    why = "int4 weight gradients are not allowed (parity 'safe'; it needs 'known')"
    visit(page, server, wide_plan, "communication")
    expect(page.locator("#broken")).to_have_count(0)
    page.locator("#advice details").evaluate_all("all => all.forEach((part) => { part.open = true; })")
    row = page.locator("#advice tr", has_text=why)
    expect(row).to_have_count(1)
    row.get_by_role("button").click()
    expect(page.locator("#broken")).to_have_text(f"This breaks what is asked: {why}.")
    expect(page.locator("#controls .error")).to_contain_text(why)  # where the drawer covers what is above the figures
    page.locator("#keep").click()
    page.wait_for_function("before => !location.hash.includes(before)", arg=wide_plan)
    expect(page.locator("#broken")).to_contain_text(why)
    kept = re.search(r"plan=([^&]+)", page.url)[1]
    status, _, opened = server.request("POST", "/api/v1/plans", server.request("GET", f"/api/v1/plans/{kept}")[2])
    assert status == 201
    visit(page, server, opened["id"])
    expect(page.locator("#broken")).to_contain_text(why)
    for made in (opened["id"], kept):
        server.request("DELETE", f"/api/v1/plans/{made}")


MANY = 64
"""Regions of a cluster that is drawn in parts."""


def test_what_is_packed_inside_a_region_is_told(page, server):
    """Nodes of a region that send one another 8 bits: strategy and communication say so, and what is assumed of the
    loss."""
    data = plan_data(*planned())
    data["links"].append({"from": "south", "to": "south", "activations": "int8", "activation_gradients": "none",
                          "weight_gradients": "none", "streams": 1})  # fmt: skip
    status, _, row = server.request("POST", "/api/v1/plans", data)
    assert status == 201
    visit(page, server, row["id"], "strategy")
    told = "Packed between nodes of south: int8 activations."
    expect(page.locator("#reasons")).to_contain_text(told)
    page.locator("#tab-communication").click()
    expect(page.locator("#view")).to_contain_text(told)
    page.locator("#drawer-assumed").click()
    expect(page.locator("#drawer-panel")).to_contain_text("int8 activations (safe)")


def test_the_heat_map_of_many_regions_names_those_that_send(page, server, wide_plan):
    """Who leaves while it is drawn leaves nothing behind that fails."""
    used = set()

    def wider(route):
        told = route.fetch().json()
        used.update(end for link in told["links"] for end in (link["source"], link["target"]))
        more = [told["regions"][0] | {"name": f"idle-{i}", "used": 0} for i in range(MANY)]
        idle = told["links"][0] | {"activation_bytes": 0, "gradient_bytes": 0}
        links = [idle | {"source": a["name"], "target": b["name"]} for a in more for b in more if a is not b]
        route.fulfill(json=told | {"regions": [*told["regions"], *more], "links": [*told["links"], *links]})

    page.route(re.compile(f"{wide_plan}/view"), wider)
    visit(page, server, wide_plan, "communication")
    names = page.wait_for_function("() => window.polygonCharts.get('heat')?.getOption().xAxis[0].data").json_value()
    assert 0 < len(names) < MANY and set(names) <= used
    page.locator("#tab-overview").click()
    page.evaluate(
        """() => new Promise((done) => {
      document.getElementById("tab-communication").click();
      const drawn = setInterval(() => {
        if (!window.polygonCharts.has("heat")) return;
        clearInterval(drawn);
        document.getElementById("tab-overview").click();
        requestAnimationFrame(() => requestAnimationFrame(done));
      });
    })"""
    )
    page.locator("#tab-overview[aria-selected=true]").wait_for()
    page.wait_for_timeout(100)
    assert page.faults == []
    page.unroute_all(behavior="ignoreErrors")


def test_what_a_chart_had_still_to_paint_when_it_was_left_is_not_painted(page, server, wide_plan):
    """As zrender goes on in the next frame with what takes long: on a painter that is gone."""
    visit(page, server, wide_plan, "communication")
    page.wait_for_function("() => window.polygonCharts.has('heat')")
    gone, failed = page.evaluate(
        """() => new Promise((done) => {
      const { painter } = window.polygonCharts.get("heat").getZr(), paint = painter._paintList;
      let painting = painter._redrawId;
      painter._paintList = (list, before, number) => { painting = number; paint.call(painter, list, before, number); };
      document.getElementById("tab-overview").click();
      const left = setInterval(() => {
        if (window.polygonCharts.has("heat")) return;
        clearInterval(left);
        let failed = "";
        try { paint.call(painter, [], null, painting); } catch (e) { failed = e.message; }
        done([painter._i === null, failed]);
      });
    })"""
    )
    assert gone and failed == ""


def test_of_a_history_that_the_browser_cannot_keep_the_newest_steps_stay(fresh):
    """Its quota nearly used up, a reload loses steps long ago, not the last."""
    fresh.locator("#fold-model").click()
    fresh.wait_for_function("() => sessionStorage.getItem('polygon-draft')")
    fresh.evaluate(
        """() => {
      const draft = JSON.stringify(JSON.parse(sessionStorage.getItem("polygon-draft")).draft);
      let n = 0;
      try { for (;;) sessionStorage.setItem(`filler ${n++}`, draft.repeat(5)); } catch { n--; }
      sessionStorage.removeItem(`filler ${n - 1}`);
    }"""
    )
    for i in range(1, 8):
        for path in ("batch.global_batch", "batch.seq_len"):
            fill(fresh, path, str(64 * i))
            fresh.wait_for_timeout(200)
    fresh.reload()
    fresh.locator("#calculate:enabled").wait_for()
    fresh.locator("#undo[aria-disabled=false]").click()
    expect(fresh.locator("[data-path='batch.seq_len']")).to_have_value("384")
    expect(fresh.locator("[data-path='batch.global_batch']")).to_have_value("448")


def test_the_editor_of_many_regions_is_drawn_in_parts(fresh):
    """No task draws all links of a region; all of them come. Numbers of thousands are parted."""
    regions = "".join(
        f"- name: r{i}\n  nodes:\n  - {{device: t4, count: 4, devices_per_node: 8}}\n" for i in range(MANY)
    )
    text, row = f"name: many\nregions:\n{regions}", ", ".join(["1"] * MANY)
    for key in ("latency_ms", "bandwidth_gbps"):
        text += f"{key}:\n" + f"- [{row}]\n" * MANY
    fresh.locator("#fold-cluster").click()
    fresh.locator("#upload-cluster").set_input_files({"name": "many.yaml", "mimeType": "", "buffer": text.encode()})
    expect(fresh.locator("#fold-cluster small")).to_have_text("2,048 devices in 64 regions")
    fresh.evaluate(
        """() => {
      window.rows = [];
      new MutationObserver((all) => {
        const added = all.flatMap((one) => [...one.addedNodes]).filter((node) => node.nodeType === 1);
        const row = "table.edit tbody tr";
        const inside = (node) => (node.matches(row) ? 1 : node.querySelectorAll(row).length);
        window.rows.push(added.reduce((sum, node) => sum + inside(node), 0));
      }).observe(document.body, { childList: true, subtree: true });
    }"""
    )
    fresh.locator("#tab-cluster").click()
    expect(fresh.locator("table.edit tbody tr")).to_have_count(MANY - 1)
    assert 0 < max(fresh.evaluate("window.rows")) < MANY / 2


def test_deploy_shows_files_and_writes_them(page, server, plan_id):
    """Losses, a file's text, a deployment with its check passed, and all of it in one file; a wrong name or host is
    marked, with what is allowed."""
    visit(page, server, plan_id, "deploy")
    page.locator("#file-text", has_text="train_batch_size").wait_for()
    files = page.locator(".file-list [role=tab]")  # of thousands of nodes thousands: one stop of the Tab key
    page.get_by_role("tab", name="ds_config.json").focus()
    page.keyboard.press("End")
    expect(files.last).to_be_focused()
    expect(page.locator("#file-text")).to_have_accessible_name(files.last.inner_text())
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.locator("#file-text")).to_be_focused()
    page.locator("#deploy").click()
    page.locator("#deploy-result .good").wait_for()
    assert (server.folder / "deployments" / "gpt3-1-3b-deepspeed" / "ds_config.json").is_file()
    page.locator("#deploy").click()
    expect(page.locator("#deploy-error")).to_contain_text("called gpt3-1-3b-deepspeed already")
    (server.folder / "deployments" / "gpt3-1-3b-deepspeed" / "ds_config.json").unlink()
    page.locator("#deploy-replace").click()
    page.locator("#deploy-result .good").wait_for()
    expect(page.locator("#deploy-replace, #deploy-error")).to_have_count(0)
    assert (server.folder / "deployments" / "gpt3-1-3b-deepspeed" / "ds_config.json").is_file()
    with page.expect_download() as saved:
        page.locator("#deployments button").first.click()
    assert zipfile.is_zipfile(saved.value.path())
    for path, wrong, right, allowed in (
        ("deploy-name", "Bad name!", "good-name", "letters a-z, digits and '-', at most 40"),
        ("deploy-hosts", "a b c", "", "a name, or a name and an IPv4 address"),
    ):
        fill(page, path, wrong)
        page.locator("#deploy").click()
        expect(page.locator("#deploy-error")).to_contain_text(f"found '{wrong}', expected {allowed}")
        expect(page.locator(f"[data-path={path}][aria-invalid=true][aria-describedby=deploy-error]")).to_be_focused()
        fill(page, path, right)
    page.locator("#target-megatron").click()
    page.locator("#file-text", has_text="--pipeline-model-parallel-size").wait_for()


def test_the_keyboard_does_everything(page, server, plan_id):
    """Arrow keys walk the views and move the focus; a digit goes to one; the palette finds commands and plans."""
    visit(page, server, plan_id)
    page.locator("#tab-overview").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-cluster")).to_be_focused()
    page.keyboard.press("End")
    expect(page.locator("#tab-runs")).to_be_focused()
    page.keyboard.press("2")
    page.locator("#region-tab-0").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#region-tab-1")).to_be_focused()
    expect(page.locator("#region-tab-1")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("3")
    page.locator("#tab-strategy[aria-selected=true]").wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.type("compare")
    page.keyboard.press("Enter")
    page.locator("#tab-compare[aria-selected=true]").wait_for()
    page.locator("dialog").wait_for(state="hidden")


def test_the_palette_gives_back_the_focus_that_it_took(fresh):
    """To what had it; where nothing had it, to nothing: no link to the content appears."""
    fresh.keyboard.press("Control+k")
    expect(fresh.locator(".palette input[type=text]")).to_be_focused()
    fresh.keyboard.press("Escape")
    fresh.locator("dialog").wait_for(state="hidden")
    fresh.evaluate("new Promise((done) => setTimeout(done))")
    assert fresh.evaluate("document.activeElement === document.body")
    fresh.locator("#theme").focus()
    fresh.keyboard.press("Control+k")
    expect(fresh.locator(".palette input[type=text]")).to_be_focused()
    fresh.keyboard.press("Escape")
    expect(fresh.locator("#theme")).to_be_focused()


def test_who_goes_on_is_not_called_back_to_a_fault(fresh):
    """A region that is wrong is shown once the server says so, but not to who has chosen another meanwhile."""
    page = fresh
    page.locator("#tab-cluster").click()
    held = Held(page, "**/clusters")
    fill(page, "cluster.regions[0].nodes[0].count", "0")
    held.wait('"count":0')
    page.locator("#region-tab-0").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#region-tab-1")).to_have_attribute("aria-selected", "true")
    held.release()
    expect(page.locator("#cluster-error")).to_contain_text("cluster.regions[0]")
    expect(page.locator("#region-tab-1")).to_have_attribute("aria-selected", "true")


def test_single_keys_are_put_off_for_good(page, server, plan_id):
    """In the palette, by its box or its command: then no key without Ctrl acts, after a reload and in another tab too,
    until they are on again; a key in the palette itself opens nothing behind it (WCAG 2.1.4)."""
    visit(page, server, plan_id)
    chosen = page.locator("[role=tab][aria-selected=true][id^=tab-]")
    page.keyboard.press("?")
    page.locator("#single-keys").focus()
    page.keyboard.press("3")
    expect(chosen).to_have_id("tab-overview")
    page.keyboard.press("Space")
    page.keyboard.press("Escape")
    other = page.context.new_page()
    for tab in (page, other):
        visit(tab, server, plan_id)
        for key in ("3", "?"):
            tab.keyboard.press(key)
        tab.keyboard.press("Control+k")  # what the keys before it did is done
        tab.locator(".palette input[type=text]").wait_for()
        expect(tab.locator("#single-keys")).not_to_be_checked()
        expect(tab.locator(".palette li kbd", has_text=re.compile(r"^\d$"))).to_have_count(0)
        expect(tab.locator("[role=tab][aria-selected=true][id^=tab-]")).to_have_id("tab-overview")
    other.keyboard.type("single keys")
    other.keyboard.press("Enter")
    expect(page.locator("#single-keys")).to_be_checked()
    other.close()
    page.keyboard.press("Escape")
    expect(page.locator("#single-keys")).to_have_count(0)
    page.keyboard.press("3")
    expect(chosen).to_have_id("tab-strategy")


def test_a_plan_s_own_regions_are_the_first_to_be_shown(fresh, server, plan_id):
    """Another draft is never shown under a plan's address: until the plan's own is there nobody can choose in it, and
    then the region that was chosen before is chosen still."""
    page = fresh  # the example is kept as a draft
    leave(page, server)
    held = Held(page, "**/request")
    page.goto(f"{server.url}/#plan={plan_id}&view=cluster")
    page.evaluate("sessionStorage.removeItem('polygon-draft'); sessionStorage.setItem('polygon-region', '\"south\"')")
    page.reload()
    held.wait()
    expect(page.locator("#view .skeleton")).to_be_visible()
    assert page.locator("[id^=region-tab-], #fold-cluster").count() == 0
    held.release()
    expect(page.locator("#region-tab-1")).to_have_text("south")
    expect(page.locator("#region-tab-1")).to_have_attribute("aria-selected", "true")


FOCUSED = """() => {
  const e = document.activeElement, box = e.getBoundingClientRect();
  const named = e.ariaLabel || [...(e.labels ?? [])].map((l) => l.textContent).join(" ") || e.textContent;
  const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  const covered = !e.contains(hit) && hit?.closest(".top, .rail-foot, .notice") != null && !hit.contains(e);
  const seen = box.bottom > 0 && box.top < innerHeight && box.width > 0;
  window.stops = [...(window.stops ?? []), e];
  const again = window.stops.indexOf(e) < window.stops.length - 1;
  return { body: e === document.body, named: named.trim(), seen, covered, again, text: e.outerHTML.slice(0, 80) };
}"""


@pytest.mark.parametrize(("size", "view"), [("desktop", "overview"), ("desktop", "cluster"), ("phone", "overview")])
def test_the_tab_key_comes_to_everything_once(page, server, wide_plan, size, view):
    """From the link that skips to the content to the end, in the order of the page: each stop has a name, is on the
    screen and below no bar; all buttons and fields that are seen are among them, tabs of a list by their chosen one."""
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    visit(page, server, wide_plan, view)
    stops = []
    while True:
        page.keyboard.press("Tab")
        stop = page.evaluate(FOCUSED)
        if stop["body"]:
            break
        stops.append(stop)
        assert stop["named"] and stop["seen"] and not stop["covered"] and not stop["again"], stop
    assert stops[0]["named"] == "Skip to content"
    missed = """() => [...document.querySelectorAll("button, input, select, textarea, summary")]
      .filter((e) => e.checkVisibility() && e.tabIndex >= 0 && !window.stops.includes(e)).map((e) => e.outerHTML)"""
    assert page.evaluate(missed) == []


def test_the_focus_is_never_lost(page, server):
    """What had it may go away: closed, renamed, put away, in another language; it comes to what is nearest."""
    plan = server.request("POST", "/api/v1/plans", plan_data(*planned()))[2]["id"]
    visit(page, server, plan)
    keys = page.keyboard
    page.locator("#theme").focus()
    for command in ("", "light"):
        keys.press("Control+k")
        keys.type(command)
        expect(page.locator(".palette input[type=text]")).to_be_focused()
        keys.press("Enter" if command else "Escape")
        expect(page.locator("#theme")).to_be_focused()
    keys.press("Control+k")
    expect(page.locator(".palette input[type=text]")).to_be_focused()  # and again before the dialog says that it closed
    page.evaluate("""addEventListener("focusin", (e) => e.target.dispatchEvent(
        new KeyboardEvent("keydown", {key: "k", ctrlKey: true, bubbles: true})), {once: true})""")
    keys.press("Escape")
    expect(page.locator(".palette input[type=text]")).to_be_focused()
    keys.press("Escape")
    expect(page.locator("#theme")).to_be_focused()
    page.locator("#language").focus()
    for _ in range(2):
        keys.press("Enter")
        expect(page.locator("#language")).to_be_focused()

    def press(key, focused):
        keys.press(key)
        expect(page.locator(focused)).to_be_focused()

    page.get_by_label("Close").focus()
    press("Enter", "#open-drawer")
    press("Enter", "#drawer-limits")
    press("Escape", "#open-drawer")
    page.locator("#timeline-menu").focus()
    keys.press("Enter")
    expect(page.locator("#sends")).to_be_visible()
    press("Tab", "#sends")
    press("Escape", "#timeline-menu")
    keys.press("Enter")
    keys.press("Shift+Tab")
    expect(page.locator("#sends")).to_have_count(0)
    here = page.locator("#plan-list li.here")
    menu = here.locator(".menu > button")
    menu.focus()
    keys.press("Enter")
    keys.press("Tab")
    keys.press("Enter")
    expect(page.locator(".naming [name=name]")).to_be_focused()
    keys.press("Escape")
    expect(here.locator(".plan")).to_be_focused()
    menu.focus()
    keys.press("Enter")
    here.get_by_role("button", name="Archive").focus()
    keys.press("Enter")
    here.wait_for(state="detached")
    page.wait_for_function("document.activeElement.closest('.plans') !== null")
    keys.press("3")
    expect(page.locator("#view")).to_contain_text("Stage")
    page.goto(f"{server.url}/#plan=nowhere")
    page.locator("#trouble button").focus()
    keys.press("Enter")
    expect(page.locator("#main")).to_be_focused()


def test_arrows_in_a_list_that_acts_only_open_it(fresh):
    """A cluster is not taken, nor a region added, by the first key on the way to another."""
    fresh.locator("#fold-cluster").click()
    fresh.locator("#by-hand").click()
    fresh.locator("[data-path=place]").focus()
    fresh.keyboard.press("ArrowDown")
    fresh.keyboard.press("ArrowDown")
    assert fresh.locator("[id^=region-tab-]").count() == 0
    fresh.keyboard.press("Enter")
    fresh.locator("[id^=region-tab-]").first.wait_for()
    assert fresh.locator("[id^=region-tab-]").count() == 1


def test_the_keyboard_moves_map_and_stages(page, server, wide_plan):
    """Arrows pan the map under its regions, Space opens one's links; arrows walk the stages, which are one stop."""
    visit(page, server, wide_plan)
    spot = page.locator(".region[data-region=tokyo]")
    before = spot.locator("circle").first.bounding_box()
    spot.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    after = spot.locator("circle").first.bounding_box()
    assert after["x"] > before["x"] + 20 and after["y"] > before["y"] + 20
    page.locator("[data-stage='0']").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("[data-stage='1']")).to_be_focused()
    expect(page.locator(".strip > li[tabindex='0']")).to_have_count(1)
    page.keyboard.press("End")
    expect(page.locator(".strip > li").last).to_be_focused()
    spot.focus()
    page.keyboard.press(" ")
    page.locator("#tab-communication[aria-selected=true]").wait_for()


def test_chinese_and_the_theme(chinese_page, server, plan_id):
    """A Chinese browser gets Chinese words; the buttons change language and theme, and both are remembered."""
    page = chinese_page
    visit(page, server, plan_id, "strategy")
    expect(page.locator("#tab-strategy")).to_have_text("并行策略")
    expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
    page.locator("#language").click()
    page.locator("#tab-strategy", has_text="Strategy").wait_for()
    page.locator("#theme").click()
    visit(page, server, plan_id, "overview")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(page.locator("#tab-strategy")).to_have_text("Strategy")


SHOWN_TEXTS = """() => {
  const texts = [];
  const walk = (e) => {
    const named = "pre, code, kbd, textarea, #language, #what, #plan-list, #deployments, #runs, #run h2";
    if (e.matches(".files, .side, [data-path=compare]")) return;
    if (e.matches(named)) return;
    for (const a of ["aria-label", "placeholder", "title", "aria-valuetext"]) texts.push(e.getAttribute(a) ?? "");
    for (const c of e.childNodes) if (c.nodeType === 3) texts.push(c.textContent); else if (c.nodeType === 1) walk(c);
  };
  walk(document.body);
  for (const chart of (window.polygonCharts ?? new Map()).values()) {
    const o = chart.getOption();
    for (const part of [...(o.xAxis ?? []), ...(o.yAxis ?? [])]) texts.push(part.name ?? "", ...(part.data ?? []));
    for (const series of o.series) texts.push(series.name ?? "");
    for (const radar of o.radar ?? []) texts.push(...radar.indicator.map((i) => i.name));
  }
  return texts.map(String);
}"""
PROPER = frozenset({
    "polygon", "DeepSpeed", "Megatron", "SkyPilot", "torchtitan", "torchrun", "dist_runner", "dist", "runner",
    "Perfetto", "ZeRO", "YAML", "JSON", "PTAFM", "hostfile", "config", "plan", "json", "deployments",
    "token", "exact", "safe", "known", "any", "none", "topk", "powersgd", "int", "run", "small", "Ctrl", "MFU",
    "Slurm", "Kubernetes", "GPipe", "kWh", "mWh", "MWh", "GiB", "MiB", "Gbit", "Mbit", "Tbit", "USD",
    "PCIe", "TAH", "Quant", "arXiv", "INTELLECT", "DiLoCo", "Hadamard",
    "CPU", "start", "IPv", "all", "top", "train", "full", "selective", "Hugging", "Face",
    "RDMA", "InfiniBand", "RoCE", "EFA", "TCP",
})  # fmt: skip
"""Words that Chinese texts keep: names of programs, formats, networks, papers, options and units."""


def test_the_chinese_page_has_no_english_sentence(chinese_page, server, wide_plan):
    """What every view shows, says to screen readers and writes on charts: only names, units and options are left."""
    page = chinese_page
    known = server.request("GET", "/api/v1/catalogue")[2]
    view = server.request("POST", f"/api/v1/plans/{wide_plan}/view", {})[2]
    names = [*known["instances"], *known["links"], *(r["name"] for r in view["regions"])]
    names += [row["name"] for kind in ("devices", "models", "regions", "runtimes") for row in known[kind]]
    names += [optimizer["label"] for optimizer in known["optimizers"]]
    allowed = PROPER | {word for name in names for word in re.findall(r"[A-Za-z]{3,}", name)}
    left = set()
    run = opened_run(server, wide_plan)
    for name in VIEWS:
        visit(page, server, wide_plan, name, f"&run={run}")
        if name == "communication":
            page.locator("#drawer-whatif").click()
            page.locator("[data-change=activations]").select_option("int4")
            page.locator(".banner").wait_for()
            page.locator("#advice details").first.wait_for()
        for fold in ("cluster", "model", "goal"):
            if page.locator(f"#fold-{fold}[aria-expanded=false]").count():
                page.locator(f"#fold-{fold}").click()
        for text in page.evaluate(SHOWN_TEXTS):
            left |= {(word, text) for word in re.findall(r"[A-Za-z]{3,}", text) if word not in allowed}
    assert left == set()


def test_names_from_input_are_text_not_markup(page, server):
    """A region called like a script element shows as its name and runs nothing."""
    evil = "<img src=x onerror=window.pwned=1>"
    problem, plan = planned()
    regions = (replace(problem.cluster.regions[0], name=evil), *problem.cluster.regions[1:])
    problem = replace(problem, cluster=replace(problem.cluster, regions=regions))
    job = server.request("POST", "/api/v1/plans", plan_data(problem, plan))[2]["id"]
    assert server.request("PATCH", f"/api/v1/jobs/{job}", {"name": evil})[0] == 200
    for view in VIEWS:
        visit(page, server, job, view)
    assert page.evaluate("window.pwned") is None
