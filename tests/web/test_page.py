"""The page in a real Chromium: every view, each control changing its numbers, accessibility, nothing from outside."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.free_ports import free_port
from tests.patience import PATIENCE_S, eventually
from tests.web.conftest import Server

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
if CHROMIUM is None:
    pytest.skip("no Chromium found (apt-get install chromium): the page is not tested", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install -e '.[test]')")

VIEWS = ["configure", "map", "strategy", "timeline", "communication", "deploy"]
SIZES = {"desktop": (1366, 900), "tablet": (820, 1180), "phone": (390, 844)}
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


@pytest.fixture
def page(kept_page):
    """The page of all tests, with nothing open and nothing said of what came before."""
    kept_page.goto("about:blank")
    kept_page.faults.clear()
    kept_page.outside.clear()
    return kept_page


def visit(page, server, plan, view):
    page.goto("about:blank")
    page.goto(f"{server.url}/#plan={plan}&view={view}")
    page.locator(f"#tab-{view}[aria-selected=true]").wait_for()
    page.wait_for_load_state("networkidle")


def chart_data(page, name):
    page.wait_for_function(f"() => window.polygonCharts.has('{name}')")
    return page.evaluate(f"window.polygonCharts.get('{name}').getOption().series.map(s => s.data)")


def card(page, key):
    return page.locator(f"[data-card={key}] b").inner_text()


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_no_accessibility_violation_and_asks_nobody_outside(page, server, plan_id, view):
    """axe finds nothing, light and dark; no error on the console; no request to another host."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        visit(page, server, plan_id, view)
        page.evaluate(AXE)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in found] == []
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    assert page.outside == [] and page.faults == []


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize(("scheme", "locale"), [("light", "en-US"), ("dark", "zh-CN")])
def test_every_view_fits_the_screen(browser, server, wide_plan, size, scheme, locale):
    """No view is wider than the window, in either language; screenshots are kept where POLYGON_SCREENSHOTS says."""
    page = new_page(browser, server, size, color_scheme=scheme, locale=locale)
    for view in VIEWS:
        visit(page, server, wide_plan, view)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        if SHOTS:
            SHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SHOTS / f"{size}-{scheme}-{locale[:2]}-{view}.png", full_page=True)
    assert page.faults == []
    page.context.close()


def test_a_plan_from_the_form_to_the_map(page, server):
    """Choose a cluster and a model, make the plan, and its map opens with the regions of the cluster."""
    page.goto("about:blank")
    page.goto(server.url)
    page.get_by_label("Shipped cluster").select_option("two-campus")
    page.locator("input[data-path='regions[1].name'][value]").or_(
        page.locator("[data-path='regions[1].name']")
    ).wait_for()
    page.get_by_label("Global batch").fill("32")
    page.locator("#calculate").click()
    page.locator("#tab-map[aria-selected=true]").wait_for()
    regions = chart_data(page, "map")[3]
    assert sorted(point["name"] for point in regions) == ["north", "south"]
    assert "plan=" in page.url and card(page, "step").endswith("s")


def test_the_form_says_what_the_open_plan_was_asked_for(page, server, wide_plan):
    """A plan that is opened fills the form with its problem; one that is not there is said."""
    visit(page, server, wide_plan, "configure")
    page.locator("[data-path='regions[9].name']").wait_for()
    assert page.locator("[data-path='batch.global_batch']").input_value() == "64"
    assert page.locator("[data-path='model']").input_value() == "gpt3-6.7b"
    page.goto("about:blank")
    page.goto(f"{server.url}/#plan=nowhere&view=map")
    page.locator("#problem", has_text="nowhere: there is no such plan").wait_for()


def test_the_page_outlives_a_restart_of_the_server(browser, tmp_path):
    """While the server is away the page waits and says so; the search begins again, and its plan opens."""
    first = Server(tmp_path, "--port", str(free_port()))
    page = new_page(browser, first)
    page.goto(first.url)
    page.get_by_label("Shipped cluster").select_option("two-campus")
    page.locator("[data-path='regions[1].name']").wait_for()
    page.get_by_label("Effort").select_option("long")
    page.locator("#calculate").click()
    page.locator("#cancel").wait_for()
    first.stop()
    page.locator("#status", has_text="cannot be reached").wait_for()
    second = Server(tmp_path, "--port", first.url.rpartition(":")[2])
    page.locator("#status", has_text="simulation").or_(page.locator("#status", has_text="search:")).wait_for()
    page.locator("#cancel").click()
    page.locator("#tab-map[aria-selected=true]").wait_for()
    page.context.close()
    second.stop()


