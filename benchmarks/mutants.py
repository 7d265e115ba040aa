"""How many small faults the tests notice: mutants, one fault each, run against the tests of their folder.

    python benchmarks/mutants.py --count 100 --jobs 2 -o out/mutants.jsonl
    python benchmarks/mutants.py polygon/planning/routing.py --count 20

A mutant differs from the source in one operator, comparison, number, truth value, condition or name (min for max), or
lacks one term. Places are drawn from all of the given files by a hash of the seed and their line: who changes a line
changes what is drawn there, and nothing else. Each is tried in a copy of the tree: tests that import the module first
(or one that does), then (without `--own`) the others of the folder that mirrors it, up to the first that fails, which
must pass without the mutant. Results are kept, a JSON line each: who starts again with the same output goes on where
it ended, and with `--again` what survived is tried once more. With `--limit-s` a mutant that no test has failed within
so many seconds counts as one that survived. One that means the same as the source cannot be killed.

mutmut and cosmic-ray were looked at. mutmut calls every mutant through a function that reads the environment, which
numba cannot compile, and leaves constants of modules alone; cosmic-ray takes every place (no draw), runs one test
command for all modules, and changes the tree that one works in.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEFAULT = ("polygon/cost", "polygon/planning", "comm/polygon_comm", "runners/engine")
TESTS = {"polygon_comm": "comm", "engine": "runners", "lab_net": "lab", "probe_net": "lab"}
"""Folders of tests that are not called as the folder of the module."""
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip
COMPARISONS = {
    ast.Lt: ("<", "<=", ">="), ast.LtE: ("<=", "<", ">"), ast.Gt: (">", ">=", "<="), ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
NAMES = {"min": "max", "minimum": "maximum", "argmin": "argmax", "any": "all", "floor": "ceil"}
NAMES |= {second: first for first, second in NAMES.items()}
TEST_S = 240
"""A mutant hangs where one test takes longer; without a mutant none takes half of it."""


@functools.cache
def original(path: str) -> bytes:
    """A file as it was when the mutants were drawn."""
    return (ROOT / path).read_bytes()


@dataclass(frozen=True)
class Mutant:
    """One fault: what stands for the bytes from `start` to `end` of a file."""

    path: str
    kind: str
    start: int
    end: int
    text: str
    times: int = 0
    """How many places of the same words stand before it in the file."""

    def source(self) -> bytes:
        """The file with the fault in it."""
        source = original(self.path)
        return source[: self.start] + self.text.encode() + source[self.end :]

    def is_program(self) -> bool:
        """Whether Python takes it."""
        try:
            compile(self.source(), self.path, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return True

    def diff(self) -> str:
        """The lines that differ."""
        before, after = (text.decode().splitlines() for text in (original(self.path), self.source()))
        first = original(self.path)[: self.start].count(b"\n") + 1
        changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        return "\n".join([f"{self.path}:{first} ({self.kind})", *changed])

    def place(self) -> str:
        """A name that stays as long as the line does, its comment and indentation apart."""
        source = original(self.path)
        begin = source.rfind(b"\n", 0, self.start) + 1
        line = source[begin : source.find(b"\n", self.start)].decode()
        column = self.start - begin - len(line) + len(line.lstrip())
        return f"{self.path}:{line.strip().partition('  #')[0]}:{column}:{self.end - self.start}:{self.times}"

    def key(self) -> str:
        """The place, and what stands there."""
        return f"{self.place()}:{self.text}"


class Places(ast.NodeVisitor):
    """Collects the mutants of one file; messages, annotations, decorators and assertions are left alone."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.found = path, source, list[Mutant]()
        self._lines = [0, *(match.end() for match in re.finditer(b"\n", source))]

    def _span(self, node: Any) -> tuple[int, int]:
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def _add(self, kind: str, start: int, end: int, text: str) -> None:
        self.found.append(Mutant(self.path, kind, start, end, text))

    def _between(self, left: ast.expr, right: ast.expr, sign: str) -> tuple[int, int]:
        """Where a sign stands between two operands, whatever brackets and comments there are."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda match: b" " * len(match[0]), self.source[start:end])
        match = re.search(re.escape(sign).replace(r"\ ", r"\s+").encode(), gap)
        assert match is not None
        return start + match.start(), start + match.end()

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operator; one term of a sum or difference less."""
        if type(node.op) in OPERATORS:
            sign, other = OPERATORS[type(node.op)]
            (start, end), (first, last) = self._between(node.left, node.right, sign), self._span(node)
            self._add("operator", start, end, other)
            if isinstance(node.op, ast.Add | ast.Sub):
                self._add("dropped term", first, last, self.source[first:start].decode().rstrip())
            if isinstance(node.op, ast.Add):
                self._add("dropped term", first, last, self.source[end:last].decode().lstrip())
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Another operator."""
        if type(node.op) in OPERATORS:
            sign, other = OPERATORS[type(node.op)]
            start, end = self._between(node.target, node.value, sign + "=")
            self._add("operator", start, end, other + "=")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """The border moved by one, or the opposite."""
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            sign, *others = COMPARISONS[type(operator)]
            start, end = self._between(left, right, sign)
            for other in others:
                self._add("comparison", start, end, other)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """And for or."""
        sign, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._add("and/or", *self._between(left, right, sign), other)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without its sign."""
        if isinstance(node.op, ast.Not | ast.USub):
            length = 3 if isinstance(node.op, ast.Not) else 1
            start, end = self._span(node)
            self._add("sign", start, end, self.source[start + length : end].decode().lstrip())
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """One more or less; twice as much; the other truth value."""
        start, end = self._span(node)
        if isinstance(node.value, bool):
            self._add("truth value", start, end, str(not node.value))
        elif isinstance(node.value, int):
            self._add("number", start, end, str(node.value + 1))
            if node.value > 0:
                self._add("number", start, end, str(node.value - 1))
        elif isinstance(node.value, float):
            self._add("number", start, end, repr(2 * node.value or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        """The least for the greatest, any for all."""
        _, end = self._span(node.func)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in NAMES:
            self._add("name", end - len(name), end, NAMES[name])
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        """Always the first branch, or never."""
        for text in ("True", "False"):
            self._add("branch", *self._span(node.test), text)
        self.generic_visit(node)

    visit_IfExp = visit_If  # noqa: N815

    def visit_keyword(self, node: ast.keyword) -> None:
        """The value, but of `strict`: a promise like an assertion."""
        if node.arg != "strict":
            self.visit(node.value)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """What a condition leaves out is taken."""
        for condition in node.ifs:
            self._add("branch", *self._span(condition), "True")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Defaults and body."""
        for part in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The body."""
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Nothing."""

    visit_Raise = visit_JoinedStr = visit_Assert  # type: ignore[assignment]  # noqa: N815


def mutants_of(path: str) -> list[Mutant]:
    """Every mutant of a file."""
    source = original(path)
    places, seen = Places(path, source), Counter[str]()
    places.visit(ast.parse(source))
    found = list[Mutant]()
    for mutant in places.found:
        found.append(dataclasses.replace(mutant, times=seen[mutant.key()]))
        seen[mutant.key()] += 1
    return found


def files_of(paths: Iterable[str]) -> list[str]:
    """Python files in and under some paths, relative to the root."""
    found: list[str] = []
    for path in paths:
        place = ROOT / path
        if not place.exists():
            raise SystemExit(f"mutants: {path}: found no such file or folder, expected one below {ROOT}")
        inside = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        found += [str(file.relative_to(ROOT)) for file in inside]
    return list(dict.fromkeys(found))


def drawn(paths: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """So many places of the files, each with one of its mutants, in the order of the draw."""
    places: dict[str, list[Mutant]] = {}
    for path in files_of(paths):
        for mutant in mutants_of(path):
            places.setdefault(mutant.place(), []).append(mutant)
    numbers = {place: int(hashlib.sha256(f"{seed}:{place}".encode()).hexdigest(), 16) for place in places}
    order = (places[place] for place in sorted(places, key=lambda place: numbers[place]))
    chosen = (group[numbers[group[0].place()] % len(group)] for group in order)
    return list(itertools.islice((mutant for mutant in chosen if mutant.is_program()), count))


def test_folder(path: str) -> Path:
    """The folder of tests that mirrors a file's."""
    names = Path(path).parts[:-1]
    for name in reversed(names):
        folder = Path("tests", TESTS.get(name, name))
        if (ROOT / folder).is_dir():
            return folder
    raise SystemExit(f"mutants: {path}: found no folder of tests, expected tests/{names[-1]}")


def imports(file: Path, path: str) -> int:
    """How many times a file names a module."""
    stem, package = Path(path).stem, Path(path).parent.name
    return len(re.findall(rf"\b{package}(?:\.{stem}\b| import [^\n]*\b{stem}\b)", file.read_text("utf-8")))


def tests_of(path: str, *, own: bool) -> list[str]:
    """The folder's tests: that called as the module, those that import it, the others unless own ones alone.

    Where none imports it, those that import a module beside it that does.
    """
    stem, folder = Path(path).stem, ROOT / test_folder(path)
    named = {file: imports(file, path) for file in folder.glob("test_*.py")}
    if not any(named.values()):
        users = [str(file) for file in (ROOT / path).parent.glob("*.py") if imports(file, path)]
        named = {file: sum(imports(file, user) for user in users) for file in named}
    ranked = sorted(named, key=lambda file: (file.stem != f"test_{stem}", -named[file], file.name))
    if own and any(named.values()):
        ranked = [file for file in ranked if named[file]]
    return [str(file.relative_to(ROOT)) for file in ranked]


class Copy:
    """A copy of the tree in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written = 0
        self._sound = set[str]()
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def _write(self, path: str, source: bytes) -> None:
        """Write a file with a time of its own: Python takes what it compiled for new where time and size are equal."""
        self._written += 1
        (self.folder / path).write_bytes(source)
        os.utime(self.folder / path, (self._written, self._written))

    def run(self, tests: list[str], limit_s: float | None = None) -> tuple[str, str]:
        """`survived`, `killed` or `hung`, and the test that failed, or that there was no time for all."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        limit = ["-o", f"faulthandler_timeout={TEST_S}", "-o", "faulthandler_exit_on_timeout=true"]
        # An installed polygon is another tree: ranks and commands started by tests must take the copy's modules, too.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(self.folder), str(self.folder / "comm")])}
        process = subprocess.Popen(
            [*command, *limit, "--hypothesis-profile=unshrunk", *tests], cwd=self.folder, text=True,
            start_new_session=True, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        late = False
        try:
            talk, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # A test may have failed whose threads do not end: what was said counts.
            _end_group(process)
            late, (talk, _) = True, process.communicate()
        finally:
            if process.poll() is None or process.returncode:
                _end_group(process)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", talk, re.MULTILINE)
        if failed:
            return "killed", failed[1]
        if late or process.returncode == 0:
            return "survived", f"{limit_s:.0f} s of tests" if late else ""
        return "hung" if "Timeout (" in talk else "killed", talk.strip().rpartition("\n")[2]

    def try_(self, mutant: Mutant, *, own: bool, limit_s: float | None) -> tuple[str, str]:
        """What the tests say to a mutant; a test that fails without it says nothing."""
        self._write(mutant.path, mutant.source())
        try:
            outcome, failed = self.run(tests_of(mutant.path, own=own), limit_s)
        finally:
            self._write(mutant.path, original(mutant.path))
        if "::" in failed and failed not in self._sound:
            if self.run([failed.partition("[")[0]])[0] != "survived":
                raise SystemExit(f"mutants: {failed}: found that it fails without any mutant")
            self._sound.add(failed)
        return outcome, failed


def _end_group(process: subprocess.Popen[str]) -> None:
    """End what a run of tests may have left: ranks that wait for one that failed."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def tried(
    mutants: list[Mutant], jobs: int, output: Path, *, own: bool, limit_s: float | None
) -> Iterator[dict[str, Any]]:
    """Results as they come; each is in the output before the next one is begun."""
    with tempfile.TemporaryDirectory(prefix="polygon-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Copy] = queue.Queue()
        for job in range(jobs):
            copies.put(Copy(Path(folder, str(job))))

        def result(mutant: Mutant) -> dict[str, Any]:
            copy, start_s = copies.get(), time.monotonic()
            try:
                outcome, failed = copy.try_(mutant, own=own, limit_s=limit_s)
            finally:
                copies.put(copy)
            seconds = round(time.monotonic() - start_s, 1)
            said = {"outcome": outcome, "by": failed, "seconds": seconds, "diff": mutant.diff()}
            return {"key": mutant.key(), **said, **dataclasses.asdict(mutant)}

        try:
            with output.open("a", encoding="utf-8") as lines:
                for row in pool.map(result, mutants):
                    lines.write(json.dumps(row) + "\n")
                    lines.flush()
                    yield row
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main() -> int:
    """Draw mutants, try them, list those that survive."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=DEFAULT, help="files and folders (default: %(default)s)")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--own", action="store_true", help="only tests that import the module, not all of its folder")
    parser.add_argument("--limit-s", type=float, help="most seconds for a mutant's tests (default: all of them)")
    parser.add_argument("--again", action="store_true", help="try those again that survived")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "out" / "mutants.jsonl")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    # What a shell starts in the background ignores Ctrl-C and hands that on: tests that interrupt would find no effect.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mutants = drawn(args.paths, args.count, args.seed)
    before = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    known = {row["key"]: row for row in before if not (args.again and row["outcome"] == "survived")}
    left = [mutant for mutant in mutants if mutant.key() not in known]
    rows = [known[mutant.key()] for mutant in mutants if mutant.key() in known]
    for row in tried(left, args.jobs, args.output, own=args.own, limit_s=args.limit_s) if left else ():
        rows.append(row)
        print(f"{len(rows):4}  {row['outcome']:9}{row['seconds']:6.0f} s  {row['by']}\n{row['diff']}\n", flush=True)
    survived = [row for row in rows if row["outcome"] == "survived"]
    every, alive = Counter(row["path"] for row in rows), Counter(row["path"] for row in survived)
    print("Survivors:\n\n" + "\n\n".join(row["diff"] for row in survived) + "\n")
    for path, count in sorted(every.items()):
        print(f"{path:50}{alive[path]:4} of {count} survived")
    print(f"{len(survived)} of {len(rows)} mutants survived ({len(survived) / max(1, len(rows)):.0%})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
