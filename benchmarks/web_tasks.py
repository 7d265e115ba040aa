"""Five tasks on the page, done by what is visible alone: docs/web-tasks.md.

    python benchmarks/web_tasks.py [--screenshots FOLDER]

Every step is a click, a choice or a word typed, found by its label as a person (or a screen reader) finds it. Prints
the steps of each task and what it found.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.patience import PATIENCE_S
from tests.web.conftest import Server

YAML = """\
name: three continents
regions:
- {name: virginia, latitude: 38.95, longitude: -77.45, egress_usd_per_gb: 0.02, nodes: [
    {device: a100-80gb, count: 4, devices_per_node: 8}, {device: v100-16gb, count: 2, devices_per_node: 4}]}
- {name: frankfurt, latitude: 50.11, longitude: 8.68, egress_usd_per_gb: 0.02, nodes: [
    {device: h100-sxm, count: 2, devices_per_node: 8}]}
- {name: tokyo, latitude: 35.68, longitude: 139.69, egress_usd_per_gb: 0.09, nodes: [
    {device: t4, count: 8, devices_per_node: 4}]}
links:
- {between: [virginia, frankfurt], latency_ms: 45, bandwidth_gbps: 5}
- {between: [virginia, tokyo], latency_ms: 75, bandwidth_gbps: 5}
- {between: [frankfurt, tokyo], latency_ms: 115, bandwidth_gbps: 5}
"""


class Hand:
    """Does one visible thing at a time, and counts."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.steps: list[str] = []

    def press(self, name: str, role: str = "button", *, exact: bool = False) -> None:
        """Click what has a name."""
        self.steps.append(f"press “{name}”")
        self.page.get_by_role(role, name=name, exact=exact).first.click()

    def choose(self, label: str, option: str) -> None:
        """Choose from a list."""
        self.steps.append(f"choose “{option}” as “{label}”")
        self.page.get_by_label(label).select_option(option)

    def tick(self, text: str, group: str) -> None:
        """Tick one of several."""
        self.steps.append(f"tick “{text}” of “{group}”")
        self.page.get_by_role("group", name=group).get_by_text(text, exact=True).click()

    def plan(self) -> None:
        """Have the plan made, and wait for it."""
        before = self.page.url
        self.press("Make the plan")
        self.page.wait_for_function("u => location.href !== u && !location.href.includes('job=')", arg=before)
        self.page.locator(".sentence span:not(.waiting)", has_text="limited by").wait_for()

    def figure(self, name: str) -> float:
        """Read a figure."""
        text = self.page.locator(".figure", has_text=name).locator("b").inner_text()
        return float(re.search(r"[\d.,]+", text)[0].replace(",", ""))  # type: ignore[index]


def limit(hand: Hand) -> str:
    """What limits this plan?"""
    return str(hand.page.locator(".sentence").inner_text())


def cheaper(hand: Hand) -> str:
    """Pay as little as possible."""
    before = hand.figure("Per billion tokens")
    hand.press("Goal and limits")
    hand.choose("Objective", "least money per step")
    hand.plan()
    return f"$ {before:g} -> $ {hand.figure('Per billion tokens'):g} per billion tokens"


def without_a_region(hand: Hand) -> str:
    """What if Frankfurt were not there? Compare."""
    hand.steps.append("open “Constraints”")
    hand.page.locator("summary", has_text="Constraints").click()
    hand.tick("frankfurt", "Regions not to use")
    hand.plan()
    hand.press("Compare", "tab")
    hand.choose("Add a plan", hand.page.get_by_label("Add a plan").locator("option").nth(1).inner_text())
    hand.page.locator("#terms tbody tr").first.wait_for()
    cells = hand.page.locator("#terms tbody tr").last.locator("td").all_inner_texts()
    return " | ".join(cell.strip() for cell in cells)


def share(hand: Hand) -> str:
    """Send it to a colleague."""
    hand.press("Copy link")
    return str(hand.page.url.split("#")[1])


def deploy(hand: Hand) -> str:
    """Write the files for torchrun."""
    hand.press("Deploy", "tab")
    hand.press("torchrun / dist_runner")
    hand.page.locator("#file-text").wait_for()
    hand.press("Deploy", exact=True)
    return str(hand.page.locator("#deploy-result .good").inner_text())


TASKS: list[Callable[[Hand], str]] = [limit, cheaper, without_a_region, share, deploy]


def main() -> int:
    """Do all and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screenshots", type=Path, help="folder for a picture after every task")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    path = next(p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name)))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        server = Server(Path(folder), anew=True)
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1366, "height": 900}, reduced_motion="reduce", locale="en-US")
        page.set_default_timeout(PATIENCE_S * 1e3)
        try:
            page.goto(server.url)
            page.get_by_role("button", name="Cluster").first.click()
            page.locator("#upload-cluster").set_input_files(
                {"name": "three.yaml", "mimeType": "text/yaml", "buffer": YAML.encode()}
            )
            page.get_by_text("88 devices in 3 regions").wait_for()
            Hand(page).plan()
            for task in TASKS:
                hand = Hand(page)
                found = task(hand)
                done = "; ".join(hand.steps) or "it stands there"
                print(f"{task.__doc__} {len(hand.steps)} steps: {done}\n  {found}")
                if args.screenshots:
                    args.screenshots.mkdir(parents=True, exist_ok=True)
                    page.wait_for_load_state("networkidle")
                    page.screenshot(path=args.screenshots / f"{task.__name__}.png")
        finally:
            browser.close()
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