def test_errors_appear_at_the_field(page, server):
    """The validator's message stands beside the field that it names, which has the focus."""
    page.goto("about:blank")
    page.goto(server.url)
    page.get_by_label("Shipped cluster").select_option("one-node")
    page.wait_for_function("() => document.querySelector(\"[data-path='regions[0].name']\")?.value === 'lab'")
    field = page.locator("[data-path='regions[0].nodes[0].count']")
    field.fill("0")
    page.locator("#calculate").click()
    page.locator("[data-path='regions[0].nodes[0].count'][aria-invalid=true]").wait_for()
    assert "expected a whole number >= 1" in page.locator("#problem").inner_text()
    assert page.evaluate("document.activeElement.dataset.path") == "regions[0].nodes[0].count"


def test_objective_and_constraints_reach_the_search(page, server):
    """What is chosen under constraints and objective is in the problem of the plan; a fault opens its fold."""
    page.goto("about:blank")
    page.goto(server.url)
    page.get_by_label("Shipped cluster").select_option("two-campus")
    page.locator("[data-path='regions[1].name']").wait_for()
    page.get_by_label("Global batch").fill("16")
    page.get_by_label("Objective").select_option("money")
    page.locator("[data-path='constraints.forbidden_regions'] label", has_text="south").click()
    page.locator("[data-path='constraints.parity']").select_option("known")
    for packing in ("none", "int8"):
        page.locator(f"[data-path='constraints.compressions'] input[value={packing}]").check(force=True)
    page.locator("[data-path='constraints.local_steps'] input[value='1']").check(force=True)
    page.locator("#more-limits summary").click()
    page.locator("[data-path='constraints.first_stage_regions'] label", has_text="north").click()
    page.locator("#add-rule").click()
    page.locator("[data-path='constraints.stage_rules[0].only_regions'] label", has_text="north").click()
    page.locator("[data-path='constraints.egress_bytes_per_step.*']").fill("-5")
    page.locator("#calculate").click()
    page.locator("[data-path='constraints.egress_bytes_per_step.*'][aria-invalid=true]").wait_for()
    page.locator("[data-path='constraints.egress_bytes_per_step.*']").fill("5")
    with page.expect_request(re.compile("/api/jobs$")) as asked:
        page.locator("#calculate").click()
    sent = asked.value.post_data_json
    assert sent["objective"] == "money"
    assert sent["problem"]["constraints"] == {
        "memory_headroom": 0.08, "parity": "known", "compressions": ["none", "int8"], "local_steps": [1],
        "forbidden_regions": ["south"],
        "first_stage_regions": ["north"], "last_stage_regions": [], "forbidden_devices": [],
        "stage_rules": [{"stage": 0, "only_regions": ["north"], "never_regions": []}],
        "egress_bytes_per_step": {"*": 5e9},
    }  # fmt: skip
    page.locator("#tab-map[aria-selected=true]").wait_for()
    assert [point["region"]["used"] for point in chart_data(page, "map")[3] if point["name"] == "south"] == [0]
    page.reload()


def test_why_not_is_worked_out_on_the_page(page, server, plan_id):
    """One button; ideas, different plans and what a better cluster would bring appear as tables."""
    visit(page, server, plan_id, "strategy")
    button = page.locator("#explain")
    if button.count():
        button.click()
    page.locator("#why-not table").nth(2).wait_for()
    kept = server.request("GET", f"/api/plans/{plan_id}/explanation")[2]["answers"]
    rows = page.locator("#why-not tbody tr").count()
    assert rows == sum(len(kept[key]) for key in ("alternatives", "different_plans", "sensitivities"))


