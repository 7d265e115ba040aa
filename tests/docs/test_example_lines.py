"""Command lines of pages that one looks things up in are run, or it is said why not."""

import re

import pytest

from tests.docs.command_lines import PAGES, ROOT
from tests.docs.example_lines import FOLLOWED, REASONS, fault_in, lines_of, prepare, reason
from tests.nightly import NIGHTLY

# Lines are looked for in the tests, not when every worker imports this: it takes the parsers of 60 programs.
BY_DAY = ("docs/objectives.md", "docs/web.md", "docs/file-formats.md", "docs/prediction.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that lines name."""
    made = tmp_path_factory.mktemp("examples")
    prepare(made, anew=False)
    return made


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in sorted(PAGES)] if NIGHTLY else BY_DAY)
def test_a_pages_lines_succeed_as_printed(page, folder):
    """One after the other; what one writes the next may read. All pages, by a shell: at night, and by `make pages`."""
    run = [line for line in lines_of(ROOT / page) if reason(line) is None]
    assert run or NIGHTLY
    assert [fault for line in run if (fault := fault_in(line, folder, anew=NIGHTLY))] == []


def test_every_reason_is_some_lines_and_names_what_is_there():
    """Who takes a line from a page takes its reason with it; tests that do the same on a smaller scale exist."""
    every = [line for page in PAGES for line in lines_of(page)]
    assert [pattern for pattern in REASONS if not any(re.fullmatch(pattern, line) for line in every)] == []
    for why in REASONS.values():
        for path in re.findall(r"(?:tests|benchmarks|docs)/[\w/.]+\w", why):
            assert (ROOT / path).exists(), path


def test_pages_that_are_followed_are_those_of_make_pages():
    """And no line of theirs in a block of bash is run twice."""
    (command,) = re.findall(r"tests\.docs\.page_commands (.*)", (ROOT / "Makefile").read_text())
    assert command.split() == [*FOLLOWED, "docs/how-to/*.md"]
    lines = lines_of(ROOT / "docs/how-to/extend.md")
    assert "polygon search --cluster mine.yaml --model gpt3-1.3b" not in " ".join(lines)


def test_a_line_that_fails_is_told(tmp_path):
    """With its exit code and what it said."""
    for anew in (False, True):
        assert fault_in("polygon show parity", tmp_path, anew=anew) is None
        said = str(fault_in("polygon show parties", tmp_path, anew=anew))
        assert "exit 2 of polygon show parties\npolygon" in said
