"""How much of the public names is documented, by numpydoc's sections, beside packages that people know.

    python -m benchmarks.docstrings [--missing] [PACKAGE...]        # default: polygon, pyvrp, pyjobshop

A package's public names are those of its `__all__`; of classes also the public methods and properties that the package
itself defines. Arguments are told by a section Parameters or Attributes, of a class in its own docstring or its
constructor's, or by lines below its fields.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

KNOWN = ("polygon", "pyvrp", "pyjobshop")
SECTION = re.compile(r"^\s*(Parameters|Attributes|Raises|Returns|Yields)\n\s*-{3,}\s*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Name:
    """A public name and what its docstring has."""

    name: str
    text: bool
    takes: bool
    """Whether it takes arguments."""
    parameters: bool
    """Whether these are told."""
    raises: bool


def public(package: str) -> Iterator[tuple[str, Any]]:
    """Public names of a package: functions, classes, methods and properties."""
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        found = getattr(module, name)
        if not callable(found):
            continue
        yield f"{package}.{name}", found
        if not inspect.isclass(found):
            continue
        own = (owner for owner in found.__mro__ if owner.__module__.split(".")[0] == package)
        members = {member: value for owner in reversed(list(own)) for member, value in vars(owner).items()}
        for member, value in members.items():
            if not member.startswith("_") and (isinstance(value, property) or callable(getattr(found, member))):
                yield f"{package}.{name}.{member}", value


def described(name: str, found: Any) -> Name:
    """What the docstring of a name has."""
    plain = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    text = inspect.getdoc(plain) or ""
    sections = set(SECTION.findall(text))
    takes = not isinstance(found, property) and bool(_arguments(plain))
    parameters = bool(sections & {"Parameters", "Attributes"})
    if inspect.isclass(plain) and not parameters:
        inside = inspect.getdoc(plain.__init__) or "" if "__init__" in vars(plain) else ""
        parameters = "Parameters" in SECTION.findall(inside) or (
            hasattr(plain, "__annotations__") and _fields_told(plain)
        )
    return Name(name=name, text=bool(text), takes=takes, parameters=parameters, raises="Raises" in sections)


def _arguments(found: Any) -> list[str]:
    try:
        names = list(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # of a compiled extension: its docstring begins with the signature
        said = re.match(r"\w+\((.*?)\)", inspect.getdoc(found) or "")
        names = re.findall(r"(\w+):", said[1]) if said else []
    return [name for name in names if name not in ("self", "cls", "args", "kwargs")]


def _fields_told(found: type) -> bool:
    """Whether fields of a dataclass or named tuple have lines of their own below them."""
    try:
        source = inspect.getsource(found)
    except OSError:  # of a compiled extension
        return False
    body = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(body, ast.ClassDef)
    return any(
        isinstance(here, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        for here, after in itertools.pairwise(body.body)
    )


def main() -> int:
    """Print the table, and on demand what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help=f"default: {', '.join(KNOWN)}")
    parser.add_argument("--missing", action="store_true", help="name what has no docstring, or arguments untold")
    args = parser.parse_args()
    print("| package | public names | with a docstring | that take arguments | with parameters told | with Raises |")
    print("|---|---|---|---|---|---|")
    for package in args.packages or KNOWN:
        try:
            names = [described(*pair) for pair in public(package)]
        except ModuleNotFoundError:
            print(f"| {package} | not installed | | | | |")
            continue
        taking = [name for name in names if name.takes]
        told = sum(name.parameters for name in taking)
        texts = sum(name.text for name in names)
        print(f"| {package} | {len(names)} | {texts / len(names):.0%} | {len(taking)} | {told / len(taking):.0%} | "
              f"{sum(name.raises for name in names)} |")  # fmt: skip
        if args.missing:
            for name in names:
                if not name.text or (name.takes and not name.parameters):
                    print(f"  {name.name}: {'no docstring' if not name.text else 'no Parameters'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