def test_regions_are_placed_on_the_map_by_hand(page, server):
    """A click adds a region there; a known place another; latencies follow from the distance."""
    page.goto("about:blank")
    page.goto(server.url)
    page.get_by_role("button", name="Start from nothing").click()
    page.locator("#chart-configure-map canvas").click(position={"x": 200, "y": 120})
    page.locator("[data-path='regions[0].latitude']").wait_for()
    page.get_by_label("Known place").select_option("Tokyo")
    page.locator("[data-path='latency_ms[0][1]']").wait_for()
    assert float(page.locator("[data-path='regions[1].latitude']").input_value()) == 35.68
    assert int(page.locator("#distances td.number").nth(1).inner_text().replace(",", "")) > 1000
    latency_ms = float(page.locator("[data-path='latency_ms[0][1]']").input_value())
    page.locator("[data-path='regions[0].latitude']").fill("35.0")
    page.locator("[data-path='regions[0].longitude']").fill("135.0")
    page.locator("[data-path='regions[0].longitude']").blur()
    page.get_by_role("button", name="Fill latencies from distances").click()
    assert float(page.locator("[data-path='latency_ms[0][1]']").input_value()) < latency_ms


def test_strategy_shows_the_plan_and_its_alternatives(page, server, plan_id):
    """As many stages as the plan, reasons in words, a radar within 0 and 1, a point for the plan."""
    visit(page, server, plan_id, "strategy")
    view = server.request("POST", f"/api/plans/{plan_id}/view", {})[2]
    page.locator("#reasons li").nth(4).wait_for()
    rows = page.locator("table").first.locator("tbody tr").count()
    assert rows == sum(len(stage["workers"]) for stage in view["stages"])
    values = [value for entry in chart_data(page, "radar")[0] for value in entry["value"]]
    assert len(values) >= 10 and all(0 <= value <= 1 for value in values)
    assert "plan" in {point["key"] for point in chart_data(page, "pareto")[0]}


def test_timeline_shows_the_schedule_and_a_measured_trace_beside_it(page, server, wide_plan, tmp_path):
    """Two bars a micro-batch and stage; messages on demand; a trace file opens below; zooming narrows the axis."""
    visit(page, server, wide_plan, "timeline")
    view = server.request("POST", f"/api/plans/{wide_plan}/view", {})[2]
    bars = chart_data(page, "gantt")[0]
    assert {"bubble", "exposed"} <= {bar[3] for bar in bars}
    assert sum(bar[3] in ("F", "B") for bar in bars) == 2 * view["micro_batches"] * len(view["stages"])
    assert max(bar[2] for bar in bars) == pytest.approx(view["estimate"]["step_s"])
    page.locator("#sends").check()
    page.wait_for_function(f"() => window.polygonCharts.get('gantt')?.getOption().series[0].data.length > {len(bars)}")
    trace = tmp_path / "measured.json"
    trace.write_text(json.dumps(server.request("GET", f"/api/plans/{wide_plan}/trace")[2]))
    page.locator("#measured-file").set_input_files(trace)
    page.wait_for_function("() => window.polygonCharts.has('measured')")
    measured = chart_data(page, "measured")[0]
    assert sum(bar[3] in ("F", "B") for bar in measured) == sum(bar[3] in ("F", "B") for bar in bars)
    page.locator("#measured-file").set_input_files({"name": "x.json", "mimeType": "x", "buffer": b"{}"})
    page.locator("#trace-error", has_text="no intervals").wait_for()


CHANGED = "k => document.querySelector(`[data-card=${k}] small`) !== null"
BACK = "([k, v]) => document.querySelector(`[data-card=${k}] b`)?.textContent === v"
CONTROLS = {
    "accumulation": ("2", "tokens"), "prefetch": ("1", "step"), "local_steps": ("3", "commTime"),
    "chunk_mb": ("1", "commTime"), "streams": ("1", "commTime"),
    "device_factors": ("5", "step"), "bandwidth_factor": ("1", "step"), "latency_factor": ("6", "step"),
    "price_factor": ("4", "cost"),
}  # fmt: skip


