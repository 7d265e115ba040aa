"""The page's own source files."""

import re

from tests.web.conftest import ROOT

IMPORT = re.compile(r'^(?:import|export) (?!type )[^;]*?from "\./([\w-]+)";', re.MULTILINE)
"""What a file needs of another as soon as it is loaded: no types alone, no pane that comes when it is looked at."""


def test_no_file_needs_itself():
    """Imports make no circle, in which what a file finds of another depends on who was loaded first."""
    needs = {path.stem: set(IMPORT.findall(path.read_text("utf-8"))) for path in (ROOT / "web/src").glob("*.ts*")}
    assert needs["main"] > {"state", "rail"}
    while free := {name for name, others in needs.items() if not others & needs.keys()}:
        needs = {name: others for name, others in needs.items() if name not in free}
    assert not needs
