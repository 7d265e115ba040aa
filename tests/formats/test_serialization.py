"""Strict parsing and deterministic writing of YAML and JSON."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.errors import InputError
from polygon.formats.recognition import cluster_from_text
from polygon.formats.serialization import LINE_LENGTH, format_json, format_yaml, parse_json, parse_yaml

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(data=plain)
def test_json_gives_back_what_was_written(data):
    """Plain data survives its text."""
    assert parse_json(format_json(data)) == data


@given(data=st.dictionaries(st.text("abc", min_size=1), st.lists(st.floats(-1e30, 1e30) | st.integers())))
def test_yaml_gives_back_what_was_written(data):
    """Numbers survive YAML, whatever their exponent."""
    assert parse_yaml(format_yaml(data)) == data


def test_lines_stay_short_but_for_lists_of_numbers():
    """Small containers are one line, large ones are spread, lists of scalars never are."""
    text = format_json({"a": {"b": 1}, "rows": [[1] * 100, [2] * 100], "items": [{"n": i} for i in range(100)]})
    long_lines = [line for line in text.splitlines() if len(line) > LINE_LENGTH + 4]
    assert all(line.strip().startswith("[") for line in long_lines)
    assert ' "a": {"b": 1},' in text.splitlines()


def test_numpy_values_and_what_json_lacks():
    """Arrays and scalars become plain, NaN and infinity null."""
    data = {"i": np.int32(3), "f": np.float32(0.5), "a": np.array([[1, 2]]), "n": float("nan"), "t": (1, float("inf"))}
    assert parse_json(format_json(data)) == {"i": 3, "f": 0.5, "a": [[1, 2]], "n": None, "t": [1, None]}


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000.0), ("-2.5E-3", -0.0025), ("1.5", 1.5), ("0.5e+2", 50.0)])
def test_yaml_numbers_with_an_exponent(text, value):
    """`1e3` is a number, as YAML 1.2 has it."""
    assert parse_yaml(f"a: {text}") == {"a": value}


@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
def test_a_key_twice_is_an_error(parse):
    """The second value must not silently win."""
    with pytest.raises(InputError, match="found key 'a' twice in one mapping"):
        parse('{"a": 1, "b": {"a": 2}, "a": 3}')


@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
def test_deep_nesting_is_an_error_not_a_crash(parse):
    """A hostile file gives a message, not a traceback."""
    with pytest.raises(InputError, match="nested too deeply"):
        parse("[" * 300000 + "]" * 300000)
    with pytest.raises(InputError, match="nested too deeply"):
        parse_yaml("- " * 300000)


def test_yaml_objects_are_refused():
    """No code runs from a file."""
    with pytest.raises(InputError, match="not YAML"):
        parse_yaml("!!python/object/apply:os.getcwd []")


@pytest.mark.parametrize(
    "text",
    [
        "- 1\n" * 500_000, "x: [" + "[]," * 600_000, "- " * 1_000_000, "a: 1" + ":1" * 900_000,
        "a: &a [" + "1," * 9_000 + "]\nb: [" + "*a," * 9_000 + "]",
        "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 99)),
    ],
)  # fmt: skip
def test_hostile_text_is_refused_by_what_it_would_cost(text):
    """Too many values, those of aliases counted, and too long ones are refused while the text is gone through."""
    with pytest.raises(InputError):
        parse_yaml(text, most_values=20_000)


def test_aliases_of_a_small_text_are_read():
    """What is repeated is repeated; a number of thousands of digits is told of, not tripped over."""
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]\n") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    with pytest.raises(InputError, match="thousands of digits"):
        cluster_from_text("regions: [{name: a, nodes: [{device: t4, count: -0x" + "f" * 3900 + "}]}]", "x")


def test_yaml_keeps_the_letters_of_every_language():
    """What people read and edit has no escapes in it."""
    assert format_yaml({"name": "Zürich 東京"}) == "{name: Zürich 東京}\n"
