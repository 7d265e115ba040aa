"""The pictures of the page in docs/, taken anew: a real server, a real browser, real plans.

    python benchmarks/web_pictures.py [--folder docs]

Makes a plan for 80 devices in 10 regions and a variant of it, rehearses the plan, and takes every picture that
docs/web.md and README show. Chromium needs a font for Chinese (apt-get install fonts-noto-cjk); without one its letters
are boxes, so nothing is taken.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.patience import PATIENCE_S
from tests.web.conftest import Server

DESKTOP, TALL, PHONE = (1366, 900), (1366, 1240), (390, 844)
PICTURES: tuple[tuple[str, str, tuple[int, int], Literal["light", "dark"], str], ...] = (
    ("web_overview", "overview", DESKTOP, "light", "en-US"),
    ("web_cluster", "cluster", DESKTOP, "light", "en-US"),
    ("web_compare", "compare", TALL, "light", "en-US"),
    ("web_runs", "runs", TALL, "light", "en-US"),
    ("web_dark", "overview", DESKTOP, "dark", "zh-CN"),
    ("web_phone", "overview", PHONE, "dark", "en-US"),
)
"""File, pane, window, colours, language."""
STEPS = 30


def waited(server: Server, path: str, ended: Callable[[Any], bool]) -> Any:
    """What an address answers once that is so."""
    begin = time.monotonic()
    while not ended(row := server.request("GET", path)[2]):
        if time.monotonic() > begin + PATIENCE_S:
            raise TimeoutError(f"{path}: {row}")
        time.sleep(0.2)
    return row


def made(server: Server) -> tuple[str, str, str]:
    """A plan, a variant of it, and the name of a run of it that has ended."""
    cluster = server.request("GET", "/api/v1/instances/aws-regions")[2]
    problem = {"cluster": cluster, "model": "gpt3-6.7b", "batch": {"global_batch": 64, "seq_len": 1024}}
    plan = server.request("POST", "/api/v1/jobs", {"problem": problem, "effort": "thorough"})[2]["id"]
    row = waited(server, f"/api/v1/jobs/{plan}", lambda it: it["state"] not in ("queued", "running"))
    if not row["has_plan"]:
        raise RuntimeError(row["error"])
    wider = {"name": "twice the bandwidth", "changes": {"bandwidth_factor": 2.0}}
    other = server.request("POST", f"/api/v1/plans/{plan}/variants", wider)[2]["id"]
    asked = {"name": "gpt3-6-7b-aws-regions", "steps": STEPS, "ranks": 4}
    status, _, run = server.request("POST", f"/api/v1/plans/{plan}/rehearsals", asked)
    if status >= 400:
        raise RuntimeError(f"rehearsal: {run}")
    waited(server, f"/api/v1/runs/{run['name']}", lambda it: it["state"] not in ("running", "open"))
    return plan, other, run["name"]


def main() -> int:
    """Take all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parents[1] / "docs")
    args = parser.parse_args()
    fonts = subprocess.run(["fc-list", ":lang=zh"], capture_output=True, text=True, check=True).stdout
    if not fonts.strip():
        print("no font for Chinese is installed (apt-get install fonts-noto-cjk)", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    path = next(p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name)))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        server = Server(Path(folder), "--allow-rehearsals", anew=True)
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            plan, other, run = made(server)
            for name, view, (width, height), scheme, locale in PICTURES:
                page = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=scheme, locale=locale,
                    reduced_motion="reduce",
                ).new_page()  # fmt: skip
                page.set_default_timeout(PATIENCE_S * 1e3)
                more = f"&with={other}" if view == "compare" else f"&run={run}" if view == "runs" else ""
                page.goto(f"{server.url}/#plan={plan}&view={view}{more}")
                page.locator(f"#tab-{view}[aria-selected=true]").wait_for()
                page.locator("#plan-list li").first.wait_for(state="attached")
                if view != "cluster":
                    page.locator(".sentence span:not(.waiting)").first.wait_for()
                page.wait_for_load_state("networkidle")
                page.locator(".skeleton, #limits .waiting").first.wait_for(state="detached")
                page.screenshot(path=args.folder / f"{name}.png")
                print(args.folder / f"{name}.png")
                page.context.close()
        finally:
            browser.close()
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
