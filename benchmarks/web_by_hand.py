"""A cluster built in the browser alone, and the command line's plan of the file that the page saves.

    python benchmarks/web_by_hand.py

Virginia with 4 nodes of 8 A100 and 2 of 4 V100, Frankfurt with 2 of 8 H100, Tokyo with 8 of 4 T4, joined by 5 Gbit/s
at the latencies that the page fills in. Prints what the first sentence says while the network inside Frankfurt is
assumed, then, with 1600 Gbit/s there, both plans and whether they are the same in every number.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.patience import PATIENCE_S
from tests.web.conftest import Server

ROOT = Path(__file__).resolve().parents[1]
PLACES = [
    ("Virginia", [("a100-80gb", 4, 8), ("v100-16gb", 2, 4)]),
    ("Frankfurt", [("h100-sxm", 2, 8)]),
    ("Tokyo", [("t4", 8, 4)]),
]


def build(page: Any) -> None:
    """Regions and devices, as a person adds them."""
    page.locator("#fold-cluster").click()
    page.locator("#by-hand").click()
    page.locator("#tab-cluster[aria-selected=true]").wait_for()
    for number, (place, groups) in enumerate(PLACES):
        page.locator("[data-path=place]").select_option(place)
        page.locator("[role=tab][aria-selected=true]", has_text=place.lower()).wait_for()
        for at, (device, count, each) in enumerate(groups):
            own = f"cluster.regions[{number}].nodes[{at}]"
            if at:
                page.get_by_role("button", name="Add devices").click()
            page.locator(f"[data-path='{own}.device']").select_option(device)
            page.locator(f"[data-path='{own}.count']").fill(str(count))
            page.locator(f"[data-path='{own}.devices_per_node']").fill(str(each))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        page.locator(f"#region-tab-{a}").click()
        page.locator(f"[data-path='cluster.bandwidth_gbps[{a}][{b}]']").fill("5")
    page.locator("#fold-model").click()
    page.locator("[data-path=model]").select_option("llama2-7b")
    page.locator("[data-path='batch.global_batch']").fill("512")


def planned(page: Any) -> str:
    """Have the plan made; its id, once all is said of it."""
    before = page.url
    page.locator("#calculate").click()
    page.wait_for_function("u => location.href !== u && !location.href.includes('job=')", arg=before)
    page.locator(".sentence span:not(.waiting)", has_text="limited by").wait_for()
    return str(page.evaluate("new URLSearchParams(location.hash.slice(1)).get('plan')"))


def main() -> int:
    """Build, plan, compare and print."""
    from playwright.sync_api import sync_playwright

    path = next(p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name)))
    with tempfile.TemporaryDirectory() as name, sync_playwright() as play:
        folder = Path(name)
        server = Server(folder, anew=True)
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1366, "height": 900}, reduced_motion="reduce", locale="en-US")
        page.set_default_timeout(PATIENCE_S * 1e3)
        try:
            page.goto(server.url)
            build(page)
            planned(page)
            print("with what is assumed:", page.locator(".sentence").inner_text())
            page.locator("#tab-cluster").click()
            page.locator("#region-tab-1").click()
            page.locator("[data-path='cluster.regions[1].intra_region.bandwidth_gbps']").fill("1600")
            page.locator("#cluster-menu").click()
            with page.expect_download() as saved:
                page.locator("#export-yaml").click()
            saved.value.save_as(folder / "mine.yaml")
            shown = server.request("GET", f"/api/v1/plans/{planned(page)}")[2]
            print("with 1600 Gbit/s inside frankfurt:", page.locator(".sentence").inner_text())
        finally:
            browser.close()
            server.stop()
        command = [sys.executable, "-m", "polygon", "search", "--cluster", "mine.yaml", "--model", "llama2-7b",
                   "--global-batch", "512", "--seq-len", "2048", "--effort", "quick", "-o", "plan.json"]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'comm'}"}
        subprocess.run(command, check=True, cwd=folder, env=environment, capture_output=True)
        said = json.loads((folder / "plan.json").read_text("utf-8"))
    apart = [key for key in said.keys() | shown.keys() if key != "problem" and said.get(key) != shown.get(key)]
    same = f"other in {apart}" if apart else "the same in every number"
    page_s, command_s = shown["estimate"]["step_s"], said["estimate"]["step_s"]
    print(f"the page's plan takes {page_s!r} s, the command line's {command_s!r}; {same}")
    return bool(apart)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(main())