def test_each_slider_changes_the_right_number_to_what_the_server_says(page, server, wide_plan):
    """Moved, it changes its card to the API's number; 'As planned' brings the old one back."""
    moves_its_card(page, server, wide_plan, CONTROLS)


def test_overlap_slider_changes_what_is_not_hidden(page, server, plan_id):
    """The same law for overlap, on a plan in one region: over slow links its part is too small for a card."""
    moves_its_card(page, server, plan_id, {"overlap": ("0", "exposedTime")})


def moves_its_card(page, server, plan, controls):
    """Move every slider and hold its card to the API's number, then take it back."""
    visit(page, server, plan, "communication")
    for name, (position, key) in controls.items():
        before = card(page, key)
        with page.expect_response(re.compile("/view$")) as answer:
            page.locator(f"[data-change={name}]").evaluate(
                "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})) }", position
            )
        page.wait_for_function(CHANGED, arg=key)
        assert card(page, key) != before, name
        view = answer.value.json()
        shown = {"tokens": view["estimate"]["tokens_per_s"], "step": view["estimate"]["step_s"],
                 "cost": view["estimate"]["cost_usd"], "commTime": view["traffic"]["total_s"],
                 "exposedTime": view["traffic"]["exposed_s"]}[key]  # fmt: skip
        number, *unit = card(page, key).split()
        scale = {"ms": 1e-3, "µs": 1e-6}.get("".join(unit), 1.0)
        assert float(number.replace(",", "")) * scale == pytest.approx(shown, rel=0.01), name
        page.locator("#reset").click()
        page.wait_for_function(BACK, arg=[key, before])


def test_each_choice_changes_the_right_number(page, server, wide_plan):
    """Unpacked messages cross in more bytes; another collective takes another time; heat-map and formulas follow."""
    visit(page, server, wide_plan, "communication")
    for name, option, key in (("activations", "none", "across"), ("weight_gradients", "none", "across"),
                              ("algorithm", "central-server", "commTime")):  # fmt: skip
        before = card(page, key)
        page.locator(f"[data-change={name}]").select_option(option)
        page.wait_for_function(CHANGED, arg=key)
        assert card(page, key) != before, name
        page.locator("#reset").click()
        page.wait_for_function(BACK, arg=[key, before])
    page.locator("#formulas tbody tr").nth(9).wait_for()
    assert len(chart_data(page, "heat")[0]) > 0 and page.locator("#formulas tbody tr").count() == 10


def test_advice_covers_three_cases_and_can_be_tried(page, server, wide_plan):
    """Three groups of measures with numbers; 'Try' applies one to the controls."""
    visit(page, server, wide_plan, "communication")
    page.locator("#advice details").nth(2).wait_for()
    assert page.locator("#advice details").count() == 3
    page.locator("#advice details").nth(2).evaluate("e => e.open = true")
    page.locator("#advice details").nth(2).get_by_role("button").first.click()
    page.wait_for_function("() => document.querySelector('[data-card=step] small') !== null")


def test_deploy_shows_files_and_writes_them(page, server, plan_id):
    """Losses, a file's text, and a deployment with its check passed."""
    visit(page, server, plan_id, "deploy")
    page.locator("#file-text", has_text="train_batch_size").wait_for()
    page.locator("#deploy").click()
    page.locator("#deploy-result .good").wait_for()
    assert (server.folder / "deployments" / "gpt3-1-3b-deepspeed" / "ds_config.json").is_file()
    page.locator("#target").select_option("megatron")
    page.locator("#file-text", has_text="--pipeline-model-parallel-size").wait_for()


def test_the_keyboard_reaches_every_view(page, server, plan_id):
    """Arrow keys walk the tabs and move the focus; Home and End jump."""
    visit(page, server, plan_id, "map")
    page.locator("#tab-map").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#tab-strategy[aria-selected=true]").wait_for()
    page.wait_for_function("() => document.activeElement.id === 'tab-strategy'")
    page.keyboard.press("End")
    page.locator("#tab-deploy[aria-selected=true]").wait_for()
    page.wait_for_function("() => document.activeElement.id === 'tab-deploy'")


