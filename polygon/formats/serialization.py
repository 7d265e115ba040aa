"""YAML and JSON as text: strict parsing, and writing that gives the same bytes for the same data.

Stricter than the standard parsers: a key that comes twice in one mapping is an error. More lenient in one point:
`1e3` is a number in YAML (YAML 1.2 says so, PyYAML follows 1.1 and calls it a text).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from polygon.domain.errors import InputError, Phrase, fault
from polygon.domain.message import Message

LINE_LENGTH = 120
"""A container that fits on a line of this length is written on one."""

MOST_NESTING = 5000
"""Deeper YAML is refused; a shorter text cannot be that deep."""

MOST_YAML = 2**24
"""Characters; more YAML takes minutes and gigabytes to read, JSON neither."""

MOST_VALUES = 2**23
"""Values of a YAML text, those too that an alias repeats; two matrices of a thousand regions are a quarter of it."""

MOST_SCALAR = 4000
"""Characters of one value: a number to the base of sixty, which YAML knows, takes the square of its length to read."""


_NO_TEXT = re.compile(r"[\x00-\x08\x0e-\x1f]")


def check_filled(text: str, where: str, expected: str) -> None:
    """Raise `InputError` for an empty file."""
    if not text.strip():
        raise fault(where, Phrase("an empty file"), expected)


def check_text(text: str, expected: str) -> None:
    """Raise `InputError` for what is empty or no text: a parser would only say at which character it was lost."""
    check_filled(text, "", expected)
    if _NO_TEXT.search(text):
        raise fault("", Phrase("a binary file"), expected)


def parse_json(text: str) -> Any:
    """Parse JSON; InputError names the line and column of a fault."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise InputError(Message("input.not_json_at", line=error.lineno, column=error.colno, why=error.msg)) from None
    except RecursionError:
        raise InputError(Message("input.not_json", why="nested too deeply")) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        double = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise fault("", Message("found.key_twice", key=double), "it once")
    return mapping


def parse_yaml(text: str, *, most_values: int = MOST_VALUES) -> Any:
    """Parse YAML (plain data only) of at most so many values; InputError names the line and column of a fault."""
    import yaml

    if len(text) > MOST_YAML:
        raise fault("", Message("found.yaml", characters=len(text)), Message("expected.yaml", most=MOST_YAML))
    try:
        if len(text) > MOST_NESTING or "*" in text:
            _check_size(text, most_values)
        return yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, str(error.problem)
        # PyYAML 6.0.4 and later have a limit of their own.
        why: str | Message = "nested too deeply" if "nesting depth" in problem else problem
        if mark is None:
            raise InputError(Message("input.not_yaml", why=why)) from None
        if "".join(text.split("\n")[mark.line : mark.line + 1])[mark.column :].startswith("\t"):
            why = Message("input.found", found="a tab", expected="spaces")
        raise InputError(Message("input.not_yaml_at", line=mark.line + 1, column=mark.column + 1, why=why)) from None
    except yaml.YAMLError as error:
        raise InputError(Message("input.not_yaml", why=" ".join(str(error).split()))) from None
    except ValueError as error:  # a tag that does not fit its value, as in !!int x
        raise InputError(Message("input.not_yaml", why=str(error))) from None
    except RecursionError:
        raise InputError(Message("input.not_yaml", why="nested too deeply")) from None


def _check_size(text: str, most_values: int) -> None:
    """Refuse nesting that would overflow the C loader's stack (it does not raise RecursionError), texts that grow by
    their aliases, and values that take long to read; in a time that the limits bound."""
    import yaml

    total, begun, sizes = 0, [], {}
    for event in yaml.parse(text, Loader=_loader()):
        if isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, total))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            sizes[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            total += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_SCALAR:
            found = Message("found.characters", characters=len(event.value))
            raise fault("", found, Message("expected.characters", most=MOST_SCALAR))
        total += 1
        if len(begun) > MOST_NESTING:
            raise InputError(Message("input.not_yaml", why="nested too deeply"))
        if total > most_values:
            raise fault("", Message("found.values"), Message("expected.values", most=most_values))


_LOADERS: list[Any] = []


def _loader() -> Any:
    """The safe loader (in C where it is there) with YAML 1.2 numbers, without double keys and without dates."""
    if _LOADERS:
        return _LOADERS[0]
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                if not isinstance(key_node.value, str):
                    continue
                if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                    mark, found = key_node.start_mark, Message("found.key_twice", key=key_node.value)
                    why = Message("input.found", found=found, expected="it once")
                    raise InputError(Message("input.not_yaml_at", line=mark.line + 1, column=mark.column + 1, why=why))
                seen.add(key_node.value)
            return dict(super().construct_mapping(node, deep))

    Loader.yaml_implicit_resolvers = {
        first: [resolver for resolver in resolvers if resolver[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    _LOADERS.append(Loader)
    return Loader


def format_json(data: Any) -> str:
    """JSON of plain data and numpy values: containers that fit on a line on one line, the rest indented by one.

    NaN and infinities, which JSON lacks, become null.
    """
    return _format(plain(data), 0) + "\n"


def format_yaml(data: Any) -> str:
    """YAML of plain data and numpy values: keys in their order, innermost lists and mappings on one line."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(
        plain(data), Dumper=dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=2**20
    )


def _format(data: Any, depth: int) -> str:
    """JSON text of plain data; lists of scalars always stay on one line."""
    flat = isinstance(data, list) and not any(isinstance(item, (list, dict)) for item in data)
    compact = json.dumps(data, ensure_ascii=False, allow_nan=False)
    if flat or not isinstance(data, (list, dict)) or len(compact) + depth <= LINE_LENGTH:
        return compact
    pad = "\n" + " " * (depth + 1)
    if isinstance(data, dict):
        items = [f"{json.dumps(str(k), ensure_ascii=False)}: {_format(v, depth + 1)}" for k, v in data.items()]
        return "{" + pad + f",{pad}".join(items) + "\n" + " " * depth + "}"
    return "[" + pad + f",{pad}".join(_format(item, depth + 1) for item in data) + "\n" + " " * depth + "]"


def plain(data: Any) -> Any:
    """Turn numpy values, tuples, mappings and messages into what JSON knows."""
    if data is None or isinstance(data, (str, bool, int)):
        return data
    if isinstance(data, float):
        return float(data) if math.isfinite(data) else None
    if isinstance(data, np.ndarray):
        return data.tolist() if data.dtype.kind in "iub" else plain(data.tolist())
    if isinstance(data, np.generic):
        return plain(data.item())
    if isinstance(data, Message):
        return plain(data.to_dict())
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    return [plain(item) for item in data]
