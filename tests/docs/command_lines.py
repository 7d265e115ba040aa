"""The command lines of README and the pages, and whether their programs take them.

python -m tests.docs.command_lines      # lists all of them
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from polygon.__main__ import COMMANDS, module_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "instances" / "README.md", *(ROOT / "docs").rglob("*.md"))
OURS = re.compile(
    r"(?:make|polygon|python -m (?:polygon|runners|benchmarks)[\w.]*|python (?:runners|benchmarks)/\w+\.py"
    r"|torchrun|deepspeed(?= --))(?=\s|$).*"
)
PLACEHOLDERS = {"N": "2", "i": "0"}
"""Numbers for those that stand where numbers do."""
MISSING = "the following arguments are required"


def command_lines(page: Path) -> list[tuple[str, bool]]:
    """Those of fenced and indented blocks, and between backquotes; the latter may leave arguments out."""
    text = re.sub(r"\\\n\s*", "", page.read_text("utf-8"))
    found, fenced = list[tuple[str, bool]](), False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            match = OURS.match(re.sub(r"^\s*(\$ )?(chrt -f \d+ )?", "", line))
            found += [(match[0], False)] if match else []
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = (re.sub(r"^chrt -f \d+ ", "", " ".join(span.split())) for span in re.findall(r"`([^`]+)`", prose))
    return found + [(span, True) for span in spans if OURS.fullmatch(span)]


class Understood(BaseException):
    """Raised where a program has read its arguments."""


def module_of_line(words: list[str]) -> tuple[str, list[str]]:
    """The module that runs, and its arguments."""
    if words[0] == "polygon" or words[:3] == ["python", "-m", "polygon"]:
        rest = words[1:] if words[0] == "polygon" else words[3:]
        if not rest or rest[0].startswith("--"):
            return "polygon.__main__", rest
        return str(module_of(rest[0])), rest[1:]
    if words[:2] == ["python", "-m"]:
        name = words[2].removeprefix("polygon.")
        return (str(module_of(name)) if name in COMMANDS else words[2]), words[3:]
    at = next(n for n, word in enumerate(words) if re.fullmatch(r"(-m|--module)|(runners|benchmarks)/\w+\.py", word))
    if words[at].startswith("-"):
        return words[at + 1], words[at + 2 :]
    return words[at].removesuffix(".py").replace("/", "."), words[at + 1 :]


def fault_of(line: str, *, shortened: bool = False) -> str | None:
    """What the program named by a line, or make, says against its arguments; nothing is run."""
    words = shlex.split(line, comments=True)
    for end in ("||", ">", "|", ";"):
        words = words[: words.index(end)] if end in words else words
    words = [PLACEHOLDERS.get(word, word) for word in words]
    if words[0] == "make":
        rules = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
        targets = set(re.findall(r"^([a-z-]+|\.venv/[a-z.]+):", rules, re.MULTILINE))
        return None if set(words[1:]) <= targets else f"no target of {targets}"
    for word in words:
        if word.startswith("instances/") and not [*ROOT.glob(word)]:
            return f"found no {word}"
    module, rest = module_of_line(words)
    if not rest:
        return None if (ROOT / (module.replace(".", "/") + ".py")).is_file() else f"found no module {module}"
    parse: Any = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise Understood

    said = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.object(argparse.ArgumentParser, "parse_args", parsed),
            mock.patch.object(sys, "argv", [module, *rest]),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(said),
        ):
            warnings.simplefilter("ignore", RuntimeWarning)  # of runpy: what is imported already is run anew
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Understood:
        return None
    except SystemExit as left:
        fine = (left.code in (0, None) and {"--help", "--version"} & set(rest)) or (
            shortened and MISSING in said.getvalue()
        )
        return None if fine else f"exit {left.code}: {said.getvalue()[-300:]}"
    except Exception as error:  # noqa: BLE001 - it is the answer
        return repr(error)
    return f"{module} read no arguments"


def main() -> int:
    """List them, with what is said against them."""
    wrong = 0
    for page in sorted(PAGES):
        for line, shortened in command_lines(page):
            fault = fault_of(line, shortened=shortened)
            wrong += fault is not None
            print(f"{page.relative_to(ROOT)}: {line}" + (f"\n    {fault}" if fault else ""), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
