"""Runs what a page of the documentation tells its reader to do, in an empty folder, one block after another.

    python -m tests.docs.page_commands docs/tutorial.md [BIN]      # BIN: folder of the `polygon` to use

A fence with title="NAME" is written to that file; every ```bash block is run by bash, every ```python block without a
title by Python. A ```text block says what the block before it printed: each of its lines must be there, in order, `...`
for anything. Blocks of other kinds (console) are for other machines, and are not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 900.0


class Block(NamedTuple):
    """A fenced block of a page."""

    kind: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All fenced blocks, in order."""
    return [Block(kind, title, text) for kind, title, text in FENCE.findall(page.read_text("utf-8"))]


def said(expected: str, printed: str) -> str | None:
    """The first line of `expected` that `printed` does not have in its turn; None where it has them all."""
    rest = [re.sub(r"\s+", " ", line).strip() for line in printed.splitlines()]
    for line in filter(None, (re.sub(r"\s+", " ", text).strip() for text in expected.splitlines())):
        pattern = re.compile(".*".join(re.escape(part) for part in line.split("...")))
        at = next((i for i, text in enumerate(rest) if pattern.fullmatch(text)), None)
        if at is None:
            return line
        rest = rest[at + 1 :]
    return None


def run_page(page: Path, folder: Path, programs: Path) -> list[str]:
    """Do what the page says; one line for everything that went wrong."""
    environment = dict(os.environ, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    faults, printed = [], ""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, "utf-8")
        elif block.kind in ("bash", "python"):
            command = ["bash", "-euo", "pipefail", "-c"] if block.kind == "bash" else [str(programs / "python"), "-c"]
            done = subprocess.run(
                [*command, block.text], cwd=folder, env=environment, capture_output=True, text=True,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
            printed = done.stdout + done.stderr
            if done.returncode:
                faults.append(f"{page.name}: exit {done.returncode} of\n{block.text}{printed[-1500:]}")
        elif block.kind == "text":
            missing = said(block.text, printed)
            if missing is not None:
                faults.append(f"{page.name}: no line {missing!r} in\n{printed[-1500:]}")
    return faults


def main() -> int:
    """Run the pages that are named."""
    programs = Path(sys.argv[-1]) if len(sys.argv) > 2 and Path(sys.argv[-1]).is_dir() else Path(sys.executable).parent
    wrong = 0
    for name in (word for word in sys.argv[1:] if word.endswith(".md")):
        with tempfile.TemporaryDirectory() as folder:
            faults = run_page(Path(name).resolve(), Path(folder), programs.resolve())
        print("\n".join([f"{name}: {len(faults)} things are not as the page says", *faults]), flush=True)
        wrong += len(faults)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
