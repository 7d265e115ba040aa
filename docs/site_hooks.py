"""What mkdocs asks while it builds the site: parts of other files that pages show, and links out of docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"^<!-- part of (\S+): (.+) -->$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)#]*)(#[^)]*)?\)")
DOCS = "docs"


def linked(markdown: str, folder: str, page_folder: str) -> str:
    """Text of `folder` with its links as they are from `page_folder`; what lies outside docs/ is named, not linked."""

    def moved(match: re.Match[str]) -> str:
        words, path, anchor = match[1], os.path.normpath(os.path.join(folder, match[2])), match[3] or ""  # noqa: PTH118
        if not path.startswith(f"{DOCS}/"):
            return f"{words} (`{path}`)"
        return f"[{words}]({os.path.relpath(path, page_folder)}{anchor})"

    return LINK.sub(moved, markdown)


def part_of(file: str, which: str) -> str:
    """Text of a file between `<!-- which -->` and `<!-- /which -->`, or below the heading `which`.

    Raises
    ------
    ValueError
        Where the file has neither.
    """
    text = (ROOT / file).read_text("utf-8")
    marked = re.search(rf"<!-- {re.escape(which)} -->\n(.*?)<!-- /{re.escape(which)} -->", text, re.DOTALL)
    headed = re.search(rf"^#+ {re.escape(which)}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    found = marked or headed
    if found is None:
        raise ValueError(f"{file}: found no part {which!r}")
    return found[1].strip()


def shown(markdown: str, page: str) -> str:
    """A page with the parts of other files in their places.

    Parameters
    ----------
    page : str
        Its path within docs/.
    """
    here = os.path.dirname(f"{DOCS}/{page}")  # noqa: PTH120
    own = linked(markdown, here, here)
    return PART.sub(lambda m: linked(part_of(m[1], m[2]), os.path.dirname(m[1]), here), own)  # noqa: PTH120


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Hook of mkdocs."""
    return shown(markdown, page.file.src_uri)