def test_chinese_and_the_theme(browser, server, plan_id):
    """A Chinese browser gets Chinese words; the buttons change language and theme, and both are remembered."""
    page = new_page(browser, server, locale="zh-CN")
    visit(page, server, plan_id, "strategy")
    assert page.locator("#tab-strategy").inner_text() == "并行策略"
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    page.locator("#language").click()
    page.locator("#tab-strategy", has_text="Strategy").wait_for()
    page.locator("#theme").click()
    visit(page, server, plan_id, "map")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("#tab-strategy").inner_text() == "Strategy"
    page.context.close()


SHOWN_TEXTS = """() => {
  const texts = [];
  const walk = (e) => {
    if (e.matches("pre, code, #language, .files, #earlier .name, #deployments")) return;
    for (const a of ["aria-label", "placeholder", "title", "aria-valuetext"]) texts.push(e.getAttribute(a) ?? "");
    for (const c of e.childNodes) if (c.nodeType === 3) texts.push(c.textContent); else if (c.nodeType === 1) walk(c);
  };
  walk(document.body);
  for (const chart of polygonCharts.values()) {
    const o = chart.getOption();
    for (const part of [...(o.xAxis ?? []), ...(o.yAxis ?? [])]) texts.push(part.name ?? "", ...(part.data ?? []));
    for (const series of o.series) texts.push(series.name ?? "");
    for (const radar of o.radar ?? []) texts.push(...radar.indicator.map((i) => i.name));
  }
  return texts.map(String);
}"""
PROPER = frozenset({
    "polygon", "DeepSpeed", "Megatron", "SkyPilot", "torchtitan", "torchrun", "dist_runner", "dist", "runner",
    "Perfetto", "AdamW", "SGD", "ZeRO", "YAML", "JSON", "PTAFM", "hostfile", "config", "plan", "json", "deployments",
    "token", "exact", "safe", "known", "any", "none", "topk", "powersgd", "int", "run", "small", "Ctrl", "MFU",
    "GPipe", "kWh", "GiB", "MiB", "Gbit", "USD", "PCIe", "TAH", "Quant", "arXiv", "INTELLECT", "DiLoCo", "Hadamard",
    "CPU", "start", "IPv", "all", "top", "train",
})  # fmt: skip
"""Words that Chinese texts keep: names of programs, formats, papers, options and units."""


def test_the_chinese_page_has_no_english_sentence(browser, server, wide_plan):
    """What every view shows, says to screen readers and writes on charts: only names, units and options are left."""
    page = new_page(browser, server, locale="zh-CN")
    known = server.request("GET", "/api/catalogue")[2]
    view = server.request("POST", f"/api/plans/{wide_plan}/view", {})[2]
    names = [*known["instances"], *known["links"], *(r["name"] for r in view["regions"])]
    names += [row["name"] for kind in ("devices", "models", "regions") for row in known[kind]]
    allowed = PROPER | {word for name in names for word in re.findall(r"[A-Za-z]{3,}", name)}
    left = set()
    for name in VIEWS:
        visit(page, server, wide_plan, name)
        if name == "communication":
            page.locator("[data-change=activations]").select_option("int4")
            page.wait_for_function(CHANGED, arg="across")
            page.locator("#advice details").first.wait_for()
        for text in page.evaluate(SHOWN_TEXTS):
            left |= {(word, text) for word in re.findall(r"[A-Za-z]{3,}", text) if word not in allowed}
    assert left == set()
    page.context.close()


def test_names_from_input_are_text_not_markup(page, server):
    """A region called like a script element shows as its name and runs nothing."""
    evil = "<img src=x onerror=window.pwned=1>"
    cluster = server.request("GET", "/api/instances/two-campus")[2]
    cluster["regions"][0]["name"] = evil
    problem = {"cluster": cluster, "model": "gpt3-1.3b", "batch": {"global_batch": 16, "seq_len": 512}}
    job = server.request("POST", "/api/jobs", {"problem": problem, "name": evil})[2]["id"]
    assert eventually(lambda: server.request("GET", f"/api/jobs/{job}")[2]["state"] == "done")
    for view in VIEWS:
        visit(page, server, job, view)
    assert page.evaluate("window.pwned") is None
