"""The site: what pages say is what happens, parts of other files are there, and it builds without a warning."""

import os
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from polygon.cost.uncertainty import errors
from polygon.formats.serialization import parse_yaml
from tests.docs.page_commands import Block, blocks, run_page, said
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def hooks():
    """The site's hooks, which are no package."""
    spec = util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["tutorial.md", "overhead.md", "how-to/extend.md", "how-to/report.md"])
def test_a_page_does_what_it_says(page, tmp_path, monkeypatch):
    """Every command succeeds in an empty folder and prints what the page shows; the other how-tos: `make pages`."""
    paths = [str(ROOT), str(ROOT / "comm"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    assert any(block.kind in ("bash", "python") for block in blocks(DOCS / page))
    assert run_page(DOCS / page, tmp_path, Path(sys.executable).parent) == []


def test_the_page_of_predictions_says_the_catalogues_errors():
    """Every group of the table that the catalogue has, as it has it."""
    groups = errors()["groups"]
    text = (DOCS / "prediction.md").read_text("utf-8")
    said = re.findall(r"\| ([a-z0-9/-]+) \| (0\.\d{3}) \| (\d+) \|", text)
    assert len(said) >= 10
    assert {name: (float(error), int(runs)) for name, error, runs in said} == {
        name: (groups[name]["error"], groups[name]["runs"]) for name, _, _ in said
    }


def test_the_readmes_python_is_what_make_wheel_runs():
    """The block, line by line, is the program that is run with the wheel alone."""
    (program,) = (block.text for block in blocks(ROOT / "README.md") if block.kind == "python")
    assert (DOCS / "six_lines.py").read_text("utf-8").endswith(f'"""\n\n{program}')


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_extras_of_a_wheel_are_asked_for_by_its_name(page, tmp_path):
    """`pip install *.whl[train]` is no file to a shell: the brackets are a class of characters to it."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/polygon_train-1-py3-none-any.whl").touch()
    text = "\n".join(block.text for block in blocks(ROOT / page) if block.kind in ("bash", "console"))
    for line in re.findall(r"^pip (install .*)", text, re.MULTILINE):
        done = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' {line}"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert "*" not in done.stdout, line


def test_what_is_not_printed_is_missed():
    """Lines must come in their order; `...` is anything, and nothing else is."""
    printed = "step   1.5 s\nbound  no plan is faster\n"
    assert said("step ...\nbound no plan ...", printed) is None
    assert said("bound ...\nstep ...", printed) == "step ..."
    assert said("step 2...", printed) == "step 2..."
    assert said("ste", printed) == "ste"


def test_a_command_that_fails_is_told(tmp_path):
    """Its exit code and text; a file of a page is written before it is used; console blocks are not run."""
    page = tmp_path / "page.md"
    page.write_text('```yaml title="a.txt"\nhello\n```\n```bash\ncat a.txt; exit 3\n```\n```console\nrm a.txt\n```\n')
    assert blocks(page)[0] == Block("yaml", "a.txt", "hello\n")
    (fault,) = run_page(page, tmp_path, Path(sys.executable).parent)
    assert "exit 3" in fault and "hello" in fault and (tmp_path / "a.txt").exists()


def test_a_report_by_the_form_is_a_page_that_runs(tmp_path, monkeypatch):
    """Filled in with its own examples, fenced as the form says: files first, then commands, then what they print."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    form = parse_yaml((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text("utf-8"))
    report = ""
    for field in form["body"]:
        about = field["attributes"]
        text = about.get("placeholder", about["value"] if field.get("id") == "files" else "nothing").strip()
        fence = about.get("render")
        report += f"### {about.get('label')}\n\n" + (f"```{fence}\n{text}\n```\n\n" if fence else f"{text}\n\n")
    page = tmp_path / "report.md"
    page.write_text(report, "utf-8")
    assert [block.kind for block in blocks(page)] == ["yaml", "bash", "text", "console"]
    assert run_page(page, tmp_path, Path(sys.executable).parent) == []
    page.write_text(report.replace("146.8", "561.5"), "utf-8")
    (fault,) = run_page(page, tmp_path, Path(sys.executable).parent)
    assert "no line '* ZeRO-3 ... 561.5 GB'" in fault


def test_parts_of_other_files_are_shown():
    """The table that `make validate` rewrites, the glossary, the limits; a part that is gone is an error."""
    shown = hooks().shown
    assert "| **overall** | time |" in shown((DOCS / "accuracy.md").read_text(), "accuracy.md")
    assert "| region, node, device, link, cluster |" in shown((DOCS / "glossary.md").read_text(), "glossary.md")
    for name in ("limits.md", "benchmarks.md"):
        before = (DOCS / name).read_text()
        assert "<!-- part of" in before and "<!-- part of" not in shown(before, name)
    assert shown("[others](../../instances/README.md)", "how-to/a.md") == "others (`instances/README.md`)"
    assert (
        shown("[a](../web.md#b), [c](#d), [e](https://f)", "how-to/a.md") == "[a](../web.md#b), [c](#d), [e](https://f)"
    )
    with pytest.raises(ValueError, match="found no part 'nothing'"):
        shown("<!-- part of README.md: nothing -->", "a.md")


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    """Strictly: every link, anchor and page of the navigation is there; no page names a script or style elsewhere."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(list(DOCS.rglob("*.md"))) - 1
    for page in pages:
        text = page.read_text("utf-8")
        for tag in ("<script src=", '<link rel="stylesheet" href='):
            assert f'{tag}"http' not in text, page
    reference = (tmp_path / "site" / "reference.html").read_text("utf-8")
    import polygon

    assert all(f">{name}<" in reference or f".{name}" in reference for name in polygon.__all__)
